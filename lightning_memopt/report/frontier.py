"""The plans of a frontier as rows, for tables and plots."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.solvers.planner import Frontier


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of the frontier.

    peak_nbytes: predicted peak of a step.
    extra_seconds: predicted seconds that the plan adds to the unmodified step.
    extra_flops: FLOPs that the plan adds to the unmodified step.
    rebuilt_nbytes: bytes that a step rebuilds.
    solver: name of the solver that found the plan.
    """

    peak_nbytes: int
    extra_seconds: float
    extra_flops: int
    rebuilt_nbytes: int
    solver: str


def rows(frontier: Frontier | None) -> list[Row]:
    """One row for each plan, by ascending peak; an empty list without a frontier."""
    if frontier is None:
        return []
    return [
        Row(
            plan.predicted.peak_nbytes,
            plan.predicted.seconds,
            plan.predicted.extra_flops,
            plan.predicted.rebuilt_nbytes,
            plan.solver,
        )
        for plan in frontier.candidates
    ]
