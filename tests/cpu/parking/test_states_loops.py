"""Parked optimizer state in loops that do more with optimizers than to step one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_memopt import optimize
from tests.cpu.lib.engines import HAS_NATIVE
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_states import Trained, away, net

PARKED = ["state"] * 4 + ["gradient"] * 4 * HAS_NATIVE
"""Of a `net`."""


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


def test_state_of_parameters_outside_of_the_model_stays_which_a_line_says() -> None:
    model, other = net(), nn.Linear(128, 128)
    optimizer = optim.AdamW([*model.parameters(), *other.parameters()], lr=1e-3)
    with listening() as said, optimize(model, optimizer, budget="min", offload="disk", max_slowdown=1e6) as run:
        for _ in range(5):
            optimizer.zero_grad()
            other(model(torch.randn(512, 128))).square().mean().backward()
            optimizer.step()
        assert run.plan is not None and [state.what for state in run.plan.states] == PARKED
        assert away(optimizer) == 8 and optimizer.state[other.weight]["exp_avg"].untyped_storage().nbytes()
        text = said.taken()
    assert text.count("optimizer state is not parked: some parameters are not in the model that was given") == 1


def test_state_that_an_optimizer_makes_later_is_not_taken_from_the_step() -> None:
    """Two optimizers have the same parameters, and only one has stepped. What is predicted of its steps is what they take."""
    model = net()
    adam, sgd = optim.Adam(model.parameters(), lr=1e-3), optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with optimize(model, [adam, sgd], budget="min", offload="disk", max_slowdown=1e6) as run:
        for i in range(10):
            optimizer = adam if i < 6 else sgd
            optimizer.zero_grad()
            model(torch.randn(128, 128)).square().mean().backward()
            optimizer.step()
            if i == 5:
                status = run.status()
        assert away(adam) == 8 and away(sgd) == 4
    assert status.plan is not None and [state.what for state in status.plan.states] == PARKED
    assert status.measured_peak_nbytes <= status.plan.predicted_peak_nbytes


class _Spare(nn.Module):
    """A model that uses its second part only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = net(), net()

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.spare(self.used(x)) if both else self.used(x)


def test_state_that_no_update_makes_is_not_parked_until_one_does() -> None:
    """No budget is said to be kept by parking what is nowhere. When the second part gets gradients, its state leaves, too."""
    model = _Spare()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    parts_parked = []
    with optimize(model, optimizer, budget="min", offload="disk", max_slowdown=1e6) as run:
        for i in range(12):
            optimizer.zero_grad()
            model(torch.randn(128, 128), both=i >= 6).square().mean().backward()
            optimizer.step()
            if i in (5, 11):
                plan = run.plan
                assert plan is not None
                parts_parked.append({state.parameter.split(".")[0] for state in plan.states if state.what == "state"})
                assert away(optimizer) == len(optimizer.state)  # both moments of each weight; biases are too small
    assert parts_parked == [{"used"}, {"used", "spare"}]


def test_state_is_made_in_the_order_of_the_plain_run() -> None:
    """After it was forgotten in the middle of training: a checkpoint has the same order."""

    def order(budget: Any) -> list[int]:
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        options = dict(budget=budget, offload="disk", max_slowdown=1e6)
        with contextlib.nullcontext() if budget is None else optimize(model, optimizer, **options):
            for i in range(8):
                optimizer.zero_grad()
                model(torch.randn(128, 128)).square().mean().backward()
                optimizer.step()
                optimizer.state.clear() if i == 5 else None
                optimizer.state.pop(model[0].weight) if i == 6 else None  # type: ignore[index]
        return list(optimizer.state_dict()["state"])

    assert order("min") == order(None)


def test_an_interrupted_wait_keeps_the_memory_that_a_copy_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy goes on after the interrupt. If the next read took other memory, the copy would write to what is freed."""
    trained = Trained()
    trained.states.park()
    state: Any = trained.optimizer.state[trained.model[0].weight]  # type: ignore[index]

    def interrupted(stored: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(state.away["exp_avg"]), "wait_fetched", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state["exp_avg"]
    address = dict.__getitem__(state, "exp_avg").data_ptr()
    assert state["exp_avg"].data_ptr() == address != 0
