"""What runs between an update and the next forward is measured; if it is above the budget, one line says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.robustness import loops_count
from lightning_memopt.native import install
from lightning_memopt.session.measure.between import Between
from lightning_memopt.session.measure.peak_meter import Metering, spoil_open_meters
from tests.cpu.lib.between_steps import CASES
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.written import written

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LARGE_NBYTES = 1 << 24
counts = pytest.mark.skipif(loops_count.built() is None, reason="needs a compiler")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return written("between_steps", tmp_path_factory.mktemp("counted"), timeout=300, **loops_count.environment())


@counts
@needs_native
@pytest.mark.parametrize("name", CASES)
def test_it_is_counted_and_said_once(counted: dict[str, Any], name: str) -> None:
    """The measured peak agrees with a count from outside. No new plan is made, because no plan changes these bytes."""
    found = counted[name]
    assert found["measured"] == found["largest"], found
    assert found["step"] <= found["budget"] and not found["replans"], found
    if name == "nothing":
        assert not found["said"]
        return
    assert found["largest"] > found["budget"], "the loop takes too little to test anything"
    (line,) = found["said"]
    assert f"{found['largest']} bytes" in line and "between an update and the next forward" in line
    assert f"set budget={found['largest']} or more" in line


def taken() -> None:
    """Take bytes for a moment."""
    torch.empty(LARGE_NBYTES, dtype=torch.uint8).fill_(0)


@needs_native
def test_what_is_of_no_user_is_not_counted() -> None:
    """A solve is not counted, nor are the steps of other runs: those runs measure them."""
    install()
    between, other = Between(), Between()
    between.step_ended(True, CPU, None)
    taken()
    between.ends(0)
    between.step_ended(True, CPU, None)
    least = between.peak_nbytes
    assert least >= LARGE_NBYTES
    between.peak_nbytes = 0
    taken()
    spoil_open_meters()
    between.ends(0)
    between.step_ended(True, CPU, None)
    assert between.peak_nbytes <= least - LARGE_NBYTES
    other.ends(0)
    taken()
    between.ends(0)
    between.step_ended(True, CPU, None)
    assert between.peak_nbytes <= least - LARGE_NBYTES
    for each in (between, other):
        each.close()


@needs_native
def test_steps_without_a_plan_do_not_count(recwarn: pytest.WarningsRecorder) -> None:
    install()
    between = Between()
    for planned in (False, True):
        between.step_ended(False, CPU, None)
        taken()
        between.ends(0)
        between.step_ended(planned, CPU, 1)
        assert bool(between.peak_nbytes) is planned
        assert len(recwarn) == planned
    between.close()


def test_a_device_tells_what_it_reserved_since_a_meter_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what was reserved resets no peak."""
    reserved = [5, 9]
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: reserved.pop(0))
    metering, model = Metering(), torch.nn.Linear(2, 2)
    metering.begin(model, [], torch.ones(2), CUDA, wanted=True)
    assert metering.close() is not None
    metering.begin(model, [], torch.ones(2), CUDA, wanted=False)
    metering.between.step_ended(True, CUDA, 8)
    assert metering.between.peak_nbytes == 9
    assert calls.count("reset_peak_memory_stats") == 1
