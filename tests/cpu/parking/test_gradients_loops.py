"""Loops whose gradients and state several plans park in turn, or whose gradients are not those that autograd has made."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.native import counter
from lightning_memopt.runtime.tiers.shelf import is_away
from tests.cpu.lib.engines import elements, needs_native
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_gradients import NEVER, Parked, trained_by
from tests.cpu.parking.test_states import MIB, away, net


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


def held_nbytes() -> int:
    """What the process holds beside a run: other tests may have left tensors."""
    gc.collect()
    counts = counter()
    return 0 if counts is None else counts.live_nbytes


class Greedy:
    """Each block learns by itself: a step has a forward and a backward for each, and one update. Each has a plan of its own."""

    def __init__(self, budget: Any, steps: int = 10) -> None:
        gc.collect()  # what a program holds counts
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(128, 128), *(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4))])
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        self.away: list[int] = []
        self.status: Any = None
        if budget is None:
            self.train(model, optimizer, steps)
        else:
            with optimize(model, optimizer, budget=budget, **NEVER) as run:
                self.train(model, optimizer, steps)
                self.status = run.status()
        states = [t for state in optimizer.state.values() for t in state.values()]
        self.bits = elements([*(p.detach() for p in model.parameters()), *states])

    def train(self, model: nn.ModuleList, optimizer: optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            h = model[0](torch.randn(32, 128))
            for block in model[1:]:
                h = h + block(h)
                h.square().mean().backward()
                h = h.detach()
                self.away.append(away(optimizer))
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_of_several_plans_keeps_away_what_one_of_them_parks() -> None:
    """A forward whose own plan needs no room does not bring state home: the next one needs it."""
    plain, found = Greedy(None), Greedy("min")
    assert found.bits == plain.bits
    assert found.away[-16:] == [10] * 16
    weights = 5 * (128 * 128 + 128) * 4
    budget = 7 * weights // 2 + held_nbytes()
    within = Greedy(budget)
    assert within.bits == plain.bits and within.status.measured_peak_nbytes <= budget
    assert min(within.away[-16:]) == max(within.away[-16:]) > 0


def turns(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    """The halves of the model learn in turns, and a half that does not is frozen: also when a plan is made or put in force."""
    halves = model[:4], model[4:]  # type: ignore[index]
    for step in range(10):
        for half, other in (halves, halves[::-1]):
            half.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
        half.requires_grad_(False)
        yield
    model.requires_grad_(True)


@needs_native
def test_halves_that_are_frozen_in_turns() -> None:
    status, bits = trained_by("min", turns, lambda p: optim.AdamW(p, lr=1e-3))
    assert bits == trained_by(None, turns, lambda p: optim.AdamW(p, lr=1e-3))[1]
    parked = {(state.what, state.parameter) for state in status.plan.states}
    assert {name for what, name in parked if what == "state"} == {f"{i}.weight" for i in (0, 2, 4, 6)}
    assert any(what == "gradient" for what, _ in parked)


def projected(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad * 0.5


def viewed(p: nn.Parameter) -> Tensor:
    return torch.zeros(2, *p.shape)[0]


@needs_native
@pytest.mark.parametrize("make", [projected, viewed])
def test_gradients_that_the_loop_gives_stay_which_a_line_says(make: Callable[[nn.Parameter], Tensor]) -> None:
    def loop(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
        for _ in range(6):
            model(torch.randn(64, 128)).square().mean().backward()
            for p in model.parameters():
                p.grad = make(p)
            optimizer.step()
            optimizer.zero_grad()
            yield

    with listening() as said:
        _, bits = trained_by("min", loop, optim.AdamW)
        text = said.taken()
    assert bits == trained_by(None, loop, optim.AdamW)[1]
    assert text.count("gradients that the plan parks: the loop gives parameters others (`p.grad = ...`)") == 1


@needs_native
def test_no_line_of_gradients_that_autograd_has_made() -> None:
    parked = Parked()
    with parked.gradients.there(list(parked.model.parameters())):
        pass
    assert not parked.said
    parked.gradients.close()


def test_a_plan_that_parks_no_gradients_closes_the_file_of_an_earlier_one() -> None:
    """It is not left to the collector of garbage."""
    held = held_nbytes()
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    budget = 3 * sum(p.nbytes for p in model.parameters()) + MIB // 4 + held
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with optimize(model, optimizer, budget=budget, **NEVER):
            for _ in range(6):
                model(torch.randn(64, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        gc.collect()
    assert not [each for each in caught if each.category is ResourceWarning]
    assert not any(is_away(p) for p in model.parameters())
