"""Convolutions on CUDA: rebuilt with the same bits, and never rebuilt once cuDNN has chosen algorithms by time (A14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt.device import determinism
from lightning_memopt.report.fates import rebuilt
from tests.cpu.lib.harness import same_bits
from tests.gpu.training import trained


class Blocks(nn.Module):
    """Residual blocks; the sizes of batches change cuDNN's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.GELU(), nn.Conv2d(64, 32, 3, padding=1))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.nn.functional.gelu(block(x))
        return x


def loop(pixels: int, budget: str | None) -> tuple[list[torch.Tensor], Any]:
    """Seven steps; the last ones have a smaller batch."""
    torch.manual_seed(0)
    model = Blocks().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    sizes = (16, 16, 16, 16, 16, 12, 12)
    batches = (torch.randn(size, 3, pixels, pixels, device="cuda") for size in sizes)  # drawn one by one, between the steps
    return trained(model, optimizer, batches, budget, max_slowdown=float("inf"))


def rebuilt_operators(pixels: int) -> set[str]:
    """What the smallest plan rebuilds, once its steps were seen to have the bits of plain ones."""
    plain, _ = loop(pixels, None)
    again, _ = loop(pixels, None)
    assert all(map(same_bits, plain, again)), "the plain loop has other bits each time: nothing can be said of a planned one"
    found, status = loop(pixels, "min")
    assert len(found) == len(plain) and all(map(same_bits, plain, found))
    assert status.phase == "planned" and not status.deviates
    return {operator for operator, *_ in rebuilt(status.graph, status.plan)}


def test_a14_convolutions_are_rebuilt() -> None:
    assert "convolution" in rebuilt_operators(24)


def test_a14_no_convolution_is_rebuilt_that_was_chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another size: what a thread has chosen for a size, it keeps for good. Torch's own tests, which sweeps import, let
    nobody set a flag by name.
    """
    monkeypatch.setattr(determinism, "_tuned", [])
    now = torch.backends.cudnn
    with now.flags(enabled=now.enabled, benchmark=True, deterministic=now.deterministic, allow_tf32=now.allow_tf32):
        found = rebuilt_operators(20)
    print(f"rebuilt: {', '.join(sorted(found))}")
    assert found and "convolution" not in found
