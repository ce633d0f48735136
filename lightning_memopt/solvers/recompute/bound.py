"""A lower bound on the extra seconds of every plan of a graph within a budget. The proof: docs/formulation.md, "The bound".

At any one point of the step, each tensor that the rest of backward asks for is either held by the plan, or in memory anyway, or
rebuilt at that point or later. The budget, less the bytes that no plan changes, limits how much can be held; `mincut` gives the
seconds of rebuilding the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lightning_memopt.graph import Graph, base_levels, unmodified_levels, workspaces
from lightning_memopt.solvers.recompute.integers import least_seconds
from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild, Hull
from lightning_memopt.solvers.recompute.windows import without
from lightning_memopt.units import ceil_div

_NEAR, _VERTICES, _CLOSED = 48, 24, 4
"""For one budget: the maximum number of points, of cuts at each point, and of points whose bound is proven in whole tensors."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the step, and the bound there.

    natural_nbytes: bytes in memory whatever the plan says.
    problem: the cut problem of the tensors that a plan may hold in addition.
    hull: its solutions.
    proven: (bytes, seconds): no choice that holds at most these bytes takes fewer seconds. This was proven in whole tensors, so
        it is not weakened by gaps of the hull.
    held: what the best choice found in that proof holds.
    since: before this point, nothing needs to be rebuilt.
    """

    natural_nbytes: int
    problem: HoldOrRebuild
    hull: Hull
    proven: tuple[int, float] = (-1, 0.0)
    held: frozenset[int] | None = None
    since: int = 0

    def bound_seconds(self, budget_nbytes: int) -> float:
        """No plan within the budget takes fewer extra seconds."""
        room, (nbytes, seconds) = budget_nbytes - self.natural_nbytes, self.proven
        return max(self.hull.bound_seconds(room), seconds if room <= nbytes else 0.0)


def requirements(graph: Graph, point: int, there: Collection[int] = ()) -> HoldOrRebuild:
    """The cut problem of the tensors that every plan holds at `point`, or rebuilds at it or later.

    Needed are the tensors that autograd asks for from there on. Free are those that are in memory anyway or not made yet, and
    those of `there`. Lost are those that are overwritten before the first unpack, so that no plan can hold them; after the
    first unpack, a plan may hold a copy. Ops do not run again if their weights do not come back.
    """
    gone = _gone(graph)
    lost = gone if point <= _first_unpack(graph) else frozenset()
    needed = [s.tensor for s in graph.saves if s.unpacked_at and s.unpacked_at[-1] >= point and s.tensor not in gone]
    away = frozenset(t for t in graph.windowed if graph.tensors[t].freed_at < point)
    if away:
        graph = without(graph, away)
    return HoldOrRebuild(
        graph, needed, (frozenset(t.id for t in graph.tensors if t.freed_at >= point) - lost).union(there), lost
    )


def _first_unpack(graph: Graph) -> int:
    return min((p for s in graph.saves for p in s.unpacked_at), default=len(graph.points))


def _gone(graph: Graph) -> frozenset[int]:
    """Tensors that are overwritten before the first unpack."""
    first = _first_unpack(graph)
    return frozenset(old for op in graph.ops if op.at < first for old, _ in op.mutates)


def being_read(graph: Graph, point: int) -> frozenset[int]:
    """Tensors that only autograd holds at a point and that it reads there. Every plan has them in memory."""
    asked = (s.tensor for s in graph.saves if len(s.unpacked_at) == 1 and s.unpacked_at[0] < point <= s.released_at)
    made = frozenset(t for t in asked if t in graph.producers and not graph.tensors[t].there(point))
    return made - _gone(graph)


def near(graph: Graph, budget_nbytes: int, over: Callable[[], bool] = lambda: False) -> list[Moment]:
    """The bounds for one budget at up to `_NEAR` ops of backward at which the unmodified step is above the budget. The highest
    ones are proven in whole tensors. `over`: whether time is up.
    """
    levels, natural, extra = unmodified_levels(graph), base_levels(graph), workspaces(graph)
    first = _first_unpack(graph)
    above = [op.at for op in graph.ops if first < op.at <= graph.last_release and levels[op.at] > budget_nbytes]
    found = []
    for point in above[:: ceil_div(len(above), _NEAR) or 1]:
        if over():
            break
        read = being_read(graph, point)
        nbytes = natural[point] + extra[point] + sum(graph.tensors[t].nbytes for t in read)
        problem = requirements(graph, point, read)
        found.append(Moment(nbytes, problem, problem.hull(_VERTICES, budget_nbytes - nbytes), since=point))
    found.sort(key=lambda there: there.bound_seconds(budget_nbytes), reverse=True)
    for i, there in enumerate(found[:_CLOSED]):
        if over():
            break
        room = budget_nbytes - there.natural_nbytes
        seconds, held = least_seconds(there.problem, room)
        found[i] = replace(there, proven=(room, seconds), held=held)
    return found


def moment(graph: Graph, point: int, vertices: int) -> Moment:
    """The bound at a point of the step, from up to `vertices` cuts."""
    problem = requirements(graph, point)
    return Moment(base_levels(graph)[point] + workspaces(graph)[point], problem, problem.hull(vertices))


def moments(graph: Graph, vertices: int = 24) -> list[Moment]:
    """The bounds at two points where every plan must give something up: the first unpack, and the
    peak of the unmodified step up to the last unpack.
    """
    unpacks = [p for s in graph.saves for p in s.unpacked_at]
    if not unpacks:
        return []
    levels = unmodified_levels(graph)[: max(unpacks) + 1]
    return [moment(graph, point, vertices) for point in sorted({min(unpacks), levels.index(max(levels))})]
