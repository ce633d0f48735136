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

from lightning_memopt import optimize
from lightning_memopt.native import engine
from tests.cpu.lib.harness import same_bits


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


def trained(budget: str | None) -> tuple[list[torch.Tensor], Any]:
    """(losses, gradients and weights of seven steps, and what dropout would draw next; the run's status)."""
    torch.manual_seed(0)
    model = Net().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[torch.Tensor] = []
    x = torch.randn(1024, 256, device="cuda")

    def loop() -> None:
        for _ in range(7):
            loss = model(x).square().mean()
            loss.backward()
            seen.extend(t.detach().cpu() for t in (loss, *(p.grad for p in model.parameters() if p.grad is not None)))
            optimizer.step()
            optimizer.zero_grad()

    status = None
    if budget is None:
        loop()
    else:
        with optimize(model, optimizer, budget=budget, verbose=False) as run:
            loop()
        status = run.status()
        print(run.report())
    return [*seen, *(p.detach().cpu() for p in model.parameters()), torch.rand(8, device="cuda").cpu()], status


@pytest.mark.parametrize("deterministic", [False, True], ids=["as torch is", "deterministic algorithms"])
def test_a_loop_has_the_bits_of_the_plain_one(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    plain, _ = trained(None)
    again, _ = trained(None)
    assert all(map(same_bits, plain, again)), "the plain loop has other bits each time: nothing can be said of a planned one"
    module = engine.loaded()
    ran = module.counts()[0] if module is not None else 0
    found, status = trained("min")
    assert status.phase == "planned" and not status.deviates and status.plan.predicted.rebuilt_ops > 0
    assert len(found) == len(plain) and all(map(same_bits, plain, found))
    if os.environ.get("MEMOPT_NATIVE") == "0":
        assert engine.loaded() is None
    else:
        module = engine.loaded()
        assert module is not None, "the native engine is not there: it was not built"
        assert module.counts()[0] > ran, "no op was run by the native engine"
