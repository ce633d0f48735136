"""Planned steps by both engines: the same bits, the same rebuilds, the same state of every storage version."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memopt.graph import Graph
from lightning_memopt.native import engine
from lightning_memopt.plan import Life
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers import planner


class Mixed(nn.Module):
    """Convolution, batch norm, writes in place, dropout, views, lists of tensors, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.cell = nn.LSTMCell(8, 8)
        self.tied = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.conv(x)), inplace=True)
        y = torch.cat([y, y.sigmoid()], 3).flatten(2).transpose(1, 2)
        y = functional.dropout(self.tied(y), 0.2, self.training)
        state = None
        for step in y[:, :4].unbind(1):
            state = self.cell(step, state)
        assert state is not None
        y = functional.layer_norm(self.tied(y).add_(1.0).tanh_(), (8,)) * state[0][:, None]
        return functional.gelu(y).square().mean()


class Step(NamedTuple):
    loss: float
    gradients: list[list[float]]
    buffers: list[list[float]]
    noise: list[int]
    rebuilt_ops: list[int]
    versions: list[Any]
    native_ops: int


@pytest.fixture(scope="module")
def observed() -> tuple[Graph, list[tuple[Life, ...]]]:
    model, x = made()
    observation = Observation(model, [], torch.device("cpu"), None, verify=True, meter=False)
    with observation.begin_round((x,)):
        loss = model(x)
    observation.forward_ended()
    loss.backward()
    del loss
    graph = observation.finish()
    assert graph is not None
    return graph, [candidate.lives for candidate in planner.solve(graph).candidates]


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Mixed(), torch.randn(4, 3, 6, 6)


def seen(planned: PlannedEngine) -> list[Any]:
    """Every storage version on the tape, as the forward left it."""
    states = []
    for key, version in planned.tape.versions.items():
        holding, call = version.holding, version.call
        own = version.id, version.nbytes, version.origin, version.index, version.counter, version.counter_in_op, version.next
        flags = version.parameter, version.exposed, version.read, version.why, call is None or (call.op, call.reads, call.made)
        value = holding.value is not None and holding.value.untyped_storage().tolist()
        held = value, holding.expected, holding.reachable, holding.handles, holding.claim, holding.tensor
        states.append((key, own, flags, held))
    return sorted(states, key=lambda state: state[0])


def steps(graph: Graph, lives: tuple[Life, ...], n: int = 3) -> list[Step]:
    model, x = made()
    learned, taken = Learned(Program(graph, lives)), []
    torch.manual_seed(1)
    for _ in range(n):
        model.zero_grad()
        before = engine.loaded().counts()[0] if engine.loaded() is not None else 0
        planned = PlannedEngine(learned)
        with PlannedRecording(planned, model):
            loss = model(x)
        native = engine.loaded().counts()[0] - before if engine.loaded() is not None else 0
        versions = seen(planned)
        loss.backward()
        tensors = [p.grad for p in model.parameters()], list(model.buffers())
        values = ([t.flatten().tolist() for t in group if t is not None] for group in tensors)
        noise = torch.get_rng_state().tolist()
        taken.append(Step(loss.item(), *values, noise, list(planned.rebuilt_ops), versions, native))
        del loss
    return taken


def test_planned_steps_are_the_same(observed: tuple[Graph, list[tuple[Life, ...]]]) -> None:
    if engine.loaded() is None:
        pytest.skip("there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")
    graph, plans = observed
    assert len(plans) > 3
    for lives in plans:
        native = steps(graph, lives)
        with mock.patch.object(engine, "_module", None):
            python = steps(graph, lives)
        for ours, reference in zip(native, python, strict=True):
            assert ours._replace(native_ops=0) == reference
    assert native[0].native_ops == 0, "templates are learned in the first step"
    assert native[-1].native_ops >= 0.7 * len(graph.forward)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2.0).sin().tanh()
        y = y.to_padded_tensor(0.0) if y.is_nested else y
        return (y.as_subclass(torch.Tensor) * self.weight).square().sum()


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


class Counted(torch.Tensor):
    """A wrapper with a dispatch of its own, which counts the ops that it sees."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, t: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, t.size(), strides=t.stride(), dtype=t.dtype)

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> torch.Tensor:
        cls.seen.append(func._name)
        return func(*(a.t if isinstance(a, Counted) else a for a in args), **(kwargs or {}))


ODD = {
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :1]]),
    "subclass": lambda x: x.as_subclass(Named),
    "wrapper": Counted,
    "conjugate": lambda x: torch.complex(x, x).conj().imag,
    "another type": lambda x: x.double(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("name", ODD)
def test_a_batch_that_is_not_as_the_templates_say(name: str) -> None:
    """Steps with such a batch, between ordinary ones: what the plain model gives."""
    torch.manual_seed(0)
    model, x = Squares(), torch.randn(2, 3, 4)
    observation = Observation(model, [], torch.device("cpu"), None, verify=True, meter=False)
    with observation.begin_round((x,)):
        loss = model(x)
    observation.forward_ended()
    loss.backward()
    graph = observation.finish()
    assert graph is not None
    learned = Learned(Program(graph, planner.solve(graph).candidates[0].lives))
    for batch in (x, x, ODD[name](x), x):
        model.zero_grad()
        plain = model(batch)
        plain.backward()
        expected = model.weight.grad.clone()
        seen, Counted.seen = Counted.seen, []
        model.zero_grad()
        with PlannedRecording(PlannedEngine(learned), model):
            loss = model(batch)
        loss.backward()
        assert torch.equal(loss, plain) and torch.equal(model.weight.grad, expected)
        assert not seen or Counted.seen == seen
        Counted.seen = []
