"""Planned steps that depart and raise leave nothing: `python -m benchmarks leak`, with fewer steps, by either engine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.robustness import leak
from benchmarks.robustness.samples import EVERY, NAMES, growth, leaks
from lightning_memopt.native import engine

pytestmark = pytest.mark.long

STEPS = 800
BLOCKS = 200
"""Maximum number of blocks that Python's own caches may take at once. A leak of one block per step would be 375."""


@pytest.mark.real_times
@pytest.mark.parametrize("by", leak.ENGINES)
def test_steps_leave_nothing(by: str) -> None:
    if by == "native" and engine.loaded() is None:
        pytest.skip("there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")
    result = leak.by(by, STEPS)
    assert (result["engine"], result["departures"], result["exceptions"]) == (by, 14, 11)
    assert result["native_ops"] > 3 * result["python_ops"] or by == "python"
    assert leaks(result["growth"], python_blocks=BLOCKS) == [], result["growth"]


def test_what_grows_is_said() -> None:
    """One object for each exception, and a tensor for each departure, of 5,000 steps."""
    flat = {name: 0.0 for name in NAMES}
    assert leaks(flat) == []
    values = [i * EVERY // leak.RAISES for i in range(200)]
    assert leaks(flat | {"objects": growth(values)}) == ["objects"]
    held = [i * EVERY // leak.DEPARTS * torch.ones(64).nbytes for i in range(200)]
    assert leaks(flat | {"tensor_nbytes": growth(held)}) == ["tensor_nbytes"]


def test_another_plan_is_no_growth() -> None:
    """Samples of each plan are beside each other; what grows under all of them is noticed all the same."""
    kinds = [0] * 30 + [1] * 20 + [0] * 10
    plans = [500 + 40 * kind for kind in kinds]
    assert growth(plans) > 10 and growth(plans, kinds) == 0
    assert growth([value + i for i, value in enumerate(plans)], kinds) == pytest.approx(len(kinds) - 1)
