"""A lower bound on the extra seconds of every plan of a graph within a budget. The proof: docs/formulation.md, "The bound".

At any one point of the step, what the rest of backward asks for is held by the plan, or there by nature, or made again at that
point or later. The first has room only for what the budget leaves beside what no plan changes; `mincut` prices the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.graph import Graph, base_levels, unmodified_levels, workspaces
from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild, Hull


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the step: `natural_nbytes` are there whatever the plan says, `hull` prices what it may hold beside them."""

    natural_nbytes: int
    problem: HoldOrRebuild
    hull: Hull

    def bound_seconds(self, budget_nbytes: int) -> float:
        """No plan within the budget takes fewer extra seconds."""
        return self.hull.bound_seconds(budget_nbytes - self.natural_nbytes)


def requirements(graph: Graph, point: int) -> HoldOrRebuild:
    """What every plan holds at `point`, or makes again at it or later.

    Needed: what autograd asks for from there on. Free: what is there by nature or is yet to be made. Lost: what is overwritten
    before the first request, so that no plan holds it; past that request a plan may hold a copy that it made.
    """
    first = min((p for s in graph.saves for p in s.unpacked_at), default=len(graph.points))
    gone = frozenset(old for op in graph.ops if op.at < first for old, _ in op.mutates)
    lost = gone if point <= first else frozenset()
    needed = [s.tensor for s in graph.saves if s.unpacked_at and s.unpacked_at[-1] >= point and s.tensor not in gone]
    return HoldOrRebuild(graph, needed, frozenset(t.id for t in graph.tensors if t.freed_at >= point) - lost, lost)


def moment(graph: Graph, point: int, vertices: int) -> Moment:
    """What a point of the step says, from up to `vertices` choices of what to hold there."""
    problem = requirements(graph, point)
    return Moment(base_levels(graph)[point] + workspaces(graph)[point], problem, problem.hull(vertices))


def moments(graph: Graph, vertices: int = 24) -> list[Moment]:
    """Where every plan must give something up: the first request, and the peak of the unmodified step up to the last one."""
    requests = [p for s in graph.saves for p in s.unpacked_at]
    if not requests:
        return []
    levels = unmodified_levels(graph)[: max(requests) + 1]
    return [moment(graph, point, vertices) for point in sorted({min(requests), levels.index(max(levels))})]
