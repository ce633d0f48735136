"""`optimize` around a loop whose model and optimizer Accelerate has prepared: the bits that it gives without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import optimize
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, assert_same, batches, leaves_nothing, loss_of, small, state

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    """Prepared model and optimizer, accumulation that does not divide, clipping, a schedule: the same state, within a plan."""
    x, y = batches(1, size=200)[0]

    def prepared() -> tuple[Any, nn.Module, Any, Any, Any]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process otherwise
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=3)
        model = small(depth=5)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return accelerator, *accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), 32), schedule)

    def run_all(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, schedule: Any) -> list[Tensor]:
        torch.manual_seed(2)
        losses = []
        for _ in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
        return [*losses, torch.rand(3)]

    parts = prepared()
    plain = run_all(*parts)
    expected = state(parts[1])
    parts = prepared()
    with leaves_nothing(parts[1]), optimize(parts[1], parts[2], budget="min", **QUIET) as run:
        found = run_all(*parts)
        planned = state_of(run)
    assert_same(expected, state(parts[1]))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert isinstance(planned, Running) and planned.program.random and not planned.drift.deviated
    assert any(op.phase == "update" for op in planned.program.graph.ops), "the prepared optimizer's updates are seen"
