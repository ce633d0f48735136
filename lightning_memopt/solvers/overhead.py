"""Seconds that a plan takes beside the ops that run again: the engine's own work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life


@dataclass(frozen=True)
class Overhead:
    """Seconds of the engine's own work in a step.

    of: gives them for the lives of a plan.
    rebuilt_op: about so many of them are due to each op that runs again. A search changes a plan a thousand times and has no
        time for `of`; it adds these to the seconds of each op.
    """

    of: Callable[[tuple[Life, ...]], float]
    rebuilt_op: float = 0.0

    def added_to(self, graph: Graph) -> Graph:
        """The graph with these seconds in those of its ops."""
        if not self.rebuilt_op:
            return graph
        return replace(graph, ops=tuple(replace(op, seconds=op.seconds + self.rebuilt_op) for op in graph.ops))


FREE = Overhead(lambda _: 0.0)
"""An engine whose own work takes no time."""
