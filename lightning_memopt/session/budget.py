"""The budget on a device, and the memory that other programs leave there."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.session.parts import Part
from lightning_memopt.units import format_nbytes


def budget_on(device: torch.device, config: MemOptConfig) -> int | None:
    """The budget in bytes on this device, lowered to the bytes that other programs leave free; None for "min"."""
    backend = backend_of(device)
    backend.check()
    budget = config.budget_nbytes(device)
    free = backend.free_nbytes()
    if budget is None or free is None or budget <= free:
        return budget
    warnings.warn(
        f"MemOpt: the budget is {budget} bytes ({format_nbytes(budget)}), but other programs leave {free} bytes "
        f"({format_nbytes(free)}) of {device}; plans are made for those.",
        stacklevel=2,
    )
    return free


def limit_of(budget_nbytes: int | None, config: MemOptConfig) -> int | None:
    """The bytes that plans may take: the budget without the headroom; None for "min"."""
    return None if budget_nbytes is None else budget_nbytes - config.headroom


def bytes_on(device: torch.device, config: MemOptConfig) -> int:
    """`budget_on` for callers that choose a batch size by it. Raises ConfigError for "min"."""
    nbytes = budget_on(device, config)
    if nbytes is None:
        raise ConfigError(
            "budget='min' fits every batch size, so there is nothing to search. Give the bytes that a step may use."
        )
    return nbytes


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU for a model without any.

    Each step of a model without parameters asks for it, and to walk through all modules takes longer than an op: it stops at
    the first tensor.
    """
    return next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))


EVERY = 16
"""Number of planned steps after which the memory that other programs leave is read again."""


class Neighbours(Part):
    """Checks how much memory other programs leave on a device while planned steps run. The CUDA runtime knows it, for slices of
    a GPU as well.
    """

    def __init__(self, device: torch.device, budget_nbytes: int | None) -> None:
        self.moved(device, budget_nbytes)

    def moved(self, device: torch.device, budget_nbytes: int | None) -> None:
        """The model is on this device, with this budget."""
        self.device, self.budget_nbytes = device, budget_nbytes
        self._steps = 0
        self._said = False

    def step_ended(self, planned: Sequence[object]) -> None:
        """See `Part`. Warns when the budget is no longer free, and again only after it was free in between."""
        if not planned:
            return
        self._steps += 1
        if self._steps % EVERY or self.budget_nbytes is None:
            return
        free = backend_of(self.device).free_nbytes()
        short = free is not None and free < self.budget_nbytes
        if short and not self._said:
            warnings.warn(
                f"MemOpt: other programs now leave {free} bytes ({format_nbytes(free or 0)}) of {self.device} to this one, "
                f"below the budget of {self.budget_nbytes} bytes ({format_nbytes(self.budget_nbytes)}): a step may run out of "
                "memory. Lower the budget, or end what else runs on this device.",
                stacklevel=2,
            )
        self._said = short
