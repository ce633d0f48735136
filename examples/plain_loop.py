"""A plain PyTorch loop within a budget: the loop stays as it is, `optimize` goes around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.units import format_nbytes

WIDTH, DEPTH, BATCH = 64, 16, 512


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
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Fit the mean of each row; returns the loss."""
    loss = (model(batch) - batch.mean(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(budget: str | None = None, steps: int = 10) -> list[float]:
    """The losses of a training; with a budget, the run's table is printed too."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(steps)]
    if budget is None:
        return [step(model, optimizer, batch) for batch in batches]
    with optimize(model, optimizer, budget=budget) as run:
        losses = [step(model, optimizer, batch) for batch in batches]
    status = run.status()
    if status.measured_peak_nbytes is not None:
        print("measured peak:", format_nbytes(status.measured_peak_nbytes))
    return losses


if __name__ == "__main__":
    plain, planned = train(), train("20MiB")
    print("losses identical to the plain run's:", plain == planned)
