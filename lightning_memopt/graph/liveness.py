"""Bytes in memory at every point of the unmodified step, and the part of them that no plan can change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from lightning_memopt.graph.model import BEFORE, Graph, Kind, Tensor
from lightning_memopt.units import format_nbytes

RESIDENT: dict[Kind, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer_state": "optimizer state",
    "input": "the batch",
    "gradient": "gradients",
}
"""Kind -> what messages call tensors of this kind that are in memory before a step begins."""


class Levels:
    """Sums of byte intervals over the `n` points of a graph."""

    def __init__(self, n: int) -> None:
        self._steps = [0] * (n + 1)
        self.n = n

    def add(self, born_at: int, freed_at: int, nbytes: int) -> None:
        """Add bytes at the points `born_at .. freed_at` (inclusive); points outside of the axis are ignored."""
        first, last = max(born_at, 0), min(freed_at, self.n - 1)
        if first <= last:
            self._steps[first] += nbytes
            self._steps[last + 1] -= nbytes

    def levels(self) -> list[int]:
        """The sum of all intervals at every point, in bytes."""
        return list(accumulate(self._steps[: self.n]))


def base_levels(graph: Graph) -> list[int]:
    """Bytes at every point that no plan changes: all tensors except those that only autograd holds."""
    levels = Levels(len(graph.points))
    for t in graph.tensors:
        for first, last in t.spans:
            levels.add(first, last, t.nbytes)
    return levels.levels()


def workspaces(graph: Graph) -> list[int]:
    """Bytes that the op at each point allocates beyond its outputs; 0 at other points."""
    nbytes = [0] * len(graph.points)
    for op in graph.ops:
        nbytes[op.at] = op.workspace_nbytes
    return nbytes


def unmodified_levels(graph: Graph) -> list[int]:
    """Bytes at every point of the unmodified step, workspaces included."""
    levels = Levels(len(graph.points))
    for t in graph.tensors:
        for first, last in t.windows or ((t.born_at, max(t.freed_at, graph.saved_until(t.id))),):
            levels.add(first, last, t.nbytes)
    return [level + workspace for level, workspace in zip(levels.levels(), workspaces(graph), strict=True)]


def resident_nbytes(graph: Graph) -> int:
    """Bytes of all tensors that existed before the step, except windowed ones. `resident_text` says what they are."""
    return sum(t.nbytes for t in _resident(graph))


def resident_text(graph: Graph) -> str:
    """The same bytes by purpose, the largest first: what the step needs, and what else the program holds when the step
    begins.
    """
    nbytes: Counter[str] = Counter()
    for t in _resident(graph):
        if t.kind == "input" and t.name != "batch":
            nbytes["other tensors that the step reads"] += t.nbytes
        else:
            nbytes[RESIDENT.get(t.kind, "other tensors that the program holds")] += t.nbytes
    return ", ".join(f"{name} {format_nbytes(n)}" for name, n in nbytes.most_common() if n) or "nothing"


def _resident(graph: Graph) -> Iterator[Tensor]:
    return (t for t in graph.tensors if t.born_at == BEFORE and not t.windows)
