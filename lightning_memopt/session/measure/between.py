"""What is in memory between steps: from an update to the next forward, evaluation included.

No plan changes these bytes: they belong to another model's forward, a copy of the weights, or a test. But a budget covers the
process, so they are measured, and one line says so if they are above it.
"""

from __future__ import annotations

import warnings
import weakref

import torch

from lightning_memopt.native import counter_of
from lightning_memopt.native.counting import Window
from lightning_memopt.units import format_nbytes

_MORE = 1.1
"""The line is repeated when the bytes are this many times those that it named."""


class Between:
    """Measures with the native counter, on the CPU. On CUDA, `read` is told what the allocator has reserved since a meter was
    closed that reset its peak.

    peak_nbytes: the largest peak between steps so far, before steps with a plan.
    """

    def __init__(self) -> None:
        _all.add(weakref.ref(self, _all.discard))
        self.peak_nbytes = 0
        self._said_nbytes = 0
        self._last_nbytes = 0
        self._window: Window | None = None

    def begins(self, device: torch.device) -> None:
        """A step is over, or evaluation begins in it."""
        counts = counter_of(device)
        if self._window is None and counts is not None:
            self._window = counts.window()

    def ends(self, foreign_nbytes: int) -> None:
        """A forward of training begins. So it does for other runs of the process, which may be between their steps: the step of
        this one is measured as such. `foreign_nbytes`: bytes of this run that the counter does not see.
        """
        for ref in tuple(_all):
            if (other := ref()) is not None and other._window is not None:
                other.pauses(foreign_nbytes if other is self else 0)

    def pauses(self, foreign_nbytes: int = 0) -> None:
        """Do not measure until the next step of this run."""
        window, self._window = self._window, None
        if window is not None:
            self._last_nbytes = max(self._last_nbytes, window.peak_nbytes + foreign_nbytes)
            window.close()

    def read(self, nbytes: int) -> None:
        """`nbytes` bytes were in memory together before the step that begins."""
        self._last_nbytes = max(self._last_nbytes, nbytes)

    def spoil(self) -> None:
        """A plan is being made: the memory that this takes is not the user's."""
        if self._window is not None:
            self._window.reset()

    def step_ended(self, planned: bool, device: torch.device, budget_nbytes: int | None) -> None:
        """The step that came after is over, and it is measured until the next one. `planned`: the step had a plan."""
        nbytes, self._last_nbytes = self._last_nbytes, 0
        self.begins(device)
        if not planned:
            return
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        if budget_nbytes is not None and nbytes > max(budget_nbytes, _MORE * self._said_nbytes):
            self._said_nbytes = nbytes
            warnings.warn(
                f"MemOpt: {nbytes} bytes ({format_nbytes(nbytes)}) were in memory between an update and the next forward, "
                f"{nbytes - budget_nbytes} above the budget. Code outside of the planned step took them (another model's "
                "forward, a copy of weights, an evaluation), and no plan lowers them. Run that code under torch.no_grad() or "
                f"on smaller batches, or delete what it need not keep; or set budget={nbytes} or more.",
                stacklevel=3,
            )

    def close(self) -> None:
        """The run is over."""
        window, self._window = self._window, None
        if window is not None:
            window.close()


_all: set[weakref.ref[Between]] = set()


def spoil_between() -> None:
    """See `Between.spoil`, for all runs of the process."""
    for ref in tuple(_all):
        if (between := ref()) is not None:
            between.spoil()
