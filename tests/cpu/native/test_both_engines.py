"""Planned steps by the native engine, and recorded in Python: the same bits; on the plan also the same rebuilds, and the same
tensors held.
"""

from __future__ import annotations

import random
from math import ceil
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.robustness.fuzzing.case import Departure, draw
from benchmarks.robustness.fuzzing.plans import random_lives
from benchmarks.robustness.fuzzing.programs import Data, Model
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.solvers import planner
from tests.cpu.lib.engines import by_python, needs_native, observed_graph, steps


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


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Mixed(), torch.randn(4, 3, 6, 6)


@needs_native
def test_planned_steps_are_the_same() -> None:
    graph = observed_graph(made)
    plans = [candidate.lives for candidate in planner.solve(graph).candidates]
    assert len(plans) > 3
    for lives in plans[:: ceil(len(plans) / 12)]:
        native = steps(made, graph, lives)
        for ours, reference in zip(native, by_python(made, graph, lives), strict=True):
            assert ours._replace(native_ops=0) == reference
    assert native[0].native_ops == 0, "templates are learned in the first step"
    assert native[-1].native_ops >= 0.9 * len(graph.forward)


_DEPARTURES = ("skip", "extra", "other", "data", "hold", "in place", "no grad", "draw", "copy", "raise")


@needs_native
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_under_random_plans(seed: int) -> None:
    """Steps as planned, then one that departs at a random op, then two as planned."""
    case, rng = draw(seed), random.Random(seed)
    departure = Departure(rng.randrange(len(case.nodes)), rng.choice(_DEPARTURES), rng.randrange(8))

    def program() -> tuple[nn.Module, torch.Tensor]:
        return Model(case), Data(case.seed).batch(8)

    def departs(model: nn.Module, step: int) -> None:
        model.departures, model.kept = {departure.node: departure} if step == 3 else {}, []

    graph = observed_graph(program)
    lives = random_lives(graph, random.Random(case.plan), held=case.held)
    native, python = (by(program, graph, lives, 6, departs) for by in (steps, by_python))
    for step, (ours, reference) in enumerate(zip(native, python, strict=True)):
        assert ours.bits == reference.bits
        assert step == 3 or ours._replace(native_ops=0) == reference
    assert native[2].native_ops >= 0.5 * len(graph.forward)


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
    graph = observed_graph(lambda: (model, x))
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
