"""Models and budgets that are refused before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn

from lightning_memopt.errors import InfeasibleError, UnsupportedError
from lightning_memopt.graph.model import Kind
from lightning_memopt.session.resident import Named, resident_nbytes
from lightning_memopt.units import format_nbytes


def refuse_sharded(model: nn.Module) -> None:
    """Before anything runs: raise UnsupportedError for a model under FSDP.

    Its weights are in memory only while they are used, and no rebuild can start from them later.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a process that has not imported it has not used it
    kinds = tuple(getattr(fsdp, name) for name in ("FSDPModule", "FullyShardedDataParallel") if hasattr(fsdp, name))
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise UnsupportedError(
                f"{name or 'the model'} is sharded by {type(module).__name__}: its weights are in memory only while it runs, "
                "and rebuilds start from weights. Train it on one device without FSDP, or set MEMOPT_DISABLE=1."
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
    shares = {kind: resident_nbytes((t for t in counted if t[1] == kind), device) for kind in _RESIDENT}
    raise InfeasibleError(
        f"The budget of {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}, headroom {headroom}) is below the bytes "
        f"that are in memory before a step does anything: {needed} bytes ({format_nbytes(needed)}), of which "
        f"{', '.join(f'{nbytes} are {_RESIDENT[kind]}' for kind, nbytes in shares.items() if nbytes)}. This step was "
        "not run. Gradients and activations come on top: budget='min' takes the smallest plan and says what it needs.",
        budget_nbytes=budget_nbytes,
    )


_RESIDENT: dict[Kind, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer_state": "optimizer state",
    "input": "the batch",
}
