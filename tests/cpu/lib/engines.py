"""Planned steps by either engine, and everything that can be seen of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_memopt.graph import Graph
from lightning_memopt.native import engine
from lightning_memopt.plan import Life
from lightning_memopt.record.tensors import bytes_of
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.runtime.engine.rejoining import SPREAD
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.session.tiling import why_not
from tests.cpu.lib.observed_graph import graph_of

Made = Callable[[], tuple[nn.Module, torch.Tensor]]
"""Makes a model and a batch, the same ones each time."""

HAS_NATIVE = engine.loaded() is not None
"""Whether the native engine is there. Without it gradients and weights are not parked: expectations of tests say so by it."""

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")

HAS_TILES = not why_not()
"""Whether loss heads can run in tiles."""

needs_tiles = pytest.mark.skipif(not HAS_TILES, reason=f"no loss head runs in tiles: {why_not()}")

needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_available(),
    reason="no fork here, or a CUDA device, with which torch refuses backward in a forked process",
)


class Step(NamedTuple):
    """One planned step.

    moments: what is held, and how far the plan is, whenever the gradient of a parameter is there.
    rebuilt_ops: the plan's ops that ran again, in order.
    versions: every tracked tensor of the plan after the forward.
    native_ops: how many ops of the forward the native engine ran.
    """

    loss: float | str
    gradients: list[bytes]
    buffers: list[bytes]
    noise: bytes
    rebuilt_ops: list[int]
    moments: list[Any]
    versions: list[Any]
    native_ops: int

    @property
    def bits(self) -> tuple[Any, ...]:
        """What training gives: the same by both engines also where a step leaves its plan and one of them holds more."""
        return self.loss, self.gradients, self.buffers, self.noise


def observed_graph(made: Made) -> Graph:
    """The graph of a step of a model."""
    model, x = made()
    return graph_of(model, (x,), lambda: model(x))


def bits_of(t: torch.Tensor) -> bytes:
    """The bytes of the whole storage of `t`."""
    return bytes_of(t.detach()).numpy().tobytes()


def elements(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The bytes of all elements of each tensor."""
    return [bits_of(t.flatten().clone()) for t in tensors]


def gradients_of(model: nn.Module) -> list[bytes]:
    return elements(p.grad for p in model.parameters() if p.grad is not None)


def versions_of(planned: PlannedEngine) -> list[Any]:
    """Every tracked tensor of the plan that is on the tape, and what is held of it. The recorder also knows how tensors came to
    be that no rebuild makes, so calls, origins and counters are not compared.
    """
    states, versions = [], planned.tape.versions
    for key in sorted(key for key in planned.program.tracked if key in versions):
        version = versions[key]
        holding = version.holding
        later = None if version.next is None else versions[version.next].holding.tensor
        value = holding.value is not None and bits_of(holding.value)
        held = value, holding.handles, holding.claim, holding.tensor
        states.append((key, version.nbytes, later, version.parameter, version.exposed, held))
    return states


def moment_of(planned: PlannedEngine) -> Any:
    """What is held of the plan's tensors, and how far the plan is."""
    tape = planned.tape
    deviation = planned.cursor.deviation
    tracked = planned.program.tracked
    held = sorted(key for key, version in tape.versions.items() if version.holding.value is not None and key in tracked)
    handles = sum(version.holding.handles for key, version in tape.versions.items() if key in tracked)
    progress = planned.cursor.turn, planned.cursor.point, len(planned.rebuilt_ops)
    return held, handles, sorted(planned.holdings.active), progress, deviation.first, deviation.out_of_order


def steps(
    made: Made, graph: Graph, lives: tuple[Life, ...], n: int = 3, before: Callable[[nn.Module, int], None] | None = None
) -> list[Step]:
    """Steps of a new model under one plan. `before`: called with the model and the number of each step."""
    model, x = made()
    learned, taken = Learned(Program(graph, lives)), []
    torch.manual_seed(1)
    native = engine.loaded()
    for i in range(n):
        model.zero_grad()
        if before is not None:
            before(model, i)
        ran = native.counts()[0] if native is not None else 0
        planned, moments, versions = PlannedEngine(learned), [], []
        told = [p.register_hook(lambda _, e=planned, m=moments: m.append(moment_of(e))) for p in model.parameters()]
        try:
            with PlannedRecording(planned, model):
                loss = model(x)
            ran = native.counts()[0] - ran if native is not None else 0
            versions = versions_of(planned)
            loss.backward()
            result = loss.item()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        loss = None
        for hook in told:
            hook.remove()
        values = gradients_of(model), elements(model.buffers())
        noise = bits_of(torch.get_rng_state())
        taken.append(Step(result, *values, noise, [op >> SPREAD for op in planned.rebuilt_ops], moments, versions, ran))
    return taken


def by_python(
    made: Made, graph: Graph, lives: tuple[Life, ...], n: int = 3, before: Callable[[nn.Module, int], None] | None = None
) -> list[Step]:
    """`steps`, all of them by the Python engine."""
    with engine.without():
        return steps(made, graph, lives, n, before)
