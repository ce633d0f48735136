"""The machine that a plan is made for, as one frozen value: how its allocator works, what that has reserved, and the seconds
that the engine's own work takes. Planners get it as an argument; no global keeps facts about a machine.
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
from lightning_memopt.plan.lower import Schedule
from lightning_memopt.plan.model import Life
from lightning_memopt.plan.updates import updated


@dataclass(frozen=True)
class Overhead:
    """Seconds of the engine's own work in a step.

    of: a function that gives these seconds for the lives of a plan.
    rebuilt_op: an estimate of the engine's seconds for one op that runs again. A search changes a plan a thousand times and
        cannot afford `of`; it adds this estimate to the seconds of each op instead.
    """

    of: Callable[[tuple[Life, ...]], float]
    rebuilt_op: float = 0.0

    def added_to(self, graph: Graph) -> Graph:
        """The graph with the estimate added to the seconds of its ops."""
        if not self.rebuilt_op:
            return graph
        return replace(graph, ops=tuple(replace(op, seconds=op.seconds + self.rebuilt_op) for op in graph.ops))


FREE = Overhead(lambda _: 0.0)
"""An engine whose own work takes no time."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan depends on, in addition to its graph and its budget.

    allocator: how the device's allocator rounds and splits; read from the environment of the process if the allocator itself
        was not asked.
    beginning: what that allocator has reserved when planned steps begin. If None, a history of steps is simulated instead.
    overhead: the engine's own work in steps of the graph.
    update_seconds: how many seconds longer it takes to update one parameter in backward than to update it together with all
        others. If 0, all parameters that may be updated early are.
    """

    allocator: Settings = field(default_factory=Settings.from_environment)
    beginning: Beginning | None = None
    overhead: Overhead = FREE
    update_seconds: float = 0.0

    def usual_step(self, graph: Graph) -> Graph:
        """The step of this graph without a plan. It has early updates only if plans do not decide about them."""
        return updated(graph, ()) if self.update_seconds else graph

    def reserve(self, graph: Graph) -> Callable[..., int] | None:
        """A function from the lives of a plan of this graph, and perhaps their schedule, to its reserved peak; None if the
        device's allocator reserves nothing.
        """
        return partial(self._reserved_nbytes, graph) if kind_of(graph.device).has_segments else None

    def _reserved_nbytes(self, graph: Graph, lives: tuple[Life, ...], schedule: Schedule | None = None) -> int:
        return reserved(graph, lives, self.allocator, schedule, self.beginning).peak_nbytes
