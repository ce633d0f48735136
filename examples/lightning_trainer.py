"""The network of `plain_loop` in a Lightning Trainer: the strategy keeps the budget, the module stays as it is."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memopt import MemOptMonitor, MemOptStrategy

from .plain_loop import BATCH, WIDTH, build


class RowMeans(L.LightningModule):
    """Fits the mean of each row of a batch `[BATCH, WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.model(batch) - batch.mean(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def main() -> None:
    rows = torch.randn(20 * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    strategy = MemOptStrategy(budget="26MiB")  # the data set is in memory too
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=strategy,
        callbacks=[MemOptMonitor()],  # samples a second and bytes, logged where the Trainer has a logger
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(RowMeans(), DataLoader(rows, BATCH))  # type: ignore[arg-type]  # a tensor is a data set
    strategy.save_plan("plan.json")  # plan="plan.json" starts with it, without observing


if __name__ == "__main__":
    main()
