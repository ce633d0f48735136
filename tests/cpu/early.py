"""The optimizers that may step in backward, and a count of what they updated there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memopt.runtime.optimizer import EarlyUpdates

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
