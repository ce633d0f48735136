"""The network of `plain_loop` in a Lightning Trainer: the strategy keeps the budget, the module stays as it is."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptMonitor, MemOptStrategy

from .plain_loop import BATCH, Batch, build, digits


class Digits(L.LightningModule):
    """Classifies images `[batch, 64]`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def main() -> None:
    strategy = MemOptStrategy(budget="10MiB")  # it prints the table at the end
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        strategy=strategy,
        callbacks=[MemOptMonitor()],  # samples a second and bytes, logged where the Trainer has a logger
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), DataLoader(TensorDataset(*digits()), BATCH, shuffle=True, drop_last=True))
    strategy.save_plan("plan.json")  # plan="plan.json" starts with it, without observing


if __name__ == "__main__":
    main()
