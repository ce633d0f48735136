"""Drift: forwards that leave the plan lead to observing again, a bounded number of times; results never change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import Small, agrees, batches, loss_of, sgd, train
from tests.cpu.lib.said import Said

pytestmark = pytest.mark.filterwarnings("ignore:MemOpt. the forward left the plan")


class Changing(Small):
    """After some calls, the forward ends in one of several other ways."""

    def __init__(self, tails: list[int]) -> None:
        super().__init__(depth=2)
        self.tails, self.calls = tails, 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for _ in range(self.tails[self.calls % len(self.tails)]):
            out = torch.tanh(out.sin()) + out
        self.calls += 1
        return out


def changing(*tails: int) -> Changing:
    torch.manual_seed(0)
    return Changing(list(tails))


def trained(*tails: int, **options: object) -> Running:
    """The state after one call for each of the tails, compared with the plain run."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, batches(len(tails)))

    run = agrees(use, lambda: changing(*tails), **options)
    found = state_of(run)
    assert isinstance(found, Running)
    return found


def test_a_lasting_change_is_planned_for() -> None:
    """Two forwards that leave the plan, one that is observed; then the plan is that of the new forward."""
    found = trained(*[0] * 5, *[2] * 6)
    assert found.past.again == 1 and found.peaks.steps == 3 and not found.drift.deviated
    assert found.plan.predicted.rebuilt_ops > 0


def test_now_and_then_is_no_drift() -> None:
    """Every third forward takes another branch. The plan for the other forwards stays in force."""
    found = trained(*[0] * 4, 2, 0, 0, 2, 0, 0, 2, 0)
    assert found.past.again == 0 and found.drift.deviated and found.drift.in_a_row == 0


def test_observing_again_is_bounded() -> None:
    """A forward that keeps changing is observed again three times, then never again."""
    found = trained(*[0] * 3, *[n for n in range(1, 8) for _ in range(4)])
    assert found.past.again == 3 and found.drift.in_a_row > 2


def test_it_is_said(said: Said) -> None:
    """Observing again is logged, with how often."""
    model = changing(*[0] * 4, *[2] * 4)
    with optimize(model, o := sgd(model), budget="min", profile_steps=2) as _:
        train(model, o, batches(8))
    assert "left the plan; observing again (1 of 3)" in said.taken()


def test_a_step_is_measured_again_after_drift() -> None:
    """A forward that left the plan is no longer proven to be within the budget: the next step is measured."""
    model = changing(*[0] * 4, 2, 0)
    with optimize(model, o := sgd(model), budget="min", verbose=False, profile_steps=2) as run:
        train(model, o, batches(4))
        found = state_of(run)
        assert isinstance(found, Running) and found.peaks.measured_nbytes is not None and not found.measures
        loss_of(model, batches(1)[0]).backward()
        o.step()
        assert found.measures
        train(model, o, batches(1))
        assert state_of(run) is found and found.peaks.measured_nbytes is not None
