"""One rank of several, of which no other exists: its step is recorded with the model sharded by FSDP2.

The process group is torch's fake one, whose collectives return at once. The rest is torch's own: what a rank holds of each
weight, which weights are gathered when, and what its collectives read and write.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed, nn

from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.graph import HOOK, LATE_HOOK, Graph
from lightning_memopt.torch_private import FAKE, OpOverload, fake_store, tree_map
from lightning_memopt.units import format_nbytes

SHARDED = (
    "Several cards: FSDP2 shards the model over them, each repeated block as a unit, and the rest as one. Batch, length and "
    "peak are those of each card. NCCL's buffers come on top. Collectives take no time in these ratios."
)
"""What an answer about several cards says of them."""
_COLLECTIVES = "c10d::"
_COPY_IN = "fsdp::all_gather_copy_in"
"""The op that copies the shards of a unit into the buffer that is gathered. It returns its second argument, and a part of it,
which its schema does not say."""


@dataclass(frozen=True)
class StepOf:
    """The step of one card of several.

    ranks: number of cards.
    peak_nbytes: what torch's allocator reserves for the unmodified step.
    allocated_nbytes: what it gives out of that at the peak.
    smallest_nbytes: what it reserves for the smallest plan.
    purposes: purpose -> allocated bytes at the unmodified peak.
    """

    ranks: int
    peak_nbytes: int
    allocated_nbytes: int
    smallest_nbytes: int
    purposes: dict[str, int]

    def text(self, reserves: bool) -> str:
        """The step in words. `reserves`: whether the device's allocator reserves more than it gives out."""
        parts = ", ".join(f"{name} {format_nbytes(n)}" for name, n in sorted(self.purposes.items(), key=lambda e: -e[1]))
        where = "" if self.ranks == 1 else f" of each of {self.ranks} cards"
        beyond = f"; reserved beyond these: {format_nbytes(self.peak_nbytes - self.allocated_nbytes)}" if reserves else ""
        return (
            f"the unmodified step{where} needs {format_nbytes(self.peak_nbytes)}, the smallest plan "
            f"{format_nbytes(self.smallest_nbytes)}.\nAt the peak: {parts}{beyond}."
        )


def numbers_of(ranks: Sequence[int]) -> list[int]:
    """The numbers of cards that are asked about, each once, as they are given. Raises ConfigError if one makes no sense."""
    numbers = list(dict.fromkeys(ranks))
    if not numbers or any(n < 1 for n in numbers):
        raise ConfigError(f"ranks are {list(ranks)}; give numbers of cards, each 1 or more")
    return numbers


class UnfilledRank(Unfilled):
    """Within, collectives write tensors of which no byte is computed, and distributed tensors are taken apart first."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own ops, on the shard of this rank, come here, too
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made(self, func: OpOverload, args: tuple[Any, ...], kwargs: Any, inputs: Any) -> Any:
        name = func._schema.name
        if name.startswith(_COLLECTIVES):
            return self._communicated(func, args, kwargs)
        if name == _COPY_IN:
            _, gathered, _, numel, rank = args
            self.empties(gathered)
            return gathered.narrow(0, numel * rank, numel), gathered
        return super()._made(func, args, kwargs, inputs)

    def _communicated(self, func: OpOverload, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What a collective returns: the tensors that it writes, which are its first argument, and a work that is done.
        The fake group copies bytes, so it gets tensors that have none.
        """
        without = tree_map(lambda t: t.new_empty(0) if isinstance(t, torch.Tensor) else t, (args, kwargs))
        made = func(*without[0], **without[1])
        tree_map(lambda t: self.empties(t) if isinstance(t, torch.Tensor) else t, args[0])
        return (args[0], *made[1:]) if isinstance(made, tuple) else made


@contextlib.contextmanager
def one_rank_of(ranks: int) -> Iterator[None]:
    """Within, this process is rank 0 of so many. Raises ConfigError if it belongs to a process group already."""
    if not distributed.is_available():
        raise ConfigError("this build of torch has no torch.distributed: leave --ranks out, or install one that has it")
    if distributed.is_initialized():
        raise ConfigError(
            f"this process is in a process group, and {ranks} cards need one that is made up: ask in another process "
            "(memopt fit --ranks), or after torch.distributed.destroy_process_group()"
        )
    gc.collect()  # sharded modules are in cycles: those of an earlier recording would count as memory beside the step
    distributed.init_process_group(FAKE, store=fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()
        gc.collect()


def of_a_card(graph: Graph) -> Graph:
    """The graph as one card has it. Its collectives have freed their buffers when they are over: gloo may do so later, for
    which a budget on the CPU has a reserve.
    """
    ops = (replace(op, name=f"{HOOK}unit") if op.name == LATE_HOOK else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def shard(model: nn.Module, compute: torch.dtype | None = None, device: str = "cpu") -> None:
    """Shard a model over all ranks as users of FSDP2 do it: each repeated block is a unit, and all else is one more.

    compute: the type in which weights are gathered; gradients are then reduced in float32. None: all in the weights' own type.
    device: type of the device that the shards are on.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(device, (distributed.get_world_size(),))}
    if compute is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*blocks_of(model), model):
        fully_shard(module, **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the modules in its outermost lists of several."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += blocks_of(child)
    return list(dict.fromkeys(blocks))
