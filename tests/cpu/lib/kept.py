"""Everything that a training step changes, kept and put back."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Kept:
    """Everything that a step changes, to take it back."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        self.rng = torch.get_rng_state()

    def back(self) -> None:
        self.model.load_state_dict(self.state[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.state[1]))
        torch.set_rng_state(self.rng)
        self.optimizer.zero_grad()

    def now(self) -> list[torch.Tensor]:
        return [*copy.deepcopy(list(self.model.state_dict().values())), torch.get_rng_state()]
