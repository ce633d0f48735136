"""Planned steps on a device that is not the host, with a backward in the device's thread: their bits, and their bytes."""

from __future__ import annotations

import pytest

from tests.emulated import device, reserved
from tests.emulated.training import MODELS, train

pytestmark = pytest.mark.skipif(not device.is_emulated(), reason="the emulated device: make emulated")


@pytest.mark.skipif(not device.is_bits(), reason="memory has no values in bytes mode")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("model", MODELS)
def test_bits_and_bytes_of_the_smallest_plan(model: str, autocast: bool) -> None:
    plain, found = train(model, None, autocast), train(model, "min", autocast)
    assert found.status.phase == "planned" and not found.status.deviates
    assert found.same(plain)
    plan = found.status.plan
    assert found.requested < plain.requested or not any(life.how == "rebuild" for life in plan.lives)
    assert plan.predicted.peak_nbytes == found.allocated


@pytest.mark.skipif(device.is_bits(), reason="sizes of GPUs are for bytes mode")
@pytest.mark.parametrize("update", ["fused", "for-loop"])
@pytest.mark.parametrize("model", ["mlp", "bert"])
def test_reserved_bytes_within_3_percent(model: str, update: str) -> None:
    """More models, budgets and settings, and torch's default update: `python -m tests.emulated.reserved`."""
    for _, row in reserved.rows(model, update, (0.0, 0.5)):
        assert row.holds, row
