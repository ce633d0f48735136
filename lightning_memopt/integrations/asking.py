"""Ask whether the steps of a loop fit, instead of training: the fronts' option `fit_only`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.plan.forms import TIERS
from lightning_memopt.runtime.tiers.room import total_nbytes
from lightning_memopt.session.budget import budget_on

if TYPE_CHECKING:
    from lightning_memopt.graph import Graph

STEPS = 2
"""Steps that are recorded. Optimizers make their state in the first one, so the last one is like those that follow."""


class Answer(Protocol):
    """The answer (`lightning_memopt.Fit`)."""

    @property
    def fits(self) -> bool: ...
    def table(self) -> str: ...
    def save_plan(self, path: str) -> str: ...


Observe = Callable[[MemOptConfig], "tuple[Graph | None, str]"]
"""Observes a few steps with these options. Returns the graph of the last one, or None and why there is none."""
Within = Callable[[int], AbstractContextManager[None]]
"""A context that undoes what the steps do; storages with more bytes than given are not written."""


def asked(observe: Observe, within: Within, name: str, config: MemOptConfig, device: torch.device) -> Answer | None:
    """The answer for steps on this device and within the budget of `config`. None where the package is switched off.

    Nothing of the steps is computed on the device: the model must be on the CPU. Raises ConfigError as `memopt fit` does.
    """
    if disabled():
        return None
    nbytes = budget_on(device, config)
    loops: Any = importlib.import_module("lightning_memopt.fitting.loops")  # by its name: it knows all fronts, and they not it
    budgets = {tier: config.tier_budget_nbytes(tier, total_nbytes(tier, config.offload_to[1])) for tier in TIERS}
    answer: Answer = loops.of_loop(name, observe, within, device.type, nbytes, config.offload, config.tile, budgets)
    return answer


def refuse_elsewhere(model: torch.nn.Module) -> None:
    """Raise UnsupportedError for a model with tensors on another device than the CPU."""
    devices = {str(t.device) for t in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    if devices:
        raise UnsupportedError(
            f"fit_only records steps without a device, and the model is on {', '.join(sorted(devices))} already. Leave it on "
            "the CPU (use_cpu=True), or run `memopt fit -- python train.py`."
        )
