"""Trainings whose step is a forward, its backward and an update, as `memopt fit` is asked about them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_memopt.bench.subject import Training


def training_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Training:
    """A training that lets gradients go after each update. `loss`: runs the forward."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)
