"""The network of `plain_loop` in a loop of Lightning Fabric: the strategy keeps the budget, the loop stays as it is.

`Fabric(devices=2, strategy=MemOptFabricStrategy(...))` trains by DDP, in two processes with a budget each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_memopt import MemOptFabricStrategy

from .plain_loop import batches, build


def train() -> None:
    """Ten steps. The table is printed when the loop lets go of the model, at the end of this function."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=MemOptFabricStrategy(budget="10MiB"))
    fabric.launch()
    model = build()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    for images, labels in batches(10):
        fabric.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train()
