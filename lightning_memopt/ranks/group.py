"""Which ranks train a model together, as torch's wrappers of the model say."""

from __future__ import annotations

import collections
import os
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt.ranks.board import Board
from lightning_memopt.ranks.ranks import Ranks
from lightning_memopt.torch_private import FAKE, JOIN_CONFIG, fsdp_units, gradient_of

_runs: collections.Counter[str] = collections.Counter()
"""How many runs each process group has had in this process. All ranks count alike, so posts of two runs never mix."""


def size_here() -> int:
    """How many processes of the group are on this machine, as their launcher says; all of them if it does not."""
    if not several_processes():
        return 1
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdigit() else distributed.get_world_size()


def several_processes() -> bool:
    """Whether this process is one of several that compute together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def rank_in_all() -> int:
    """The rank of this process among all; where there is no process group (yet, or any longer), as its launcher says, or 0."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    told = os.environ.get("RANK", "")
    return int(told) if told.isdecimal() else 0


def rank_and_ranks(model: nn.Module) -> tuple[int, list[int]]:
    """(this rank, those that train the model together): all ranks where no DistributedDataParallel says so."""
    rank = rank_in_all()
    if not several_processes():
        told = os.environ.get("WORLD_SIZE", "")
        return rank, list(range(max(rank + 1, int(told) if told.isdecimal() else 1)))
    wrapper = wrapper_of(model)
    if wrapper is None:
        return rank, list(range(distributed.get_world_size()))
    return rank, distributed.get_process_group_ranks(wrapper.process_group)


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that train this model together: those of the DistributedDataParallel around it or in it, else all ranks where
    a part of it is sharded by `fully_shard`. None where this rank trains the model by itself.
    """
    if not several_processes():
        return None
    wrapper = wrapper_of(model)
    group: distributed.ProcessGroup | None
    if wrapper is not None:
        group = wrapper.process_group
    elif any(fsdp_units(module) for module in model.modules()):
        group = distributed.group.WORLD
    else:
        group = None
    if group is None or distributed.get_backend(group) == FAKE:  # there is nobody to meet
        return None
    size = distributed.get_world_size(group)
    if size < 2:
        return None
    store, run = group.get_group_store(), _runs[group.group_name]
    _runs[group.group_name] += 1
    board = Board(store, f"{group.group_name}/{run}", distributed.get_rank(group), size)
    return Ranks(board, distributed.get_process_group_ranks(group))


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel around this model, or in it; None where there is none."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return module
    running = DistributedDataParallel._active_ddp_module  # the wrapper whose forward is running now
    return running if running is not None and any(m is model for m in running.modules()) else None


def joins(model: nn.Module) -> bool:
    """Whether the model runs inside of `Join`: some ranks may have no batch, and never come to a forward or an update."""
    wrapper = wrapper_of(model)
    return wrapper is not None and bool(getattr(wrapper, JOIN_CONFIG).enable)


def buckets_nbytes(model: nn.Module) -> int:
    """Bytes of the buckets of DistributedDataParallel, in which gradients are reduced; 0 where gradients are views of them,
    and counted as gradients.
    """
    if not several_processes():
        return 0
    wrapper = wrapper_of(model)
    if wrapper is None:
        return 0
    sizes: dict[str, Any] = wrapper._get_ddp_logging_data()
    views = wrapper.gradient_as_bucket_view and any(gradient_of(p) is not None for p in wrapper.parameters())
    return 0 if views else sum(int(nbytes) for nbytes in str(sizes.get("bucket_sizes", "")).split(",") if nbytes.strip())


def rebuild_buckets(model: nn.Module) -> bool:
    """Before a forward: let DistributedDataParallel make its buckets anew where that forward would begin with it.
    Returns whether it did.

    It does so once, in the order in which the first gradients came. No later step has these ops, so no observed step should.
    """
    wrapper = wrapper_of(model) if several_processes() else None
    if wrapper is None or joins(model):  # in `Join`, another collective comes first
        return False
    return bool(wrapper.reducer._rebuild_buckets())
