"""Tensors that are in memory before a step begins and after it: parameters, buffers, gradients, optimizer state, the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_memopt import native
from lightning_memopt.device.places import is_on, on_host
from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.graph.model import Kind
from lightning_memopt.record import is_plain
from lightning_memopt.runtime.parked_states import is_any_parked
from lightning_memopt.runtime.state_dicts import values_of
from lightning_memopt.runtime.tiers.shelf import AWAY, is_away
from lightning_memopt.session.forward.leaves import leaves_of
from lightning_memopt.session.observe.graphs import pieces
from lightning_memopt.torch_private import gradient_of, local_tensor

Named = tuple[torch.Tensor, Kind, str]
"""A tensor, its kind, and its name."""


def resident_tensors(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: Any) -> Iterator[Named]:
    """Everything the budget counts before a step begins: parameters, buffers, gradients, optimizer state, the batch.

    Of a distributed tensor, the part in this process.
    """
    for name, p in model.named_parameters():
        yield local_tensor(p), "parameter", name
        gradient = gradient_of(p)
        if gradient is not None:
            yield local_tensor(gradient), "gradient", f"{name}.grad"
    for name, b in model.named_buffers():
        yield b, "buffer", name
    yield from state_tensors(optimizers)
    yield from batch_tensors(batch)


def batch_tensors(batch: Any) -> Iterator[Named]:
    for t in leaves_of(batch):
        if isinstance(t, torch.Tensor):
            yield t, "input", "batch"


def state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Named]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for t in leaves_of(state if type(state) is dict else values_of(state)):
                if isinstance(t, torch.Tensor):
                    yield local_tensor(t), "optimizer_state", "optimizer state"


def sizes(tensors: Iterable[Named], device: torch.device) -> list[int]:
    """Bytes of each of the distinct storages of these tensors on the device. What is away is not there."""
    seen = {}
    for t, _, _ in tensors:
        if is_on(device, t.device) and t.layout is torch.strided:
            storage = t.untyped_storage()
            if storage._cdata not in AWAY:
                seen[storage._cdata] = storage.nbytes()
    return list(seen.values())


def away_nbytes(model: nn.Module, gradients: bool = True) -> int:
    """Bytes of the weights of a model that are in a tier now, and of its gradients, if any may be parked."""
    if not AWAY:
        return 0
    there = [g for p in model.parameters() if (g := gradient_of(p)) is not None and is_plain(g)] if gradients else []
    return sum(t.nbytes for t in (*model.parameters(), *there) if is_away(t))


def away_state(optimizers: Iterable[torch.optim.Optimizer]) -> list[int]:
    """Bytes of each tensor of optimizer state that is in a tier now, so that its storage is empty."""
    if not is_any_parked():
        return []
    return [t.nbytes for t, _, _ in state_tensors(optimizers) if t.nbytes and not t.untyped_storage().nbytes()]


def resident_nbytes(tensors: Iterable[Named], device: torch.device) -> int:
    """Bytes of the distinct storages of these tensors on the device."""
    return sum(sizes(tensors, device))


def foreign_nbytes(tensors: Iterable[Named], counts: native.Counter | None) -> int:
    """Bytes of the distinct CPU storages of these tensors that torch's allocator did not allocate: numpy's, shared ones, those
    of a file. 0 without `counts`, the native counter.
    """
    if counts is None:
        return 0
    seen = {}
    for t, _, _ in tensors:
        if on_host(t.device) and is_plain(t):
            storage = t.untyped_storage()
            if storage._cdata not in AWAY and not counts.counts(storage):
                seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def state_made(
    graph: Graph, optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of each tensor of optimizer state after a step, beyond the state with which its graph began: of what is on the
    device, and of what has left for a tier.
    """
    before = [t.nbytes for t in graph.tensors if t.kind == "optimizer_state" and t.born_at == BEFORE]
    now, away = sizes(state_tensors(optimizers), device), away_state(optimizers)
    made = max(0, sum(now) - sum(before))
    left = max(0, sum(now) + sum(away) - sum(before)) - made
    return pieces(made, (Counter(now) - Counter(before)).elements()), pieces(left, away)
