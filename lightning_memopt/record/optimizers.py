"""What an optimizer updates."""

from __future__ import annotations

from collections.abc import Container

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def updates_any(optimizer: torch.optim.Optimizer, parameters: Container[int]) -> bool:
    """Whether the optimizer has one of these parameters, which are given by `id`."""
    return any(id(p) in parameters for p in parameters_of(optimizer))
