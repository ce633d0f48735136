"""The budget on a device, what is in it before a step begins, and whether a plan that was given is within it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_memopt.config import MemOptConfig, free_nbytes
from lightning_memopt.errors import InfeasibleError, PlanMismatchError
from lightning_memopt.graph import Graph
from lightning_memopt.graph.model import Kind
from lightning_memopt.plan import Plan, read_plan
from lightning_memopt.units import format_nbytes

Named = tuple[torch.Tensor, Kind, str]


def budget_on(device: torch.device, config: MemOptConfig) -> int | None:
    """The budget in bytes on this device, lowered to what other programs leave of it; None for "min"."""
    budget = config.budget_nbytes(device)
    free = free_nbytes(device)
    if budget is None or free is None or budget <= free:
        return budget
    warnings.warn(
        f"MemOpt: the budget is {budget} bytes ({format_nbytes(budget)}), but other programs leave {free} bytes "
        f"({format_nbytes(free)}) of {device}; planning for those.",
        stacklevel=2,
    )
    return free


def read_given(
    path: str | os.PathLike[str], device: torch.device, budget_nbytes: int | None, config: MemOptConfig
) -> tuple[Plan, Graph]:
    """The plan of a file. Raises PlanMismatchError for another device, InfeasibleError above the budget."""
    plan, graph = read_plan(path)
    if graph.device != device.type:
        raise PlanMismatchError(
            f"The plan {path} was made for {graph.device}, the model is on {device.type}. Make a plan there."
        )
    if budget_nbytes is not None and config.budget != "auto" and plan.predicted_peak_bytes > budget_nbytes:
        raise InfeasibleError(
            f"The plan {path} peaks at {plan.predicted_peak_bytes} bytes, above the budget of {budget_nbytes}. Give it that "
            "budget, or leave plan= out.",
            smallest_nbytes=plan.predicted_peak_bytes,
            budget_nbytes=budget_nbytes,
        )
    return plan, graph


def resident_tensors(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: Any) -> Iterator[Named]:
    """Everything the budget counts before a step begins: parameters, buffers, gradients, optimizer state, the batch."""
    for name, p in model.named_parameters():
        yield p, "parameter", name
        if p.grad is not None:
            yield p.grad, "gradient", f"{name}.grad"
    for name, b in model.named_buffers():
        yield b, "buffer", name
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for t in tree_leaves(state):
                if isinstance(t, torch.Tensor):
                    yield t, "optimizer_state", "optimizer state"
    for t in tree_leaves(batch):
        if isinstance(t, torch.Tensor):
            yield t, "input", "batch"


def resident_nbytes(tensors: Iterable[Named], device: torch.device) -> int:
    """Bytes of the distinct storages among them on the device."""
    seen = {}
    for t, _, _ in tensors:
        if t.device.type == device.type and t.layout is torch.strided:
            storage = t.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())
