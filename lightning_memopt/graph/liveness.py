"""How many bytes are in memory at every point of the unmodified step, and the part of it that no plan changes."""

from __future__ import annotations

from itertools import accumulate

from lightning_memopt.graph.model import Graph


class Levels:
    """Sums of byte intervals over a graph's points. `add` takes closed intervals, clipped to the axis."""

    def __init__(self, n: int) -> None:
        self._steps = [0] * (n + 1)
        self.n = n

    def add(self, born_at: int, freed_at: int, nbytes: int) -> None:
        first, last = max(born_at, 0), min(freed_at, self.n - 1)
        if first <= last:
            self._steps[first] += nbytes
            self._steps[last + 1] -= nbytes

    def levels(self) -> list[int]:
        return list(accumulate(self._steps[: self.n]))


def base_levels(graph: Graph) -> list[int]:
    """Bytes at every point that are there whatever the plan says: everything but what only autograd holds."""
    levels = Levels(len(graph.points))
    for t in graph.tensors:
        levels.add(t.born_at, t.freed_at, t.nbytes)
    return levels.levels()


def workspaces(graph: Graph) -> list[int]:
    """Bytes that the op at each point allocates beyond its outputs; 0 at points that are no ops."""
    found = [0] * len(graph.points)
    for op in graph.ops:
        found[op.at] = op.workspace_nbytes
    return found


def unmodified_levels(graph: Graph) -> list[int]:
    """Bytes at every point of the unmodified step, workspaces included."""
    levels = Levels(len(graph.points))
    for t in graph.tensors:
        levels.add(t.born_at, max(t.freed_at, graph.saved_until(t.id)), t.nbytes)
    return [level + extra for level, extra in zip(levels.levels(), workspaces(graph), strict=True)]


def resident_nbytes(graph: Graph) -> int:
    """Bytes there before the step begins and after it ends: parameters, optimizer state, the batch."""
    return sum(t.nbytes for t in graph.tensors if t.born_at < 0)
