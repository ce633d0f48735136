"""What these scripts share: data that is always the same, a small network, and the end of a training as a file."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH, WIDTH, CLASSES = 24, 32, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--output", required=True)
    return parser.parse_args()


def network() -> nn.Module:
    """Layers with dropout: `[batch, LENGTH, WIDTH]` to `[batch, LENGTH, CLASSES]`."""
    layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def loader(count: int, batch_size: int, shuffle: bool = True) -> DataLoader:
    """`count` samples; the last batch is smaller where they do not divide."""
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, LENGTH, WIDTH, generator=source), torch.randint(0, CLASSES, (count,), generator=source)
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=shuffle)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).mean(1), y)


def finish(args: argparse.Namespace, accelerator: Accelerator, model: nn.Module, optimizer: Any, *others: Any) -> None:
    """Write all that decides the bits."""
    end = [list(others), accelerator.unwrap_model(model).state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    torch.save(end, f"{args.output}.{accelerator.process_index}")
