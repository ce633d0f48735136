"""Optimizers that the run was not given: a warm restart, the next fold, a copy of the model that is trained on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.integrations.strangers import ELSEWHERE, IN_A_ROW
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.loops import QUIET, assert_same, batches, loss_of, sgd, small, state, train
from tests.cpu.lib.said import Said

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def restarts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, batches(6))
    train(model, torch.optim.Adam(model.parameters()), batches(12, seed=4))


def both(loop: Loop, **options: object) -> None:
    """The loop plainly and within a run ends with the same bits."""
    torch.manual_seed(1)
    plain = small()
    loop(plain, sgd(plain))
    torch.manual_seed(1)
    model = small()
    with optimize(model, optimizer := sgd(model), **(QUIET | options)):  # type: ignore[arg-type]
        loop(model, optimizer)
    assert_same(state(plain), state(model))


@needs_native
def test_an_optimizer_that_is_made_anew_is_observed(said: Said) -> None:
    """Its state is counted, its steps end and are measured; a line says so."""
    measured = list[int]()

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, batches(6))
        train(model, torch.optim.Adam(model.parameters()), batches(12, seed=4))

    both(loop, budget="min")
    model = small()
    weights = sum(p.nbytes for p in model.parameters())
    with optimize(model, optimizer := sgd(model), **(QUIET | {"budget": "min", "verbose": True})) as run:
        train(model, optimizer, batches(6))
        measured.append(run.status().measured_peak_nbytes or 0)
        other = torch.optim.Adam(model.parameters())
        train(model, other, batches(IN_A_ROW + 8, seed=4))
        status = run.status()
    assert "MemOpt: Adam, which this run was not given, trains its model now; observing again" in said.taken()
    assert status.phase == "planned" and status.measured_peak_nbytes is not None and status.predicted_peak_nbytes is not None
    assert status.measured_peak_nbytes >= measured[0] + 2 * weights, "Adam has two moments"
    assert status.measured_peak_nbytes == pytest.approx(status.predicted_peak_nbytes, rel=0.02)


def test_two_optimizers_that_are_made_anew(said: Said) -> None:
    model = small()
    with optimize(model, optimizer := sgd(model), **(QUIET | {"budget": "min", "verbose": True})) as run:
        train(model, optimizer, batches(6))
        parameters = list(model.parameters())
        pair = torch.optim.Adam(parameters[:2]), torch.optim.Adam(parameters[2:])
        for batch in batches(IN_A_ROW + 8, seed=4):
            loss_of(model, batch).backward()
            for other in pair:
                other.step()
            model.zero_grad()
        assert run.session.optimizers == list(pair)
        assert run.status().phase == "planned" and run.status().measured_peak_nbytes is not None
    assert "Adam, Adam, which this run was not given" in said.taken()


def test_an_optimizer_that_only_helps_is_none_of_the_run() -> None:
    """It steps between the steps of the run's own optimizers."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        helper = torch.optim.SGD(list(model.parameters())[:1], lr=0.01)
        for i in range(10):
            train(model, optimizer, batches(1, seed=i))
            helper.step()

    both(loop)


def test_a_budget_that_cannot_be_kept_any_more_ends_no_training() -> None:
    model = small()
    with optimize(model, optimizer := sgd(model), **(QUIET | {"budget": "min"})) as run:
        train(model, optimizer, batches(12))
    budget = (run.status().measured_peak_nbytes or 0) + (8 << 10)
    model.zero_grad()
    plain = copy.deepcopy(model)
    with optimize(model, optimizer := sgd(model), **(QUIET | {"budget": budget})), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restarts(model, optimizer)
    assert any("the budget is not kept" in str(line.message) for line in said)
    restarts(plain, sgd(plain))
    assert_same(state(plain), state(model))


def test_updates_in_backward_are_those_of_the_runs_optimizer() -> None:
    model = small()
    options = QUIET | {"budget": "min", "optimizer_in_backward": "auto"}
    with optimize(model, optimizer := sgd(model), **options) as run:  # type: ignore[arg-type]

        def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
            for batch in batches(count):
                loss = loss_of(model, batch)
                with run.last_backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(optimizer, 8)
        with pytest.raises(UpdatesInBackwardError, match="an optimizer that this run was not given steps now"):
            steps(torch.optim.Adam(model.parameters()), 1)


def test_another_model_that_is_trained_is_told(recwarn: pytest.WarningsRecorder) -> None:
    model = small()
    with optimize(model, optimizer := sgd(model), **(QUIET | {"budget": "min"})):
        train(model, optimizer, batches(6))
        other = copy.deepcopy(model)
        with optimize(other, second := sgd(other), **QUIET):  # it has a run of its own
            train(other, second, batches(ELSEWHERE + 1))
        assert not [w for w in recwarn if "another model is trained" in str(w.message)]
        train(other, sgd(other), batches(ELSEWHERE + 5))
    assert len([w for w in recwarn if "another model is trained" in str(w.message)]) == 1
