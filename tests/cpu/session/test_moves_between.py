"""An agent that moves without `no_grad` between its steps: calls on one observation, without a backward, borrow the plan of the
training batch, and are not blamed for what the steps around them take.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.native import counter
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import states_of
from tests.cpu.lib.loops import QUIET, assert_same, sgd, state

pytestmark = pytest.mark.skipif(counter() is None, reason="nothing counts without a compiler")


def play(room_nbytes: int | None, steps: int = 12) -> tuple[nn.Module, int, list[str]]:
    """The model, the largest peak of the first steps, and what became of the run's states. Later steps hold a little more.
    `room_nbytes`: the budget, and the peak, are above what is there before.
    """
    counts = counter()
    assert counts is not None
    before_nbytes = counts.live_nbytes
    budget = None if room_nbytes is None else before_nbytes + room_nbytes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer, held, peak_nbytes, kinds = sgd(model), [], 0, []
    window = counts.window()
    assert window is not None
    with contextlib.nullcontext() if budget is None else optimize(model, optimizer, budget=budget, **QUIET) as run:
        for step in range(steps):
            for _ in range(3):
                model(torch.randn(1, 16)).argmax()
            model(torch.randn(128, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 4:
                peak_nbytes = max(peak_nbytes, window.peak_nbytes - before_nbytes)
            if step >= 6:
                held.append(torch.zeros(64))
        if run is not None:
            kinds = ["planned" if isinstance(s, Running) else "unplanned" for s in states_of(run).values()]
            kinds += ["replanned"] * run.status().replans
    window.close()
    return model, peak_nbytes, kinds


def test_a_move_keeps_its_plan_where_steps_grow() -> None:
    model, peak_nbytes, _ = play(None)
    expected = state(model)
    model, _, kinds = play(peak_nbytes + 256)
    assert_same(expected, state(model))
    assert set(kinds) == {"planned", "replanned"}
