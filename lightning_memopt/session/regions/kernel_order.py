"""The kernels of compiled code in the order that needs the fewest bytes: solved here, and executed by Inductor."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memopt.compiled import Kernels
from lightning_memopt.solvers.ordering import Order, Problem, order
from lightning_memopt.units import format_nbytes

_SECONDS = 5.0
"""Of each graph. Most take some hundredths; forward and backward of a region are a graph each."""
_QUICK_SECONDS = 0.5
_WORTH = 0.001
"""An order is executed if it saves more than this share of the peak. Where more could still be saved after the quick seconds,
the search goes on."""


class KernelOrder:
    """Decides the order of kernels.

    orders: what was found, of each graph that Inductor has compiled.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self.orders: list[Order] = []

    def __call__(self, kernels: Kernels) -> Sequence[int] | None:
        """Another sequence where it needs clearly fewer bytes at its peak; None where Inductor's own is about as good."""
        problem = problem_of(kernels)
        found = order(problem, min(_QUICK_SECONDS, self._seconds))
        if found.gap > _WORTH:
            found = order(problem, self._seconds)
        self.orders.append(found)
        return found.sequence if _is_worth(found) else None

    @property
    def said(self) -> str:
        """What came of it, for the report; empty where Inductor's order was never the worse one."""
        better = list(filter(_is_worth, self.orders))
        if not better:
            return ""
        most = max(found.given_nbytes - found.peak_nbytes for found in better)
        graphs = f"{len(better)} of {len(self.orders)} graphs"
        return f"; kernels of {graphs} run in another order than Inductor's ({format_nbytes(most)} less at most)"


def _is_worth(found: Order) -> bool:
    """Whether the order is executed."""
    return found.peak_nbytes < (1 - _WORTH) * found.given_nbytes


def problem_of(kernels: Kernels) -> Problem:
    """The ordering problem of kernels."""
    return Problem(
        before=kernels.before,
        makers=kernels.makers,
        users=kernels.users,
        nbytes=kernels.nbytes,
        stays=kernels.stays,
        workspace=(0,) * len(kernels.before),
    )
