"""Which steps under a plan are measured, and what they took."""

from __future__ import annotations

import warnings

from lightning_memopt.session.judge.patience import PATIENCE


class Peaks:
    """The measured steps under one plan.

    steps: how many steps ended under it.
    measured_nbytes: the largest measured peak; None where no step was measured.
    wanted: how many of the next steps are to be measured.
    proofs: where the plan is lent, how many steps of its borrowers were measured.
    """

    def __init__(self, first: int) -> None:
        """`first`: how many of the first steps are measured."""
        self.steps = self.proofs = 0
        self.measured_nbytes: int | None = None
        self.wanted, self._left = first, PATIENCE.measured_in_all
        self._said_nbytes = 0

    def measure_next(self) -> None:
        """It is no longer proven that the next steps are within the budget."""
        self.wanted = min(PATIENCE.measured_next, self._left)

    def was_metered(self) -> None:
        """A step was measured."""
        self.wanted = max(0, self.wanted - 1)
        self._left -= 1

    def took(self, peak_nbytes: int) -> None:
        """A measured step took these bytes."""
        self.measured_nbytes = max(peak_nbytes, self.measured_nbytes or 0)

    def verified(self, over_nbytes: int) -> bool:
        """Whether to wait for the next measured step: this one verified, which by itself may have taken the `over_nbytes` above
        the budget.
        """
        return self.steps == 1 and self.wanted > 0 and over_nbytes <= PATIENCE.verifying_nbytes

    def is_news(self, peak_nbytes: int) -> bool:
        """Whether the user is told of this peak: it is clearly above the one that the last line named."""
        news = peak_nbytes > PATIENCE.said_again_times * self._said_nbytes
        if news:
            self._said_nbytes = peak_nbytes
        return news

    def warn(self, peak_nbytes: int, text: str) -> None:
        """No plan lowers the peak: warn once, and again when the peak has become clearly higher."""
        if self.is_news(peak_nbytes):
            warnings.warn(f"MemOpt: {text}", stacklevel=4)
