"""A model with many forwards in a step whose graphs are all held, because backwards run between them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.graph import Graph
from lightning_memopt.native import counter
from lightning_memopt.session.judge.states import Observing, Running
from tests.cpu.lib.inside import states_of
from tests.cpu.lib.loops import QUIET, agrees, leaves_nothing, seeded
from tests.cpu.lib.said import Said

CALLS = 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def net() -> nn.Module:
    return seeded(Net)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An ODE by Euler's method, and another model that is trained between its steps."""
    torch.manual_seed(1)
    losses = []
    other = torch.zeros((), requires_grad=True)
    for _ in range(8):
        y = torch.randn(64, 8)
        for _ in range(CALLS):
            y = y + 0.1 * model(y)
            other.square().backward()
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs of all observed steps."""
    found = list[Graph]()
    observed = Observing.add

    def noted(self: Observing, graph: Graph, *args: object) -> object:
        found.append(graph)
        return observed(self, graph, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Observing, "add", noted)
    return found


@pytest.mark.skipif(counter() is None, reason="no native counter: what is not recorded is not known")
def test_the_backward_of_the_other_calls_is_one_op(graphs: list[Graph]) -> None:
    run = agrees(use, net, adam)
    assert run.plan is not None
    graph = graphs[-1]
    backward = [op for op in graph.ops if op.phase == "backward"]
    assert [op.name for op in backward].count("backward of other calls") == 1
    assert len(backward) < 40 < CALLS * 10, "the rest of some 400 ops"
    assert [op.phase for op in graph.ops].count("update") > 5
    gradients = [t for op in backward for t in op.outputs if graph.tensors[t].nbytes == 64 * 64 * 4]
    assert gradients, "the update reads what the op has made"


@pytest.mark.skipif(counter() is None, reason="no native counter: nothing else measures a step")
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_what_it_takes_is_predicted(budget: str) -> None:
    model = net()
    with optimize(model, optimizer := adam(model), budget=budget, **QUIET) as run:
        use(model, optimizer)
        status = run.status()
    assert status.measured_peak_nbytes is not None and status.predicted_peak_nbytes is not None
    assert abs(status.measured_peak_nbytes - status.predicted_peak_nbytes) <= 1 << 12


def test_an_error_in_the_backward_of_the_other_calls() -> None:
    """The error is passed on, and the steps after it are observed and planned."""
    model = net()
    with leaves_nothing(model), optimize(model, optimizer := adam(model), budget="min", **QUIET) as run:
        for i in range(8):
            y = torch.randn(64, 8)
            for _ in range(CALLS):
                y = y + 0.1 * model(y)
                if i == 2 and _ == 3:
                    y.register_hook(fails)
            with contextlib.suppress(ZeroDivisionError):
                y.square().mean().backward()
                assert i != 2
                optimizer.step()
            optimizer.zero_grad()
        assert run.plan is not None


def fails(_: Tensor) -> None:
    raise ZeroDivisionError


def test_a_penalty_in_some_steps_has_a_plan_of_its_own() -> None:
    """A forward for the gradient of its input, after the step's backward: the other steps have their plan as well."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = []
        for i in range(16):
            x = torch.randn(64, 8)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if i % 4 == 0:
                real = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
                slope.square().sum().backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    run = agrees(use, net)
    found = list(states_of(run).values())
    assert len(found) == 2 and all(isinstance(state, Running) and not state.drift.deviated for state in found)


def test_it_is_said(said: Said) -> None:
    agrees(use, net, verbose=True)
    assert said.taken().count(f"backwards run between {CALLS} forwards of a step whose graphs are all held") == 1
