"""A plain PyTorch loop within a budget: the loop stays as it is, `optimize` goes around it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_memopt import optimize

WIDTH, DEPTH, BATCH, CLASSES = 64, 8, 512, 10
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Adds a small network's result to its input `[batch, WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def build() -> nn.Module:
    """A network whose memory is mostly what autograd saves; the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, CLASSES))


@cache
def digits() -> Batch:
    """scikit-learn's handwritten digits: images of 8 x 8 pixels in [0, 1], float32 `[1797, WIDTH]`, and labels `[1797]`."""
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target, dtype=torch.int64)


def batches(steps: int, size: int = BATCH) -> Iterator[Batch]:
    """Batches of random rows, the same at every call."""
    images, labels = digits()
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(images), (size,), generator=draw)
        yield images[rows], labels[rows]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One update; returns the loss."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(budget: str | None = None, steps: int = 10) -> list[float]:
    """The losses of a training; with a budget, the run's table is printed too."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    if budget is None:
        return [step(model, optimizer, batch) for batch in batches(steps)]
    with optimize(model, optimizer, budget=budget) as run:
        losses = [step(model, optimizer, batch) for batch in batches(steps)]
    print(run.report())
    return losses


if __name__ == "__main__":
    plain, planned = train(), train("10MiB")
    print("losses identical to the plain run's:", plain == planned)
