"""What an exception where a forward begins must not cost, and what an observed step without a meter counts."""

from __future__ import annotations

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.native import install
from lightning_memopt.native.counting import Window
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, batches, sgd, small, step


def test_a_plan_outlives_an_interrupt_where_a_forward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = small(depth=1), batches(1)[0]
    with optimize(model, o := sgd(model), budget="min", **QUIET) as run:
        for _ in range(3):
            step(model, o, data)
        before = state_of(run)
        assert isinstance(before, Running)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Running, "overtaken", property(interrupted))
            step(model, o, data)
        step(model, o, data)
        assert state_of(run) is before


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_window_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = install()
    if counter is None:
        pytest.skip("no compiler")
    with monkeypatch.context() as patch:
        patch.setattr(Window, "__init__", interrupted)
        for _ in range(100):  # more than there are
            with pytest.raises(KeyboardInterrupt):
                counter.window()
    window = counter.window()
    assert window is not None
    window.close()


def test_observed_steps_without_a_meter_count_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of many observed steps, with a budget that is far away: its room is less by what is held meanwhile."""
    if install() is None:
        pytest.skip("without the counter nobody knows what others hold")
    peaks = []
    pressure = Observation._pressure
    monkeypatch.setattr(Observation, "_pressure", lambda self: peaks.append(pressure(self)) or peaks[-1])
    model, data = small(depth=1), batches(1)[0]
    most = []
    with optimize(model, o := sgd(model), budget=1 << 30, verbose=False, profile_steps=9):
        for _ in range(3):
            step(model, o, data)
        for held in (0, 1 << 20):
            others = torch.empty(held, dtype=torch.uint8)
            peaks.clear()
            step(model, o, data)
            most.append(max(peaks))
            del others
    assert most[1] - most[0] == 1 << 20
