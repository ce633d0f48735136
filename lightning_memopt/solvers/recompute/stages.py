"""Cut the forward pass of a real model into a chain of stages, whatever its module tree looks like.

A cut after op c is crossed by the tensors that were made before and are needed after it. Stages end where few bytes cross
("graph separators", thesis ch. 5.2). Real models have tensors that run past many layers (an attention mask, rotary tables, an
encoder's output): these *ambient* tensors are held outside of the chain and do not count as crossing. So are tensors that no
recorded op can make again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from lightning_memopt.graph import BEFORE, Graph, Save
from lightning_memopt.solvers.rollout import unrepeatable

_AMBIENT_SPAN = 0.2
"""A tensor is ambient if it is read in three places or more, over a span of more than this share of the forward ops."""
COARSE, FINE = 0.34, 1.0
"""The bytes that cross a cut may be at most this share of the bytes saved by the smaller of its two stages: for coarse and for
fine chains.
"""


@dataclass(frozen=True, eq=False)
class StageSpan:
    """A stage of the chain.

    index: its number.
    first, last: its forward ops (ids, inclusive).
    enters, leaves: the tensors that cross the cuts before and after it.
    saves: autograd's saves in the stage, of tensors that ops made.
    """

    index: int
    first: int
    last: int
    enters: frozenset[int]
    leaves: frozenset[int]
    saves: tuple[Save, ...]
    begins_at: int
    """The point of the first unpack of its backward."""
    ends_at: int
    """The last point before the backward of the previous stage begins."""

    @cached_property
    def unpacks(self) -> list[tuple[int, int]]:
        """(point, tensor) of every unpack, in order."""
        return sorted((p, s.tensor) for s in self.saves for p in s.unpacked_at)


@dataclass(frozen=True, eq=False)
class Stages:
    """A graph as a chain. `given`: tensors that are held outside of the chain, because they are ambient or no op can make them
    again.
    """

    graph: Graph
    spans: tuple[StageSpan, ...]
    given: frozenset[int]


def _needs(graph: Graph) -> dict[int, tuple[int, int]]:
    """Activation -> (op that made it, last forward op that reads it or saves it)."""
    last: dict[int, int] = {}
    for op in graph.forward:
        for t in op.inputs:
            last[t] = op.id
    for save in graph.saves:
        last[save.tensor] = max(last.get(save.tensor, 0), min(save.op, len(graph.forward) - 1))
    return {t: (op.id, last.get(t, op.id)) for op in graph.forward for t in op.outputs}


def given_tensors(graph: Graph, ambient_span: float = _AMBIENT_SPAN) -> frozenset[int]:
    """Tensors that no op can make again, and ambient tensors."""
    n = len(graph.forward)
    given = set(unrepeatable(graph))
    for t, (made, last) in _needs(graph).items():
        readers = {o.id for o in graph.consumers.get(t, ()) if o.phase == "forward"}
        readers |= {s.op for s in graph.saves_of.get(t, ())}
        spread = len({r * 16 // max(n, 1) for r in readers})
        if last - made > ambient_span * n and spread >= 3 and t not in graph.overwritten:
            given.add(t)
    return frozenset(given)


def _crossings(graph: Graph, given: frozenset[int]) -> list[frozenset[int]]:
    """For every forward op c, the tensors that cross the cut after it."""
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for t, (made, last) in _needs(graph).items():
        if t not in given and last > made:
            starts.setdefault(made, []).append(t)
            stops.setdefault(last, []).append(t)
    crossing: set[int] = set()
    crossings = []
    for op in graph.forward:
        crossing.update(starts.get(op.id, ()))
        crossing.difference_update(stops.get(op.id, ()))
        crossings.append(frozenset(crossing))
    return crossings


def cut(graph: Graph, most: int = 64, given: frozenset[int] | None = None, share: float = COARSE) -> Stages:
    """Cut the graph into at most `most` stages. A cut is left out if a backward out of order, or an overwritten tensor, forbids
    it.
    """
    given = given_tensors(graph) if given is None else given
    crossings = _crossings(graph, given)
    nbytes = [sum(graph.tensors[t].nbytes for t in c) for c in crossings]
    saved_by = [0] * (len(graph.forward) + 1)
    counted: set[int] = set()
    for save in sorted(graph.saves, key=lambda s: s.op):
        if save.tensor not in counted and graph.tensors[save.tensor].born_at != BEFORE:
            counted.add(save.tensor)
            saved_by[min(save.op, len(graph.forward) - 1)] += graph.tensors[save.tensor].nbytes
    prefix = [0]
    for v in saved_by:
        prefix.append(prefix[-1] + v)
    cuts = _minima(graph, crossings, nbytes)
    cuts = _thin(cuts, nbytes, prefix, most, share)
    while True:
        stages = _spans(graph, cuts, crossings, given)
        tangled = [
            k
            for k in range(1, len(stages.spans))
            if stages.spans[k].unpacks
            and stages.spans[k - 1].unpacks
            and stages.spans[k - 1].unpacks[0][0] < stages.spans[k].unpacks[-1][0]
        ]
        silent = [k for k in range(len(stages.spans)) if not stages.spans[k].unpacks]
        if not tangled and not silent:
            return stages
        if len(cuts) == 0:
            return stages
        if tangled:
            cuts = [c for i, c in enumerate(cuts) if i + 1 not in tangled]
        else:
            k = silent[0]
            del cuts[min(k, len(cuts) - 1) if k == 0 else k - 1]


def _minima(graph: Graph, crossings: list[frozenset[int]], nbytes: list[int]) -> list[int]:
    """Ops after which the crossing bytes have a local minimum. For a plateau, the first op is taken."""
    minima = []
    i, n = 0, len(nbytes)
    while i < n:
        j = i
        while j + 1 < n and nbytes[j + 1] == nbytes[i]:
            j += 1
        higher_before = i > 0 and nbytes[i - 1] > nbytes[i]
        higher_after = j + 1 < n and nbytes[j + 1] > nbytes[i]
        if higher_before and higher_after:
            allowed = [c for c in range(i, j + 1) if not crossings[c] & graph.overwritten]
            if allowed:
                minima.append(allowed[0])
        i = j + 1
    return minima


def _thin(cuts: list[int], nbytes: list[int], prefix: list[int], most: int, share: float) -> list[int]:
    """Drop the worst cut, by crossing bytes as a share of its neighbours' saved bytes, until all remaining cuts are good
    enough.
    """
    cuts = list(cuts)
    while cuts:
        edges = [-1, *cuts, len(prefix) - 2]
        saved = [prefix[b + 1] - prefix[a + 1] for a, b in itertools.pairwise(edges)]
        shares = [nbytes[c] / max(1, min(saved[i], saved[i + 1])) for i, c in enumerate(cuts)]
        worst = max(range(len(cuts)), key=shares.__getitem__)
        if shares[worst] <= share and len(cuts) < most:
            break
        del cuts[worst]
    return cuts


def _spans(graph: Graph, cuts: list[int], crossings: list[frozenset[int]], given: frozenset[int]) -> Stages:
    n = len(graph.forward)
    edges = [-1, *cuts, n - 1]
    stage_of = [0] * n
    for k, (a, b) in enumerate(itertools.pairwise(edges)):
        for c in range(a + 1, b + 1):
            stage_of[c] = k
    saves: list[list[Save]] = [[] for _ in range(len(edges) - 1)]
    for save in graph.saves:
        if save.tensor in graph.producers:  # tensors from before the step are in memory anyway
            saves[stage_of[min(save.op, n - 1)]].append(save)
    begins = [min((p for s in group for p in s.unpacked_at), default=None) for group in saves]
    spans = []
    ends = len(graph.points) - 1
    for k in range(len(saves)):
        before = [b for b in begins[:k] if b is not None]
        begin = begins[k] if begins[k] is not None else ends
        assert begin is not None
        spans.append(
            StageSpan(
                index=k,
                first=edges[k] + 1,
                last=edges[k + 1],
                enters=crossings[edges[k]] if k else frozenset(),
                leaves=crossings[edges[k + 1]] if k + 1 < len(saves) else frozenset(),
                saves=tuple(saves[k]),
                begins_at=begin,
                ends_at=max(begin, (min(before) - 1) if before else ends),
            )
        )
    return Stages(graph, tuple(spans), given)
