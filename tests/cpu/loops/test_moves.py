"""Agents' moves with gradients on: they begin no forward, and what runs between them and the training call is not recorded."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.native import engine
from lightning_memopt.record import Recorder
from lightning_memopt.session.forward import round as rounds
from lightning_memopt.session.observe.observation import Observation
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import QUIET, agrees, seeded, sgd


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def act(self, x: Tensor) -> Tensor:
        return self.actor(self.body(x))

    def value(self, x: Tensor) -> Tensor:
        return self.critic(self.body(x))


def agent() -> Agent:
    return seeded(Agent)  # type: ignore[return-value]


def minimised(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def updated(model: Agent, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return minimised(optimizer, model.act(x).log_softmax(-1).mean() + model.value(x).square().mean())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of ops that are recorded."""
    names = list[str]()
    record = Recorder.record

    def noted(self: Recorder, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
        out = record(self, func, args, kwargs)
        if self.capturing:
            names.append(func._name)
        return out

    monkeypatch.setattr(Recorder, "record", noted)
    return names


@pytest.mark.parametrize("moves", [2, 5, 40])
def test_moves_whose_results_live_until_the_next_one(moves: int, recorded: list[str]) -> None:
    """A roll-out: the graph of the last move is always alive, and none of them has a backward."""

    def use(model: Agent, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(8):
            for _ in range(moves):
                probabilities = model.act(torch.randn(1, 4)).softmax(-1)
                torch.multinomial(probabilities.detach(), 1)
            losses.append(updated(model, optimizer, torch.randn(256, 4)))
        return losses

    run = agrees(use, agent)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    assert recorded.count("aten::multinomial") < 8 * 5


def test_a_move_of_the_shapes_of_the_training_call() -> None:
    """If such calls were moves, no forward would be left: from then on they begin forwards again."""

    def use(model: Agent, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(12):
            for _ in range(5):
                result = model.act(torch.randn(256, 4))
                torch.multinomial(result.detach().softmax(-1), 1)
            loss = model.act(torch.randn(256, 4)).square().mean()
            losses.append(minimised(optimizer, loss))
        return losses

    run = agrees(use, agent)
    assert run.plan is not None


def test_a_call_whose_graph_is_dropped_once_a_step() -> None:
    """The same network computes the target, on a batch of the same shapes: that call is not a move."""

    def use(model: Agent, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(10):
            target = model.act(torch.randn(256, 4)).max(1)[0].detach()
            loss = (model.act(torch.randn(256, 4)).max(1)[0] - target).square().mean()
            losses.append(minimised(optimizer, loss))
        return losses

    run = agrees(use, agent)
    assert run.plan is not None and not state_of(run).drift.deviated


@pytest.mark.parametrize("by", ["native", "python"])
def test_many_ops_after_a_dropped_move_are_not_recorded(by: str, recorded: list[str]) -> None:
    def use(model: Agent, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(8):
            model.act(torch.randn(1, 4)).argmax()
            with torch.no_grad():
                target, part = torch.zeros(200, 8), torch.randn(200, 8)
                for i in range(200):
                    target[i].index_add_(0, torch.arange(8), part[i])
                turned = torch.view_as_complex(target.view(200, 4, 2)).conj() @ torch.ones(4, 1, dtype=torch.complex64)
            losses.append(updated(model, optimizer, torch.randn(256, 4)) + turned.real.sum())
        return losses

    with engine.without() if by == "python" else contextlib.nullcontext():
        run = agrees(use, agent)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    assert recorded.count("aten::index_add_") <= 8 * rounds._OPS


def test_an_observed_step_of_moves_alone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once these calls are known to be moves, nothing is observed until a training call."""
    begun = list[object]()
    begin = Observation.begin_round

    def begins(self: Observation, *args: object, **kwargs: object) -> object:
        begun.append(self)
        return begin(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Observation, "begin_round", begins)
    model = agent()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        for _ in range(4):
            for _ in range(50):
                held = model.act(torch.randn(1, 4))
            updated(model, optimizer, torch.randn(256, 4))
        assert run.plan is not None and len(states_of(run)) <= 2
        assert len(begun) < 8
        del held
