"""The machine that a plan is made for, as one frozen value: how its allocator works and what it has reserved, and the seconds
that the engine's own work takes. A planner is given it; nothing about a machine is kept in globals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import Graph
from lightning_memopt.plan.allocator.beginning import Beginning
from lightning_memopt.plan.allocator.reserved import reserved
from lightning_memopt.plan.allocator.settings import Settings
from lightning_memopt.plan.model import Life
from lightning_memopt.plan.updates import updated


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


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan depends on beside its graph and its budget.

    allocator: how the device's allocator rounds and splits; from the environment of the process where nobody has asked it.
    beginning: what that allocator has reserved when planned steps begin; None: a history of steps is simulated instead.
    overhead: the engine's own work in steps of the graph that is planned for.
    update_seconds: seconds that an update of one parameter in backward takes longer than its share of an update of all. 0: all
        parameters are updated early that may be.
    """

    allocator: Settings = field(default_factory=Settings.from_environment)
    beginning: Beginning | None = None
    overhead: Overhead = FREE
    update_seconds: float = 0.0

    def usual_step(self, graph: Graph) -> Graph:
        """The step of this graph without a plan: early updates are a part of it only where no plan decides about them."""
        return updated(graph, ()) if self.update_seconds else graph

    def reserve(self, graph: Graph) -> Callable[[tuple[Life, ...]], int] | None:
        """The reserved peak of a plan of this graph by its lives; None where nothing is reserved on its device."""
        return partial(self._reserved_nbytes, graph) if kind_of(graph.device).has_segments else None

    def _reserved_nbytes(self, graph: Graph, lives: tuple[Life, ...]) -> int:
        return reserved(graph, lives, self.allocator, beginning=self.beginning).peak_nbytes
