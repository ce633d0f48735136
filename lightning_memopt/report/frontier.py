"""The frontier of a session as rows, for tables and plots."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.solvers.planner import Frontier


@dataclass(frozen=True, slots=True)
class Row:
    """One Pareto plan: what it peaks at and what it costs on top of the unmodified step."""

    peak_nbytes: int
    extra_seconds: float
    extra_flops: int
    rebuilt_nbytes: int
    solver: str


def rows(frontier: Frontier | None) -> list[Row]:
    """Rows by rising peak; empty without a frontier."""
    if frontier is None:
        return []
    return [
        Row(
            c.predicted.peak_nbytes,
            c.predicted.seconds,
            c.predicted.extra_flops,
            c.predicted.rebuilt_nbytes,
            c.solver,
        )
        for c in frontier.candidates
    ]
