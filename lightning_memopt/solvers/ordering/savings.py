"""What another order of the ops of a step could save at most, and what early updates save of it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.graph import Graph
from lightning_memopt.solvers.ordering.solve import order
from lightning_memopt.solvers.ordering.steps import step_of


@dataclass(frozen=True)
class Savings:
    """Bytes at the peak of an unmodified step, each buffer freed after the last op that uses it.

    given_nbytes: in the order in which the ops ran.
    early_nbytes: in that order, with updates as early as possible.
    best_nbytes: in the best order that was reached.
    bound_nbytes: no order needs fewer.
    """

    given_nbytes: int
    early_nbytes: int
    best_nbytes: int
    bound_nbytes: int

    @property
    def most_nbytes(self) -> int:
        """No order saves more."""
        return self.given_nbytes - self.bound_nbytes


def savings(graph: Graph, seconds: float = 1.0) -> Savings | None:
    """What another order of this step could save at most; None for a graph without ops.

    seconds: the bound may be looser where they are too few.
    """
    if not graph.ops:
        return None
    result = order(step_of(graph).problem, seconds)
    return Savings(result.given_nbytes, result.early_nbytes, result.peak_nbytes, result.bound_nbytes)
