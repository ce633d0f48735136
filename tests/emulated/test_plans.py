"""Planned steps on a device that is not the host, with a backward in the device's thread: their bits, and their bytes."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.lib.times import Drawn, given
from tests.emulated import device, reserved
from tests.emulated.training import CUDA, MODELS, Attention, train

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


@pytest.mark.skipif(device.is_bits(), reason="attention is not fused in bits mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_attention_leaves_unwritten_is_kept_and_predicted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not write all of their results, which are kept where attention runs again. 512 bytes can cost a segment."""
    for seed in range(3):
        given(monkeypatch, Drawn(seed))
        model = Attention().to(CUDA, dtype)
        batch = torch.zeros(16, 100, 256, device=CUDA, dtype=dtype)
        row = reserved.run(
            "attention", (model, lambda batch=batch: batch), torch.optim.AdamW(model.parameters()), "min", "foreach"
        )
        assert (row.predicted_reserved, row.predicted_allocated) == (row.measured_reserved, row.measured_allocated), (seed, row)
        assert row.measured_reserved < row.unmodified
