"""Recomputation, a disk, masks at one bit and updates in backward in one plan: the unmodified run's bits, within the budget."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import CLASSES, WORDS, batches, loss_of
from tests.cpu.lib.times import Known, given

STEPS, PROFILE = 6, 2
EVERYTHING: dict[str, Any] = {
    "optimizer_in_backward": "always",
    "offload": "disk",
    "compress": "lossless",
    "solver_seconds": 3.0,
}


class Net(nn.Module):
    """A convolution, BatchNorm, ReLUs (only signs are read back), masks of bools, dropout, and two layers of one weight."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width // 2)
        self.conv = nn.Conv1d(width // 2, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(self.embed(x).transpose(1, 2)))).transpose(1, 2)
        for layer in self.layers:
            h = h + self.dropout(torch.relu(layer(h)))
            h = h.masked_fill(h > 4, 0.0)
        return self.head(h)


def trained(accumulate: int, mixed: bool, **options: Any) -> tuple[list[Tensor], Run | None]:
    """Losses, and what the steps left of parameters and buffers."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(3)
    losses = []
    context = (
        optimize(model, optimizer, profile_steps=PROFILE, verbose=False, **options) if options else contextlib.nullcontext()
    )
    with context as run:
        for i, batch in enumerate(batches(STEPS * accumulate, size=96)):
            last = i % accumulate == accumulate - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = loss_of(model, batch)
            with run.last_backward() if run is not None and last else contextlib.nullcontext():
                loss.backward()
            losses.append(loss.detach())
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return [*losses, *(t.detach() for t in (*model.parameters(), *model.buffers()))], run


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bits_and_budget(accumulate: int, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())  # where a rebuild takes no longer than a fetch, the larger budget needs none
    expected, _ = trained(accumulate, mixed)
    plans = []
    budget: int | str = "min"
    for _ in range(2):
        found, run = trained(accumulate, mixed, budget=budget, **EVERYTHING)
        assert all(map(same_bits, expected, found))
        assert run is not None and run.plan is not None
        state: Any = state_of(run)
        assert not state.drift.deviated and state.peaks.measured_nbytes is not None
        assert state.peaks.measured_nbytes <= run.plan.budget_nbytes
        assert abs(state.peaks.measured_nbytes / run.plan.predicted_peak_nbytes - 1) <= 0.01
        plans.append(run.plan)
        resident = resident_nbytes(state.program.graph)
        budget = resident + (run.plan.predicted_peak_nbytes - resident) * 3
        del run, state, found  # what is alive counts
        gc.collect()
    least, more = plans
    assert sum(life.how == "fetch" for life in least.lives) > sum(life.how == "fetch" for life in more.lives) > 0
