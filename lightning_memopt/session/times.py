"""How long things take on the machine that a plan is made for: ops, our own work beside them, copies and codecs.

Plans are chosen by these times, and solvers stop by their clock: whoever needs one asks `current`, and nothing else. `Times`
gives what was observed and measured on this machine. Set `current` to another one to plan for times that are known beforehand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_memopt.graph import Graph

if TYPE_CHECKING:
    from lightning_memopt.plan.rates import MachineRates
    from lightning_memopt.session.costs import Costs


class Times:
    """The times of this machine."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def solver_clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """What limits of solvers are counted by, in seconds; `clock`: what a solver counts by on this machine."""
        return clock

    def of_ops(self, graph: Graph, observed: list[Graph]) -> list[float]:
        """Seconds of each op of the graph that a plan is made for, from the steps `observed`.

        Per op the least over the steps, then the median over alike ops: same name, phase, sizes in and out. Identical layers
        get identical times, whatever the machine did meanwhile.
        """
        matching = [g.ops for g in observed if len(g.ops) == len(graph.ops)]
        alike: dict[tuple[Any, ...], list[float]] = {}
        keys = []
        for op, same in zip(graph.ops, zip(*matching, strict=True), strict=True):
            sizes = (tuple(graph.tensors[t].nbytes for t in ids) for ids in (op.inputs, op.outputs))
            keys.append((op.name, op.phase, *sizes))
            alike.setdefault(keys[-1], []).append(min(step.seconds for step in same))
        medians = {key: statistics.median(values) for key, values in alike.items()}
        return [medians[key] for key in keys]

    def of_our_work(self, measure: Callable[[], Costs]) -> Costs:
        """What recording and rebuilding take by themselves. `measure`: finds it on this machine."""
        return measure()

    def of_transfers(self, measure: Callable[[], MachineRates]) -> MachineRates:
        """How fast links and codecs are. `measure`: finds it on this machine."""
        return measure()


current = Times()
