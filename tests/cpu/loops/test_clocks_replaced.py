"""If a script replaces the clocks of the module `time`, a run takes no reading from them, and still gets a plan."""

from __future__ import annotations

import itertools
import time
from unittest import mock

import pytest
import torch

from lightning_memopt import optimize

CLOCKS = ["monotonic", "perf_counter", "process_time", "thread_time"]


@pytest.mark.parametrize("clock", CLOCKS)
def test_no_reading_is_taken(clock: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(time, clock, side_effect=itertools.count()):
        with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            phase = run.status().phase
        readings = getattr(time, clock).call_count
    assert phase == "planned"
    assert readings == 0
