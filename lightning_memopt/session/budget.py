"""The budget on a device, what is in it before a step begins, and what is refused before anything is run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig, free_nbytes
from lightning_memopt.errors import ConfigError, InfeasibleError, PlanMismatchError, UnsupportedError
from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.graph.model import Kind
from lightning_memopt.native import counter
from lightning_memopt.plan import Plan, read_plan
from lightning_memopt.plan.forms import LOSSLESS, codec_of
from lightning_memopt.record import is_plain
from lightning_memopt.torch_private import tree_leaves
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


def bytes_on(device: torch.device, config: MemOptConfig) -> int:
    """`budget_on` for who chooses a batch size by it. Raises ConfigError for "min"."""
    nbytes = budget_on(device, config)
    if nbytes is None:
        raise ConfigError("budget='min' fits any batch size to itself. Give the bytes that a step may use.")
    return nbytes


def device_of(model: nn.Module) -> torch.device:
    """That of the model's parameters and buffers; the CPU for one without any."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


EVERY = 16
"""Planned steps from one look at what other programs leave to the next."""


class Neighbours:
    """Watches what other programs leave of a device while planned steps run, by the CUDA runtime, which knows slices."""

    def __init__(self, device: torch.device, budget_nbytes: int | None) -> None:
        self.device, self.budget_nbytes = device, budget_nbytes
        self._steps = 0
        self._said = False

    def step(self) -> None:
        """A planned step is over. Warns once when the budget is no longer there, and again if that happens again."""
        self._steps += 1
        if self._steps % EVERY or self.budget_nbytes is None:
            return
        free = free_nbytes(self.device)
        short = free is not None and free < self.budget_nbytes
        if short and not self._said:
            warnings.warn(
                f"MemOpt: other programs now leave {free} bytes ({format_nbytes(free or 0)}) of {self.device} to this one, "
                f"below the budget of {self.budget_nbytes} bytes ({format_nbytes(self.budget_nbytes)}): a step may run out of "
                "memory. Lower the budget, or end what else runs on this device.",
                stacklevel=2,
            )
        self._said = short


def read_given(
    path: str | os.PathLike[str], device: torch.device, budget_nbytes: int | None, config: MemOptConfig
) -> tuple[Plan, Graph]:
    """The plan of a file. Raises PlanMismatchError for another device, InfeasibleError above the budget, ConfigError where it
    encodes with errors and nobody asked for that, or rebuilds and `recompute=False` says that nothing may be.
    """
    plan, graph = read_plan(path)
    if graph.device != device.type:
        raise PlanMismatchError(
            f"The plan {path} was made for {graph.device}, the model is on {device.type}. Make a plan there."
        )
    if budget_nbytes is not None and config.budget != "auto" and plan.predicted.needed_nbytes > budget_nbytes:
        raise InfeasibleError(
            f"The plan {path} peaks at {plan.predicted.needed_nbytes} bytes, above the budget of {budget_nbytes}. Give it that "
            "budget, or leave plan= out.",
            smallest_nbytes=plan.predicted.needed_nbytes,
            budget_nbytes=budget_nbytes,
        )
    lossy = {codec_of(life.form) for life in plan.lives if life.how == "fetch"} - LOSSLESS
    if lossy and config.compress in ("none", "lossless"):
        raise ConfigError(
            f"The plan {path} keeps tensors encoded with errors ({', '.join(sorted(lossy))}), and compress is "
            f"{config.compress!r}. Set compress='lossy' to allow it, or leave plan= out."
        )
    if not config.recompute and any(life.how == "rebuild" for life in plan.lives):
        raise ConfigError(
            f"The plan {path} runs {plan.predicted.rebuilt_ops} ops a second time, and recompute=False allows none. Set "
            "recompute=True, or leave plan= out."
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
    yield from _state_tensors(optimizers)
    for t in tree_leaves(batch):
        if isinstance(t, torch.Tensor):
            yield t, "input", "batch"


def _state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Named]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for t in tree_leaves(state):
                if isinstance(t, torch.Tensor):
                    yield t, "optimizer_state", "optimizer state"


def resident_nbytes(tensors: Iterable[Named], device: torch.device) -> int:
    """Bytes of the distinct storages among them on the device."""
    seen = {}
    for t, _, _ in tensors:
        if t.device.type == device.type and t.layout is torch.strided:
            storage = t.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def foreign_nbytes(tensors: Iterable[Named]) -> int:
    """Bytes of the distinct storages among them on the CPU that are not of torch's allocator: numpy's, shared, of a file. 0
    without the native counter.
    """
    seen, counts = {}, counter()
    if counts is None:
        return 0
    for t, _, _ in tensors:
        if t.device.type == "cpu" and is_plain(t):
            storage = t.untyped_storage()
            if not counts.counts(storage):
                seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def refuse_sharded(model: nn.Module) -> None:
    """Before anything runs: raise UnsupportedError for a model under FSDP.

    A weight is there only while it is used, and no rebuild can start from it later.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has not used it
    kinds = tuple(getattr(fsdp, name) for name in ("FSDPModule", "FullyShardedDataParallel") if hasattr(fsdp, name))
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise UnsupportedError(
                f"{name or 'the model'} is sharded by {type(module).__name__}: its weights are in memory only while it runs, "
                "and rebuilds start from weights. Train it on one device without FSDP, or set MEMOPT_DISABLE=1."
            )


def refuse_hopeless(tensors: Iterable[Named], device: torch.device, budget_nbytes: int, headroom: int) -> None:
    """Raise InfeasibleError where what is there in every step is above the budget whatever the plan: nothing has run yet.

    Gradients, and the optimizer state made for them, are not counted: which parameters get one shows in the first backward
    (an expert that is not chosen, a head that is not trained, gradients that are freed as they come). See foresight.py.
    """
    found = [t for t in tensors if t[1] != "gradient"]
    needed = resident_nbytes(found, device)
    if needed <= budget_nbytes - headroom:
        return
    shares = {kind: resident_nbytes((t for t in found if t[1] == kind), device) for kind in _RESIDENT}
    raise InfeasibleError(
        f"The budget of {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}, headroom {headroom}) is below what is there "
        f"before a step does anything: {needed} bytes ({format_nbytes(needed)}), of which "
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


def state_made(graph: Graph, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> int:
    """Bytes of optimizer state that there is after a step beyond what its graph began with."""
    before = sum(t.nbytes for t in graph.tensors if t.kind == "optimizer_state" and t.born_at == BEFORE)
    return max(0, resident_nbytes(_state_tensors(optimizers), device) - before)
