"""The first thing to run on a device: one loop inside `optimize`, by the engine of this process (MEMOPT_NATIVE=0: Python's).

Bits alone are judged, so that a failure has one meaning; bytes are in the report that it prints, and judged by other tests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt.native import engine
from tests.cpu.lib.harness import same_bits
from tests.gpu.training import trained


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loop(budget: str | None) -> tuple[list[torch.Tensor], Any]:
    """Seven steps on one batch."""
    torch.manual_seed(0)
    model = Net().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(1024, 256, device="cuda")
    return trained(model, optimizer, [x] * 7, budget)


@pytest.mark.parametrize("deterministic", [False, True], ids=["as torch is", "deterministic algorithms"])
def test_a_loop_has_the_bits_of_the_plain_one(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    plain, _ = loop(None)
    again, _ = loop(None)
    assert all(map(same_bits, plain, again)), "the plain loop has other bits each time: nothing can be said of a planned one"
    module = engine.loaded()
    ran = module.counts()[0] if module is not None else 0
    found, status = loop("min")
    assert status.phase == "planned" and not status.deviates and status.plan.predicted.rebuilt_ops > 0
    assert len(found) == len(plain) and all(map(same_bits, plain, found))
    if os.environ.get("MEMOPT_NATIVE") == "0":
        assert engine.loaded() is None
    else:
        module = engine.loaded()
        assert module is not None, "the native engine is not there: it was not built"
        assert module.counts()[0] > ran, "no op was run by the native engine"
