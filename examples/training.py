"""What the two trainings share: their loss, and one LightningModule and LightningDataModule for any classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt import MemOptStrategy

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Workload(NamedTuple):
    """All that a plain training loop needs; batches go to `loss_of`."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    train_loader: DataLoader
    held_out_loader: DataLoader


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, in nats: logits `[*targets.shape, classes]`, int64 targets of any shape."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch of `(inputs, targets)`: a scalar with its graph."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


class Data(L.LightningDataModule):
    """Training and held-out loaders, made anew (same order for the same seed) whenever a Trainer asks."""

    def __init__(self, loaders: Callable[[], tuple[DataLoader, DataLoader]]) -> None:
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self) -> DataLoader:
        return self.loaders()[0]

    def val_dataloader(self) -> DataLoader:
        return self.loaders()[1]


class Task(L.LightningModule):
    """Trains a classifier; logs train_loss each step, val_loss (nats) and val_acc (share of right classes) per validation."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.model, self.make_optimizer = model, make_optimizer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, targets = self.model(batch[0]), batch[1]
        count = len(targets)
        self.log("val_loss", cross_entropy(logits, targets), prog_bar=True, batch_size=count)
        self.log("val_acc", (logits.argmax(-1) == targets).float().mean(), prog_bar=True, batch_size=count)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.model)


def fit(task: Task, data: Data, budget: str, **limits: Any) -> None:
    """Train on the CPU within `budget` by a Trainer, and print what held-out data says."""
    strategy = MemOptStrategy(budget=budget)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False, **limits)
    trainer.fit(task, datamodule=data)
    metrics = trainer.callback_metrics
    print(f"held-out loss {float(metrics['val_loss']):.3f}, accuracy {100 * float(metrics['val_acc']):.1f} %")
