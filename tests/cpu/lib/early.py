"""The optimizers that may step in backward, plain loops with them, and a count of what they updated there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.runtime.early_updates import EarlyUpdates
from tests.cpu.lib.harness import assert_same_tree
from tests.cpu.lib.loops import leaves_nothing
from tests.cpu.lib.models import data, made, squares

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "muon": lambda p: torch.optim.Muon(p, 1e-2),
}
ALWAYS: dict[str, Any] = dict(optimizer_in_backward="always", profile_steps=1)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Grows by every parameter that is updated in backward."""
    found: list[Tensor] = []
    update = EarlyUpdates._update
    monkeypatch.setattr(EarlyUpdates, "_update", lambda self, p: (found.append(p), update(self, p))[1])
    return found


def plain(model: nn.Module, run: Run | None, optimizer: torch.optim.Optimizer, batches: list[Any], backwards: int = 1) -> None:
    """A loop that marks its last backward."""
    torch.manual_seed(3)
    for batch in batches:
        for i in range(backwards):
            loss = squares(model, batch)
            with run.last_backward() if run is not None and i == backwards - 1 else contextlib.nullcontext():
                loss.backward()
        optimizer.step(None)  # as Accelerate does: no closure
        optimizer.zero_grad()


def same_as_plain(
    factory: Callable[[], nn.Module],
    make: Make,
    batches: list[Any],
    loop: Callable[..., None] = plain,
    budget: Any = "min",
    mode: str = "always",
) -> Run:
    """The loop without us and with updates in backward: parameters and state to the bit, nothing left on the model."""
    ends = []
    for attach in (False, True):
        model = made(factory)
        optimizer = make(model.parameters())
        options: dict[str, Any] = dict(budget=budget, optimizer_in_backward=mode, profile_steps=1, verbose=False)
        with leaves_nothing(model), optimize(model, optimizer, **options) if attach else contextlib.nullcontext() as run:
            loop(model, run, optimizer, batches)
        ends.append([model.state_dict(), optimizer.state_dict()])
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert_same_tree(*ends)
    assert run is not None and run.plan is not None
    return run


WIDE = [data(64, 16, seed=s) for s in range(5)]
