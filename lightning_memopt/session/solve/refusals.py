"""Models and budgets that are refused before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import InfeasibleError, UnsupportedError
from lightning_memopt.graph import RESIDENT
from lightning_memopt.native import counter_of
from lightning_memopt.record.gathered import units_of
from lightning_memopt.session.observe.resident import Named, resident_nbytes
from lightning_memopt.torch_private import fsdp_units, in_pipeline, is_plainly_sharded, places_of_weights
from lightning_memopt.trace import count_all
from lightning_memopt.units import format_nbytes


def refuse_sharded(
    model: nn.Module, device: torch.device, budget_nbytes: int | None, config: MemOptConfig, say: Callable[[str], None]
) -> None:
    """Before anything runs: raise UnsupportedError for a model that is split over processes, except by FSDP2.

    With FSDP2 (`fully_shard`), tensors are rebuilt while the weights of their unit are gathered; nothing is parked. A budget in
    bytes needs the native counter, which sees the buffers of collectives.
    """
    distributed = {name: sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor", "pipelining")}
    for name, module in model.named_modules():
        kind = _split(module, distributed["fsdp"])
        if kind is not None:
            raise UnsupportedError(
                f"{name or 'the model'} is split over processes by {kind}. Train it without that, or set MEMOPT_DISABLE=1."
            )
    units = units_of(model)
    if distributed["tensor"] is not None:
        _refuse_distributed_weights(model, units, distributed["tensor"])
    if distributed["pipelining"] is not None and in_pipeline(model):
        raise UnsupportedError(
            "the model is a stage of a pipeline (torch.distributed.pipelining). Train it without that, or set MEMOPT_DISABLE=1."
        )
    if not units:
        return
    for option in ("offload", "compress"):
        if getattr(config, option) != "none":
            raise UnsupportedError(
                f"{option}={getattr(config, option)!r}: the model is sharded by FSDP2, and its tensors are rebuilt but not "
                f"parked. Leave {option} out."
            )
    if budget_nbytes is None:
        return
    if on_host(device):
        count_all(say)
    if counter_of(device) is None:
        raise UnsupportedError(
            f"budget={config.budget!r}: the model is sharded by FSDP2, and the bytes of its collectives are counted on the CPU "
            "only, by the native counter. Set budget='min' for the smallest plan."
        )


def _split(module: nn.Module, fsdp: Any) -> str | None:
    """What splits a module over processes in a way that is refused; None where nothing does."""
    cls = type(module)
    if fsdp is not None and isinstance(module, getattr(fsdp, "FullyShardedDataParallel", ())):
        return "FullyShardedDataParallel (FSDP1); fully_shard (FSDP2) is supported"
    if cls.__module__.startswith("deepspeed.") or any(hasattr(p, "ds_id") for p in module._parameters.values()):
        return "DeepSpeed"
    for unit in fsdp_units(module):
        if not is_plainly_sharded(unit):
            return "FSDP2 on a mesh of more than one dimension (hybrid sharding), or with an extension of its all-gather"
    return None


def _refuse_distributed_weights(model: nn.Module, units: list[Any], tensor: Any) -> None:
    """Raise UnsupportedError for weights that are distributed tensors, but not those of a unit of FSDP2 (tensor parallel)."""
    sharded = {(id(module), name) for unit in units for module, name in places_of_weights(unit)}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if isinstance(p, tensor.DTensor) and (id(module), name) not in sharded:
                raise UnsupportedError(
                    f"{path or 'the model'} has a weight ({name}) that is a distributed tensor and that FSDP2 does not gather "
                    "(tensor parallel). Train it without that, or set MEMOPT_DISABLE=1."
                )


def refuse_hopeless(tensors: Iterable[Named], device: torch.device, budget_nbytes: int, headroom: int) -> None:
    """Raise InfeasibleError where the resident tensors alone exceed the budget, so no plan can keep it. Nothing has run yet.

    Gradients, and the optimizer state for them, are not counted: only the first backward shows which parameters get one (an
    expert may not be chosen, a head may not be trained, gradients may be freed at once). See foresight.py.
    """
    counted = [t for t in tensors if t[1] != "gradient"]
    needed = resident_nbytes(counted, device)
    if needed <= budget_nbytes - headroom:
        return
    shares = {kind: resident_nbytes((t for t in counted if t[1] == kind), device) for kind in RESIDENT}
    raise InfeasibleError(
        f"The budget of {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}, headroom {headroom}) is below the bytes "
        f"that are in memory before a step does anything: {needed} bytes ({format_nbytes(needed)}), of which "
        f"{', '.join(f'{nbytes} are {RESIDENT[kind]}' for kind, nbytes in shares.items() if nbytes)}. This step was "
        "not run. Gradients and activations come on top: budget='min' takes the smallest plan and says what it needs.",
        budget_nbytes=budget_nbytes,
    )
