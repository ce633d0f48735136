"""LightningCLI: the digits of `plain_loop`, with the budget and everything else in a file or in flags.

    python -m examples.lightning_cli fit --config configs/lightning.yaml
    python -m examples.lightning_cli fit --config configs/lightning.yaml --trainer.strategy.budget=6MiB
    python -m examples.lightning_cli fit --trainer.strategy.help=MemOptStrategy

The import of `lightning_memopt` below makes the short names `MemOptStrategy`, `MemOptBatchScaler` and `memopt` known.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import ArgsType, LightningCLI
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_memopt  # noqa: F401

from .plain_loop import BATCH, CLASSES, WIDTH, Batch, Block, digits


class DigitsModule(L.LightningModule):
    """Classifies images `[batch, WIDTH]`; logs val_acc, the share of right classes.

    Args:
        depth: number of blocks.
        learning_rate: of Adam.
    """

    def __init__(self, depth: int = 8, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = torch.nn.Sequential(*(Block() for _ in range(depth)), torch.nn.Linear(WIDTH, CLASSES))

    def configure_model(self) -> None:
        """Shard the blocks, where the strategy trains sharded models (FSDP2: configs/fsdp2.yaml)."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.children():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_acc", (self.model(batch[0]).argmax(-1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)


class DigitsData(L.LightningDataModule):
    """scikit-learn's handwritten digits, four fifths of them to train on.

    Args:
        batch_size: images in a batch.
    """

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        self.train, self.held_out = random_split(TensorDataset(*digits()), [0.8, 0.2], draw)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)


def main(args: ArgsType = None) -> LightningCLI:
    """`args`: flags; None: those of the command line."""
    return LightningCLI(DigitsModule, DigitsData, save_config_kwargs={"overwrite": True}, args=args)


if __name__ == "__main__":
    main()
