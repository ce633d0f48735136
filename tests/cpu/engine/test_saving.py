"""Saved-tensor hooks of the user that are left elsewhere than where they were entered: torch takes off the innermost ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_memopt import optimize
from lightning_memopt.session.forward.saving import innermost_pack

Opens = Callable[[], Any]


def lossy() -> Any:
    return saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())


class Entering(nn.Module):
    """Enters hooks in the middle of its forward, or leaves those that the loop has entered."""

    def __init__(self, opens: Opens, enters: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.opens, self.enters = opens, enters
        self.hooks: list[Any] = []

    def enter(self) -> None:
        self.hooks.append(self.opens())
        self.hooks[-1].__enter__()

    def leave(self) -> None:
        self.hooks.pop().__exit__(None, None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).exp().sin()
        (self.enter if self.enters else self.leave)()
        return self.second(x).exp().sin()


def train(opens: Opens, enters: bool, late: bool, budget: str | None) -> list[torch.Tensor]:
    """Weights after a few steps. `enters`: the model enters the hooks, and the loop leaves them; else the other way around.
    `late`: the loop leaves them after backward.
    """
    torch.manual_seed(0)
    model = Entering(opens, enters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    within = contextlib.nullcontext() if budget is None else optimize(model, optimizer, budget=budget, verbose=False)
    with within:
        for _ in range(8):
            if not enters:
                model.enter()
            loss = model(torch.randn(64, 32)).sin().mean()
            if enters and not late:
                model.leave()
            loss.backward()
            if enters and late:
                model.leave()
            optimizer.step()
            optimizer.zero_grad()
            assert innermost_pack() is None
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:MemOpt. there is no plan yet")
@pytest.mark.parametrize(("opens", "enters"), [(save_on_cpu, True), (lossy, True), (save_on_cpu, False)])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_that_are_left_elsewhere(opens: Opens, enters: bool, late: bool) -> None:
    """In every step, torch's stack of hooks and the bits are those of the plain run."""
    assert all(map(torch.equal, train(opens, enters, late, "min"), train(opens, enters, late, None)))
