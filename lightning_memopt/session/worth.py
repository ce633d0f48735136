"""How long to search for faster plans, and how slow the smallest plan may be: a run must save more time than it spends.

A plan saves a part of each step that it is in force for, and how many steps come is not known. A search for a faster plan
takes as long as `_STEPS` unmodified steps at most: a twentieth of a run of a thousand steps.
"""

from __future__ import annotations

from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import Graph

_STEPS = 50
_LEAST_SECONDS = 1.0
"""Any search may take this long. Small models train for a few seconds anyway."""


def worth(graph: Graph, config: MemOptConfig) -> float:
    """Seconds that a search for faster plans of this step may take, `solver_seconds` at most."""
    return min(config.solver_seconds, max(_LEAST_SECONDS, _STEPS * graph.step_seconds))


def most_extra_seconds(graph: Graph, config: MemOptConfig) -> float:
    """Seconds that the smallest plan may take on top of the unmodified step."""
    return (config.max_slowdown - 1) * graph.step_seconds
