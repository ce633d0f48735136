"""The first planned step takes the bytes that its plan predicts, whatever Lightning did before the steps that were observed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptStrategy
from lightning_memopt.native import counter

WIDTH, BATCH = 64, 128


class Task(pl.LightningModule):
    """Layers with dropout, and a metric whose bytes make the end of the forward the peak of a step."""

    def __init__(self, metric: int) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.net, self.metric = nn.Sequential(*layers), metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.net(batch[0])
        if self.metric:
            self.log("metric", y.detach().repeat(self.metric, 1).max())
        self.log("loss", y.square().mean())
        return y.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Peaks(pl.Callback):
    """(predicted, measured) bytes of every planned step. The prediction is that of the plan with which the step began."""

    def __init__(self) -> None:
        self.predicted: int | None = None
        self.pairs: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.predicted = trainer.strategy.status().predicted_peak_nbytes

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        measured = trainer.strategy.status().measured_peak_nbytes
        if self.predicted is not None and measured is not None:
            self.pairs.append((self.predicted, measured))


@pytest.mark.parametrize(
    ("profile_steps", "metric"),
    [(3, 0), (1, 24)],
    ids=["the last observed step follows validation", "only the first step is observed"],
)
def test_the_first_planned_step_is_as_predicted(profile_steps: int, metric: int) -> None:
    """An epoch has two batches and a validation. Lightning frees all gradients before it validates, and logs other metrics
    afterwards; in the other steps it keeps gradients until the forward is over.
    """
    peaks, data = Peaks(), DataLoader(TensorDataset(torch.randn(2 * BATCH, WIDTH)), BATCH)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = MemOptStrategy(budget="min", profile_steps=profile_steps, verbose=False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=3, callbacks=[peaks], **quiet)
    trainer.fit(Task(metric), data, data)
    if counter() is None:
        pytest.skip("no compiler: nothing counts the allocator's bytes")
    predicted, measured = peaks.pairs[0]
    assert abs(measured - predicted) <= 0.01 * predicted, peaks.pairs
    assert strategy.status().replans == 0
