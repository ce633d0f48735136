"""Choose the tensors to hold between forward and backward, op by op: exact for a price per byte, by minimum cut.

For the tensors T needed by backward, minimise   price * (bytes held) + (seconds of the ops that run again)   where each needed
tensor is held or rebuilt, and the inputs of an op that runs again are held or rebuilt. Both conditions are pairwise and
submodular (Picard, 1976), so a minimum s-t cut is exact. An op that several tensors need counts once (Echo, IV-A). Cuts for
many prices give the lower convex hull of (bytes, seconds), and each cut gives a Lagrangian bound for all other choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from lightning_memopt.graph import Graph

_INFINITE = 1 << 52
_UNITS = 1 << 40
"""Costs are scaled so that their sum stays below this, and rounded down. They are exact to about 1e-12 of the total."""
_SOURCE, _SINK = 0, 1
_FLOATS = 1 - 1e-9
"""Bounds are multiplied by this, which is more than adding up the seconds of a million ops in floating point can lose."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: the best choice of tensors to hold for one price of a byte.

    held: the tensors that are held.
    ops: the ops that run again, each once.
    nbytes: bytes of `held`.
    seconds: seconds of `ops`.
    price: seconds per byte.
    value_seconds: the value of price * nbytes + seconds; no choice has a lower one.
    """

    held: frozenset[int]
    ops: frozenset[int]
    nbytes: int
    seconds: float
    price: float
    value_seconds: float


@dataclass(frozen=True, slots=True)
class Hull:
    """The lower convex hull of (bytes held, seconds).

    vertices: the cuts on the hull, from holding everything to the fewest bytes, with rising seconds.
    cuts: all cuts that were solved.
    """

    vertices: tuple[Cut, ...]
    cuts: tuple[Cut, ...]

    def bound_seconds(self, nbytes: int) -> float:
        """No choice that holds at most `nbytes` takes fewer seconds."""
        return max(0.0, *(cut.value_seconds - cut.price * nbytes for cut in self.cuts))


class HoldOrRebuild:
    """The cut problem of a part of a graph.

    needed: the tensors that backward reads.
    free: tensors that are in memory anyway.
    lost: tensors that cannot be held.
    """

    def __init__(
        self, graph: Graph, needed: Collection[int], free: Container[int] = (), lost: Container[int] | None = None
    ) -> None:
        self.graph = graph
        self.free = free
        self.lost = graph.overwritten if lost is None else lost
        self.needed = [t for t in dict.fromkeys(needed) if not self.given(t)]
        self.tensors: list[int] = []
        self.ops: list[int] = []
        self._collect()
        self.total_nbytes = sum(graph.tensors[t].nbytes for t in self.tensors)
        self.total_seconds = sum(graph.ops[o].seconds for o in self.ops)

    def given(self, tensor: int) -> bool:
        """Whether the tensor is in memory at no cost: no op made it, or it is free."""
        return tensor not in self.graph.producers or tensor in self.free

    def _collect(self) -> None:
        """Collect the tensors and ops upstream of the needed tensors, up to tensors that are in memory anyway."""
        seen, ops, stack = set(self.needed), set(), list(self.needed)
        while stack:
            tensor = stack.pop()
            op = self.graph.producers[tensor]
            if tensor in op.unrebuilt:
                continue
            if op.id in ops or not op.recomputable:
                ops.add(op.id)
                continue
            ops.add(op.id)
            for t in op.inputs:
                if t not in seen and not self.given(t):
                    seen.add(t)
                    stack.append(t)
        self.tensors, self.ops = sorted(seen), sorted(ops)

    @cached_property
    def _arcs(self) -> tuple[dict[tuple[str, int], int], np.ndarray, np.ndarray]:
        """The network without its capacities: nodes by (kind, id), and the tails and heads of its arcs. The arcs come in this
        order: one for each needed tensor; two for each tensor, the first of which is cut if the tensor is held; one for each
        op, which is cut if the op runs again; and those from ops to the tensors that they read. A tensor that its op does not
        make again is linked to the sink, so it is held.
        """
        node: dict[tuple[str, int], int] = {}
        arcs: list[tuple[int, int]] = []

        def at(kind: str, id: int) -> int:
            return node.setdefault((kind, id), len(node) + 2)

        for t in self.needed:
            arcs.append((_SOURCE, at("there", t)))
        for t in self.tensors:
            made, op = at("made", t), self.graph.producers[t]
            arcs += ((at("there", t), made), (made, _SINK if t in op.unrebuilt else at("op", op.id)))
        arcs += ((at("op", o), _SINK) for o in self.ops)
        for o in self.ops:
            if self.graph.ops[o].recomputable:
                arcs += ((at("op", o), at("there", t)) for t in self.graph.ops[o].inputs if not self.given(t))
        ends = np.array(arcs, dtype=np.int32).reshape(-1, 2)
        return node, np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1])

    def minimum_cut(self, price: float, cost: Callable[[int], float] | None = None, share: float = 1.0) -> Cut:
        """The exact optimum for `price` seconds per byte. Raises ValueError if an overwritten tensor is needed and cannot be
        rebuilt.

        `cost`: a function that gives the cost of holding a tensor, in seconds: at most `price` times its bytes, which is the
            default.
        `share`: the factor by which the seconds of ops that run again are multiplied.
        """
        graph = self.graph
        scale = _UNITS / (price * self.total_nbytes + self.total_seconds + 1e-12)
        node, tails, heads = self._arcs
        capacities = [_INFINITE] * len(self.needed)
        for t in self.tensors:
            seconds = price * graph.tensors[t].nbytes if cost is None else cost(t)
            capacities += (_INFINITE if t in self.lost else int(seconds * scale), _INFINITE)
        for o in self.ops:
            op = graph.ops[o]
            capacities.append(int(share * op.seconds * scale) if op.recomputable else _INFINITE)
        capacities += [_INFINITE] * (len(tails) - len(capacities))
        flow = SimpleMaxFlow()
        flow.add_arcs_with_capacity(tails, heads, np.array(capacities, dtype=np.int64))
        source, sink = _SOURCE, _SINK
        value = 0.0
        if self.tensors:
            status = flow.solve(source, sink)
            if status != flow.OPTIMAL:
                raise RuntimeError(f"minimum cut did not solve: {status}")
            if flow.optimal_flow() >= _INFINITE:
                raise ValueError("backward reads a tensor that was overwritten in place and that no op can make again")
            value = flow.optimal_flow() / scale * _FLOATS
            side = set(flow.get_source_side_min_cut())
        else:
            side = set()
        held = frozenset(t for t in self.tensors if node[("there", t)] in side and node[("made", t)] not in side)
        ops = frozenset(o for o in self.ops if node.get(("op", o)) in side)
        nbytes, seconds = sum(graph.tensors[t].nbytes for t in held), sum(graph.ops[o].seconds for o in ops)
        return Cut(held, ops, nbytes, seconds, price, value)

    def hull(self, points: int = 10, nbytes: int | None = None) -> Hull:
        """The hull, with up to `points` vertices. If `nbytes` is given, vertices on both sides of that many bytes are
        preferred.
        """
        # so cheap that holding all bytes costs under 1e-4 of the time, also where ops take nanoseconds and tensors terabytes
        cheapest = min(1e-15, 1e-4 * self.total_seconds / max(self.total_nbytes, 1))
        dearest = 1e3 * max(self.total_seconds, 1e-9)
        most, least = self.minimum_cut(cheapest), self.minimum_cut(dearest)
        cuts = [most, least]
        vertices = {(most.nbytes, most.seconds): most, (least.nbytes, least.seconds): least}
        gaps = [(most, least)]
        while gaps and len(vertices) < points:
            gaps.sort(key=lambda pair: (pair[0].nbytes - pair[1].nbytes) * (pair[1].seconds - pair[0].seconds))
            left, right = gaps.pop()
            if left.nbytes <= right.nbytes or (nbytes is not None and not right.nbytes <= nbytes <= left.nbytes):
                continue
            between = self.minimum_cut((right.seconds - left.seconds) / (left.nbytes - right.nbytes))
            cuts.append(between)
            key = (between.nbytes, between.seconds)
            if key in vertices:
                continue
            vertices[key] = between
            gaps += [(left, between), (between, right)]
        return Hull(tuple(sorted(vertices.values(), key=lambda c: c.seconds)), tuple(cuts))
