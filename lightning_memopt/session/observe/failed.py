"""The state of a signature that gets no plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from lightning_memopt.units import format_nbytes


@dataclass(frozen=True, eq=False)
class Failed:
    """No plan will be made: the model trains without one.

    reason: why there is no plan.
    said: the measured peak that the warning named; empty before it.
    """

    reason: str
    said: list[int] = field(default_factory=list)

    def measured(self, peak_nbytes: int, budget_nbytes: int | None) -> None:
        """A step was measured. The first one above the budget leads to a warning."""
        if budget_nbytes is not None and peak_nbytes > budget_nbytes and not self.said:
            self.said.append(peak_nbytes)
            warnings.warn(
                f"MemOpt: a step without a plan was measured at {peak_nbytes} bytes ({format_nbytes(peak_nbytes)}), above the "
                f"budget of {budget_nbytes}. There is no plan, because {self.reason}. Make the batch smaller, or the budget "
                "larger.",
                stacklevel=2,
            )
