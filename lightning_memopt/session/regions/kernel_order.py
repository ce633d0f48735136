"""The kernels of compiled code in the order that needs the fewest bytes: solved here, and executed by Inductor."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memopt.compiled import Kernels
from lightning_memopt.solvers.ordering import Order, Problem, order
from lightning_memopt.units import format_nbytes

_SECONDS = 5.0
"""Of each graph. Most take some hundredths; forward and backward of a region are a graph each."""


class KernelOrder:
    """Decides the order of kernels.

    orders: what was found, of each graph that Inductor has compiled.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self.orders: list[Order] = []

    def __call__(self, kernels: Kernels) -> Sequence[int] | None:
        """Another sequence where it needs fewer bytes at its peak; None where Inductor's own is as good."""
        found = order(problem_of(kernels), self._seconds)
        self.orders.append(found)
        return found.sequence if found.peak_nbytes < found.given_nbytes else None

    @property
    def said(self) -> str:
        """What came of it, for the report; empty where Inductor's order was never the worse one."""
        better = [found for found in self.orders if found.peak_nbytes < found.given_nbytes]
        if not better:
            return ""
        most = max(found.given_nbytes - found.peak_nbytes for found in better)
        graphs = f"{len(better)} of {len(self.orders)} graphs"
        return f"; kernels of {graphs} run in another order than Inductor's ({format_nbytes(most)} less at most)"


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
