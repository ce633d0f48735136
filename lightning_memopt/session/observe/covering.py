"""One graph that covers all observed steps, where some of them do more than others: work in every n-th step, a cold cache.

A plan is made of one graph, and must serve the other steps, too. The bytes of a step have two parts. What the ops of the
forward make is the same in all steps, and plans move it. Everything else (gradients, statistics, what the loop holds) no plan
moves. So a step that takes more is covered if the second part is, at each point of the graph, the largest of all steps. Of
gradients that are parked, the last step in which autograd has accumulated one says when it may leave.

Steps are aligned by the ops of their forwards, and by what autograd asks for and lets go of: the events of a plan. Where a
step runs ops that the graph does not have, between two events, there is a *place*. In backward, a place becomes an op without
tensors. Within the forward, whose ops a planned step is compared with, the place is the next op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from lightning_memopt.graph import BEFORE, Graph, Levels, Op, Point, Tensor, workspaces
from lightning_memopt.session.observe.graphs import MADE

_NAME = "work in other steps"


def covering(graph: Graph, others: Iterable[Graph]) -> Graph:
    """`graph`, with the bytes that each of the steps `others` takes beyond it. Their forwards are parts of its forward, or
    contain it. A bound from above for each step, and exact where they hold the same results of the forward equally long.
    """
    for other in others:
        if other is not graph:
            graph = _Covering(graph, other).graph()
    return graph


class _Covering:
    """Two steps on one axis: point `p` of the step that is covered is at `2 * p`, and the place after it at `2 * p + 1`.

    ops: forward op of the other step -> the same op of this one.
    tensors: tensor that those ops make in the other step -> the same tensor of this one.
    place: for each point of the other step, where it is on the axis.
    """

    def __init__(self, graph: Graph, other: Graph) -> None:
        self.ops = _aligned(*([(op.name, op.scope, len(op.outputs)) for op in g.forward] for g in (other, graph)))
        self.tensors = {
            theirs: ours
            for i, j in self.ops.items()
            for theirs, ours in zip(other.ops[i].outputs, graph.ops[j].outputs, strict=True)
        }
        self._other = other
        points = _aligned(_keys(other, self.ops), _keys(graph, {op.id: op.id for op in graph.forward}))
        self.place = _places(points, len(other.points), len(graph.points), max((op.at for op in graph.forward), default=BEFORE))
        self._matched = points
        self._graph = self._as_large(graph)
        self._end = 2 * (len(graph.points) - 1)

    def graph(self) -> Graph:
        """The first step, with what the other one takes beyond it."""
        graph, other, last = self._graph, self._other, len(self._other.points) - 1
        until = self._held_until()
        ours = Levels(self._end + 1)
        for t in graph.tensors:
            if t.id not in until:
                for first, end in t.spans:
                    ours.add(2 * first, 2 * end, t.nbytes)
        beside = ours.levels()
        for op in graph.ops:
            beside[2 * op.at] += op.workspace_nbytes
        theirs = Levels(last + 1)
        for t in other.tensors:
            if t.id not in self.tensors:
                for first, end in t.spans:
                    theirs.add(first, end, t.nbytes)
        beyond = [0] * len(beside)
        lifts = [_Lift(graph, other, gradients) for gradients in (True, False)]
        born = self._born()
        first = _made_by_update(other) > _made_by_update(graph)
        twice = _counted_twice(graph, other) if first else 0
        for at, level in enumerate(map(sum, zip(theirs.levels(), workspaces(other), strict=True))):
            point = other.points[at]
            if first and point.kind == "op" and other.ops[point.id].phase == "update":
                continue  # the first update makes the state, so it says nothing about later updates
            place = self.place[at]
            level += sum(lift.at(at, place) for lift in lifts) - twice
            if at not in self._matched:  # the results of the op whose place this is are not there yet
                level -= born.get(place, 0)
            beyond[place] = max(beyond[place], level - beside[place])
        return self._with(graph, until, beyond)

    def _as_large(self, graph: Graph) -> Graph:
        """`graph` with the larger size of every tensor that both steps make; an op may run again if it may in both."""
        tensors, ops = list(graph.tensors), list(graph.ops)
        for theirs, ours in self.tensors.items():
            nbytes = max(tensors[ours].nbytes, self._other.tensors[theirs].nbytes)
            tensors[ours] = dataclasses.replace(tensors[ours], nbytes=nbytes)
        for i, j in self.ops.items():
            if ops[j].recomputable and not self._other.ops[i].recomputable:
                ops[j] = dataclasses.replace(ops[j], recomputable=False)
        return dataclasses.replace(graph, tensors=tuple(tensors), ops=tuple(ops))

    def _held_until(self) -> dict[int, int]:
        """Tensor that both steps make -> where on the axis the last of them lets go of it."""
        until = {}
        writes = {old: op.at for op in self._graph.ops for old, _ in op.mutates}
        for theirs, ours in self.tensors.items():
            freed_at = self._other.tensors[theirs].freed_at
            end = self._end if freed_at == len(self._other.points) - 1 else self.place[freed_at]
            if ours in writes:
                end = min(end, 2 * writes[ours] - 1)
            until[ours] = max(2 * self._graph.tensors[ours].freed_at, end)
        return until

    def _born(self) -> dict[int, int]:
        """Place on the axis -> bytes of the storages that the op there makes in both steps."""
        born: dict[int, int] = {}
        for ours in self.tensors.values():
            t = self._graph.tensors[ours]
            if t.storage == t.id:
                born[2 * t.born_at] = born.get(2 * t.born_at, 0) + t.nbytes
        return born

    def _with(self, graph: Graph, until: dict[int, int], beyond: list[int]) -> Graph:
        """The graph with `beyond` bytes more at each place of the axis, where tensors live until `until`."""
        there = [place for place in range(len(beyond)) if place % 2 == 0 or beyond[place]]
        number = {place: i for i, place in enumerate(there)}
        points: list[Point] = []
        ops: list[Op] = []
        ids: dict[int, int] = {}
        for place in there:
            point = graph.points[place // 2]
            if place % 2:
                phase = ops[-1].phase if ops[-1].phase != "forward" else "backward"
                op = Op(id=len(ops), name=_NAME, phase=phase, inputs=(), outputs=(), at=len(points))
            elif point.kind == "op":
                ids[point.id] = len(ops)
                op = dataclasses.replace(graph.ops[point.id], id=len(ops), at=len(points))
            else:
                points.append(point)
                continue
            points.append(Point("op", op.id))
            ops.append(op)

        def moved(place: int) -> int:
            return BEFORE if place < 0 else number[place] if place in number else number[place - 1]

        def shifted(t: Tensor) -> Tensor:
            windows = tuple((moved(2 * first), moved(2 * end)) for first, end in t.windows)
            freed_at = moved(until.get(t.id, 2 * t.freed_at))
            return dataclasses.replace(t, born_at=moved(2 * t.born_at), freed_at=freed_at, windows=windows)

        tensors = list(map(shifted, graph.tensors))
        for nbytes, run in groupby(there, key=beyond.__getitem__):
            first, *rest = run
            if nbytes:
                id, end = len(tensors), (rest or [first])[-1]
                born_at, freed_at = number[first], number[end]
                tensors.append(
                    Tensor(id=id, name=_NAME, nbytes=nbytes, kind="temporary", storage=id, born_at=born_at, freed_at=freed_at)
                )
        updates = tuple(
            dataclasses.replace(
                update,
                at=moved(2 * update.at),
                since=moved(2 * update.since) if update.since < len(graph.points) else len(points),
                until=moved(2 * update.until),
            )
            for update in graph.updates
        )
        backward = len(graph.forward)
        saves = tuple(
            dataclasses.replace(
                save,
                op=ids[save.op] if backward < save.op < len(graph.ops) else save.op,
                unpacked_at=tuple(moved(2 * p) for p in save.unpacked_at),
                released_at=moved(2 * save.released_at),
            )
            for save in graph.saves
        )
        asked = {ids[op]: requests for op, requests in graph.asked.items()}
        accumulated = {name: self.place[at] for name, (_, at) in self._other.gradients.items()}
        gradients = {name: (t, moved(max(2 * at, accumulated.get(name, 0)))) for name, (t, at) in graph.gradients.items()}
        return dataclasses.replace(
            graph,
            ops=tuple(ops),
            tensors=tuple(tensors),
            saves=saves,
            points=tuple(points),
            gradients=gradients,
            asked=asked,
            updates=updates,
        )


class _Lift:
    """What a later step still holds of what the step before left, where the covered step shows that the loop holds it.

    An early step holds less than later ones when it begins: no gradients yet, no statistics of the last time. What it makes
    and leaves replaces these, each when it is made. `gradients`: counts those of parameters; else everything but them.
    """

    def __init__(self, graph: Graph, other: Graph, gradients: bool) -> None:
        last = len(other.points) - 1
        held, held_by_other, left = Levels(2 * len(graph.points) - 1), Levels(last + 1), Levels(last + 1)
        updates = {op.at for op in other.ops if op.phase == "update"}
        sizes = {t.nbytes for t in other.tensors if t.kind == "parameter"}
        for t in graph.tensors:
            if t.born_at == BEFORE and not t.windows and (t.kind == "gradient") is gradients:
                held.add(BEFORE, 2 * t.freed_at, t.nbytes)
        for t in other.tensors:
            if t.windows or (t.kind == "gradient" and (t.born_at == BEFORE or t.nbytes in sizes)) is not gradients:
                continue
            if t.born_at == BEFORE:
                held_by_other.add(BEFORE, t.freed_at, t.nbytes)
            elif t.freed_at == last:  # what it replaces is freed when it has been made; an update makes state but once
                left.add(t.born_at + (t.born_at not in updates), last, t.nbytes)
        self._held = held.levels()
        self._there = [a + b for a, b in zip(held_by_other.levels(), left.levels(), strict=True)]

    def at(self, point: int, place: int) -> int:
        """Bytes at a point of the other step, which is at a place of the axis."""
        return max(0, self._held[place] - self._there[point])


def _made_by_update(graph: Graph) -> int:
    """Bytes of state that the update of this step makes, and that later steps begin with."""
    return sum(t.nbytes for t in graph.tensors if t.kind == "optimizer_state" and t.born_at == BEFORE and t.name == MADE)


def _counted_twice(graph: Graph, first: Graph) -> int:
    """Bytes of state that the first step counts twice: an update made it where no op is seen (Adam's counters), so what reads
    it is taken to be from before the step. In later steps it is known as state.
    """

    def unknown(g: Graph) -> int:
        return sum(t.nbytes for t in g.tensors if t.born_at == BEFORE and t.name == t.kind == "temporary")

    return max(0, unknown(first) - unknown(graph))


def _aligned(theirs: Sequence[Hashable], ours: Sequence[Hashable]) -> dict[int, int]:
    """Index in `theirs` -> index in `ours` of the same thing, both rising."""
    if theirs == ours:
        return {i: i for i in range(len(ours))}
    blocks = SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
    return {a + k: b + k for a, b, size in blocks for k in range(size)}


def _keys(graph: Graph, ops: dict[int, int]) -> list[Hashable]:
    """For each point, what it is in any step. `ops`: forward op -> its number in all steps."""
    packed: dict[int, int] = {}
    names: dict[int, Hashable] = {}
    for save in graph.saves:
        k = packed[save.op] = packed.get(save.op, 0) + 1
        names[save.id] = (ops.get(save.op, "not in both"), k)
    keys: list[Hashable] = []
    for point in graph.points:
        if point.kind != "op":
            keys.append((point.kind, names[point.id], point.occurrence))
            continue
        op = graph.ops[point.id]
        if op.phase == "forward":
            keys.append(("forward", ops.get(op.id, "not in both")))
        else:
            keys.append((op.phase, op.name, len(op.outputs)))
    return keys


def _places(points: dict[int, int], n: int, n_ours: int, forward_ends: int) -> list[int]:
    """For each of `n` points of the other step its place on the axis. `points`: those that both steps have."""
    places = []
    before = BEFORE
    for at in range(n):
        if at in points:
            before = points[at]
            places.append(2 * before)
        elif before < max(forward_ends, 0):
            places.append(2 * (before + 1))
        else:
            places.append(min(2 * before + 1, 2 * (n_ours - 1)))
    return places
