"""The seconds that ops, the engine's own work, copies and codecs take on the machine that a plan is made for.

Plans are chosen by these times, and solvers stop by this clock. All code of a session takes them from `current`. `Times` gives
the times that were observed and measured on this machine. Set `current` to another object to plan for known times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_memopt.clocks import monotonic
from lightning_memopt.graph import Graph
from lightning_memopt.plan.rates import MachineRates

Costs = TypeVar("Costs")


class Times:
    """The times of this machine."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return monotonic()

    def solver_clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """The clock, in seconds, of the time limits of solvers. `clock`: the one that a solver uses on this machine."""
        return clock

    def of_ops(self, graph: Graph, observed: list[Graph]) -> list[float]:
        """Seconds of each op of the graph that a plan is made for, from the steps `observed`.

        For each op the least over the steps, then the median over alike ops: those of the same name, phase, and sizes of inputs
        and outputs. So identical layers get identical times, whatever else the machine did meanwhile.
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
        """The seconds that recording and rebuilding take by themselves. `measure`: measures them on this machine."""
        return measure()

    def of_early_update(self, measure: Callable[[], float]) -> float:
        """The seconds that an early update takes longer than its share of a usual one. `measure`: measures them here."""
        return measure()

    def of_transfers(self, measure: Callable[[], MachineRates]) -> MachineRates:
        """The rates of links and codecs. `measure`: measures them on this machine."""
        return measure()


current = Times()
