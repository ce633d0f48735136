"""Whose updates end a step: several optimizers that interleave, and updates that are written by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, agrees, assert_same, batches, budget_at, leaves_nothing, loss_of, sgd, small, state

WIDTH, SAMPLES = 48, 64


class Pair(nn.Module):
    """A generator and a critic; the model that is watched is one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))]
        self.generator = nn.Sequential(*hidden)
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


Optimizers = list[torch.optim.Optimizer]


def adams(pair: Pair) -> Optimizers:
    return [torch.optim.Adam(part.parameters(), 1e-3) for part in (pair.generator, pair.critic)]


def critic_step(pair: Pair, optimizer: torch.optim.Optimizer, generated: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = pair.critic(generated.detach()).mean() - pair.critic(torch.randn(SAMPLES, WIDTH)).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def generator_step(pair: Pair, optimizer: torch.optim.Optimizer, generated: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = -pair.critic(generated).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def noise() -> Tensor:
    return torch.randn(SAMPLES, WIDTH)


def between(pair: Pair, optimizers: Optimizers) -> list[Tensor]:
    """The critic steps between the generator's forward and its backward."""
    losses = []
    for _ in range(6):
        generated = pair.generator(noise())
        losses += [critic_step(pair, optimizers[1], generated), generator_step(pair, optimizers[0], generated)]
    return losses


def generator_first(pair: Pair, optimizers: Optimizers) -> list[Tensor]:
    losses = []
    for _ in range(6):
        generated = pair.generator(noise())
        losses += [generator_step(pair, optimizers[0], generated), critic_step(pair, optimizers[1], generated)]
    return losses


def many_critics(pair: Pair, optimizers: Optimizers, with_gradients: bool) -> list[Tensor]:
    """Three steps of the critic for one of the generator, whose forward runs for each of them."""
    losses = []
    for _ in range(5):
        for _ in range(3):
            with torch.set_grad_enabled(with_gradients):
                generated = pair.generator(noise())
            losses.append(critic_step(pair, optimizers[1], generated))
        losses.append(generator_step(pair, optimizers[0], pair.generator(noise())))
    return losses


def compared(use: Callable[[Pair, Optimizers], list[Tensor]], part: str, budget: str | int = "min", **options: Any) -> Any:
    """The loop plainly, and with one part watched and both optimizers given."""
    pair = Pair()
    torch.manual_seed(2)
    expected = use(pair, adams(pair))
    states = state(pair)
    pair = Pair()
    optimizers = adams(pair)
    torch.manual_seed(2)
    with leaves_nothing(pair), optimize(getattr(pair, part), optimizers, budget=budget, **QUIET | options) as run:
        losses = use(pair, optimizers)
    assert_same(states, state(pair))
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=True))
    return run


LOOPS = {
    "between": between,
    "generator_first": generator_first,
    "many_critics": partial(many_critics, with_gradients=False),
    "many_critics_with_gradients": partial(many_critics, with_gradients=True),
}


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("part", ["generator", "critic"])
@pytest.mark.parametrize("name", LOOPS)
def test_steps_of_two_networks_interleave(name: str, part: str) -> None:
    """In whatever order they step: the plain bits, and a plan that drops what the watched one saves."""
    run = compared(LOOPS[name], part)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


def test_budget_covers_the_other_network_s_step() -> None:
    """What the critic's step takes between the generator's forward and backward is predicted, and the budget is kept."""
    run = compared(between, "generator")
    graph = run.status().frontier.graph
    phases = [a.phase for a, b in zip(graph.ops, graph.ops[1:], strict=False) if a.phase != b.phase]
    assert phases == ["forward", "backward", "update", "backward"], "then the generator's update"
    budget = budget_at(run, 0.5)
    del run, graph  # what this process holds besides counts, too
    for profile_steps in (1, 2):  # after one step the state of both optimizers has just been made
        gc.collect()
        found = state_of(compared(between, "generator", budget, profile_steps=profile_steps))
        assert isinstance(found, Running) and found.peaks.measured_nbytes is not None
        assert found.past.replanned == 0 and found.peaks.measured_nbytes <= budget
        assert found.plan.predicted.rebuilt_ops > 0
        del found


def test_shared_layers_with_an_optimizer_that_steps_now_and_then() -> None:
    """Two optimizers of one model, each after a backward of its own; one of them steps in every third iteration only."""

    def use(model: nn.Module, optimizers: Optimizers) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for i, batch in enumerate(batches(9)):
            for optimizer in optimizers if i % 3 == 0 else optimizers[:1]:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                model.zero_grad()
                losses.append(loss.detach())
        return losses

    def make(model: Any) -> Optimizers:
        return [
            torch.optim.SGD([*model.layers.parameters(), *model.embed.parameters()], lr=0.05),
            torch.optim.SGD(model.norm.parameters(), lr=0.1),
        ]

    run = agrees(use, make=make)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


def test_optimizer_of_another_model_ends_no_step() -> None:
    """An optimizer without parameters of the model does not end a step, unless no optimizer has any (they keep copies)."""

    def use(model: nn.Module, optimizers: Optimizers) -> None:
        for batch in batches(3):
            loss_of(model, batch).backward()
            optimizers[0].step()

    other = small(1)
    model = small()
    with optimize(model, [sgd(other), sgd(model)], budget="min", **QUIET) as run:
        use(model, [run.session.optimizers[0]])
        assert run.plan is None
    with optimize(model, sgd(other), budget="min", **QUIET) as run:
        use(model, [run.session.optimizers[0]])
        assert run.plan is not None


def add(p: nn.Parameter, gradient: Tensor) -> None:
    p.data.add_(gradient, alpha=-0.05)


def subtract(p: nn.Parameter, gradient: Tensor) -> None:
    with torch.no_grad():
        p -= 0.05 * gradient


def replace(p: nn.Parameter, gradient: Tensor) -> None:
    p.data = p.data - 0.05 * gradient


def by_hand(
    model: nn.Module, _: Any, update: Callable[[nn.Parameter, Tensor], None], every: int = 1, evaluates: bool = False
) -> list[Tensor]:
    torch.manual_seed(2)
    losses = []
    for i, batch in enumerate(batches(8)):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
        if (i + 1) % every == 0:
            for p in model.parameters():
                assert p.grad is not None
                update(p, p.grad)
            model.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, batch))
            model.train()
    return losses


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("update", [add, subtract, replace], ids=lambda f: f.__name__)
def test_update_by_hand(update: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Parameters that the loop updates itself, in place or by new ones: a step ends when the next forward begins."""
    run = agrees(partial(by_hand, update=update), make=lambda _: [])
    found = state_of(run)
    assert isinstance(found, Running) and found.plan.predicted.rebuilt_ops > 0
    assert found.peaks.steps == 5 and found.peaks.measured_nbytes is not None


@pytest.mark.filterwarnings("error:MemOpt")
@pytest.mark.parametrize("options", [{"every": 2}, {"evaluates": True}], ids=["accumulation", "evaluation"])
def test_update_by_hand_in_other_loops(options: dict[str, Any]) -> None:
    """With gradients of two batches a step, or evaluation between steps."""
    run = agrees(partial(by_hand, update=add, **options), make=lambda _: [])
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


def test_optimizer_that_was_not_given() -> None:
    """The optimizer that steps is another one than was given (made anew for a second phase): a plan all the same."""

    def use(model: nn.Module, _: Any) -> list[Tensor]:
        torch.manual_seed(2)
        optimizer, losses = sgd(model), []
        for batch in batches(6):
            losses.append(loss_of(model, batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    run = agrees(use)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
