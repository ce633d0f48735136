"""Steps that are not like the one before, for tests of templates: layers around a function that a test supplies."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lightning_memopt.plan import simulate
from lightning_memopt.solvers.planner import Frontier
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from tests.cpu.lib.models import Body, data

STEPS = [data(96, 16, seed=s) for s in range(8)]
NAN, tanh = float("nan"), torch.tanh


@pytest.fixture(autouse=True, params=["smallest", "everything"], name="plan")
def plans(request, monkeypatch):
    """The smallest plan, and the one that drops everything that can be made again."""
    if request.param == "everything":
        original = Frontier.plan

        def plan(f, limit):
            lives = recompute_everything(f.graph)
            predicted = simulate(f.graph, lives).predicted
            needed = predicted.needed_nbytes
            return dataclasses.replace(original(f, limit), lives=lives, predicted=predicted, budget_nbytes=needed)

        monkeypatch.setattr(Frontier, "plan", plan)
    return request.param


class Turns(Body):
    """Layers around `f(model, step, x)`, which a test supplies; `i` counts the steps."""

    def __init__(self, f):
        super().__init__()
        self.f, self.i = f, -1
        self.norm = nn.BatchNorm1d(16)
        self.side = Side()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        return self.f(self, self.i, x)


class Side(nn.Module):
    """Ops that no plan says anything about: it runs without the recorder. `meddle(self, h)` is what happens in it besides."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))
        self.meddle = lambda h: None

    def forward(self, h):
        self.meddle(h)
        with torch.no_grad():
            k = h.mean(0).mul(2).add(1).neg().cos()
        return k + self.w


def first(m, x):
    return tanh(m.layers[0](x)).exp()


def last(m, h):
    return m.layers[2](tanh(m.layers[1](h)).exp().sin()).sin()


def mean(m, x):
    m.i += 1
    m.given = data(96, 16, seed=20 + m.i)
    return m(x).square().mean()


def pick(values):
    """The value of a step: the first one while templates are learned."""
    return lambda i: values[0] if i < 3 else values[i % len(values)]
