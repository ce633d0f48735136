"""Make lives from a choice of ops that run again at each unpack: the last step of every recomputation solver.

A `Rollout` walks through backward in the observed order. A solver says which tensors are held from forward and which ops run at
which point. Every read, by autograd or by a rebuilt op, uses the newest instance of a tensor, and an instance lives until its
last read. So solvers never compute the end of a life, and a plan never holds a tensor that is not read any more.

There are two exceptions. A tensor that the user's forward made is freed only at the next release by autograd, because until
then a second backward may start from it. A tensor that no op makes again, or that backward never asked for, stays until
autograd has released all saves of it, because in a later step backward may ask for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from lightning_memopt.graph import BEFORE, Graph, Op, Save, unpacks_of
from lightning_memopt.plan import Life

_PASSES = 6
"""A rollout with a horizon may run this many times the ops of one forward. After that, it keeps every tensor that it makes."""


@dataclass(slots=True)
class _Instance:
    born_at: int
    rebuilt: bool
    last_use: int = BEFORE
    outside: bool = False
    """Whether the instance is read after its own segment, or by autograd, and so needs a life of its own."""


class Rollout:
    """Collects runs in the order of points; `lives()` gives the result. `saves` restricts it to a part of what backward asks
    for.
    """

    def __init__(self, graph: Graph, saves: Collection[Save] | None = None) -> None:
        self.graph = graph
        self.saves = graph.saves if saves is None else saves
        self.runs: dict[int, list[int]] = {}

    def run(self, point: int, ops: Iterable[int]) -> None:
        """Run these forward ops again, in order, when autograd asks at `point`."""
        self.runs.setdefault(point, []).extend(sorted(ops))

    def closure(self, wanted: Iterable[int], have: set[int]) -> list[int]:
        """The ops to run so that all wanted tensors are in memory, starting from the held ones; empty if they all are
        already.
        """
        graph = self.graph
        stack = [t for t in wanted if not self.available(t, have)]
        ops: set[int] = set()
        while stack:
            tensor = stack.pop()
            op = graph.producers[tensor]
            if tensor not in graph.rebuilders:
                raise ValueError(f"op {op.id} ({op.name}) does not make tensor {tensor} again, but it is not held")
            if op.id in ops:
                continue
            ops.add(op.id)
            stack.extend(t for t in op.inputs if not self.available(t, have))
        return sorted(ops)

    def available(self, tensor: int, have: set[int]) -> bool:
        return tensor in have or self.graph.producers.get(tensor) is None

    def serve(self, unpacks: Iterable[tuple[int, int]], have: set[int], horizon: int | None = None) -> None:
        """Answer a sequence of unpacks (point, tensor) just in time: each missing op runs once, at the first unpack that needs
        it. What was made is added to `have`.

        With a horizon, a tensor that was made on the way and is not asked for within that many points is freed, and made once
        more later. This matters for a U-Net: rebuilding a skip connection for its way up must not leave its whole way down in
        memory. After the ops of `_PASSES` forwards everything is kept, so that no plan gets too long.
        """
        left = _PASSES * len(self.graph.forward)
        producers = self.graph.producers
        asked_at: dict[int, list[int]] = {}
        if horizon is not None:
            unpacks = list(unpacks)
            for point, tensor in unpacks:
                asked_at.setdefault(tensor, []).append(point)
        for point, tensor in unpacks:
            if tensor in have or tensor not in producers:
                continue
            ops = self.closure([tensor], have)
            self.run(point, ops)
            for op in ops:
                have.update(rebuilt_by(self.graph.ops[op]))
                have.difference_update(old for old, _ in self.graph.ops[op].mutates)
            left -= len(ops)
            if horizon is not None and left > 0:
                for t in {t for op in ops for t in rebuilt_by(self.graph.ops[op])}:
                    asked = asked_at.get(t, ())
                    at = bisect_left(asked, point)
                    if at == len(asked) or asked[at] > point + horizon:
                        have.discard(t)

    def lives(self) -> tuple[Life, ...]:
        """The lives of the collected runs, sorted by (tensor, born_at). A planner calls this a thousand times, so it is written
        without calls of small functions.
        """
        graph, runs = self.graph, self.runs
        ops, tensors, release_after = graph.ops, graph.tensors, graph.release_after
        current: dict[int, _Instance] = {}
        done: list[tuple[int, _Instance]] = []
        for point, save in graph.unpacks if self.saves is graph.saves else unpacks_of(self.saves):
            released = release_after[point]
            for id in runs.get(point, ()):
                op = ops[id]
                for t in op.inputs:
                    instance = current.get(t)
                    if instance is None:
                        instance = current[t] = _Instance(tensors[t].born_at, False)
                        done.append((t, instance))
                    until = point if instance.rebuilt else released
                    if instance.last_use < until:
                        instance.last_use = until
                    if not instance.rebuilt or instance.born_at != point:
                        instance.outside = True
                for t in rebuilt_by(op):
                    instance = current.get(t)
                    if instance is not None and instance.born_at < point <= instance.last_use:
                        continue  # the old instance stays; the second copy is freed
                    current[t] = instance = _Instance(point, True)
                    done.append((t, instance))
            t, until = save.tensor, save.released_at
            instance = current.get(t)
            if instance is None:
                instance = current[t] = _Instance(tensors[t].born_at, False)
                done.append((t, instance))
            if not instance.rebuilt:
                until = release_after[until]
            if instance.last_use < until:
                instance.last_use = until
            instance.outside = True
        lives, released_at = [], released_last(graph)
        for tensor, instance in done:
            if not instance.outside:
                continue
            if not instance.rebuilt and tensor in released_at:
                instance.last_use = max(instance.last_use, released_at[tensor])
            before = tensors[tensor]
            if before.windows or (before.born_at == BEFORE and before.freed_at >= instance.last_use):
                continue  # it is in memory without being rebuilt
            lives.append(
                Life(
                    tensor=tensor,
                    born_at=instance.born_at,
                    freed_at=instance.last_use,
                    how="rebuild" if instance.rebuilt else "original",
                )
            )
        return tuple(sorted(lives, key=_place))


_place = attrgetter("tensor", "born_at")


def rebuilt_by(op: Op) -> tuple[int, ...]:
    """The outputs that the op makes again when it runs again."""
    return tuple(t for t in op.outputs if t not in op.unrebuilt) if op.unrebuilt else op.outputs


def unrepeatable(graph: Graph) -> frozenset[int]:
    """Tensors that no op can make again.

    They are the graph's anchors; results of ops that read an anchor that was later overwritten in place, because a rebuild then
    has nothing to start from; and tensors that backward made and autograd saved (for a gradient penalty).
    """
    lasting = set(graph.anchors)
    for op in graph.forward:
        if any(t in lasting and t in graph.overwritten for t in op.inputs):
            lasting.update(op.outputs)
    saved = {s.tensor for s in graph.saves if s.tensor in graph.producers}
    return frozenset(lasting | saved.difference(graph.rebuilders))


@lru_cache(maxsize=4)
def released_last(graph: Graph) -> dict[int, int]:
    """Tensor -> the point at which autograd has released all saves of it, for tensors that no op makes again and for those that
    backward never asks for.
    """
    always = unrepeatable(graph)
    saved = ((t, saves) for t, saves in graph.saves_of.items() if t in graph.producers)
    stays = ((t, saves) for t, saves in saved if t in always or not any(save.unpacked_at for save in saves))
    return {t: max(save.released_at for save in saves) for t, saves in stays}


def keep_all(graph: Graph) -> tuple[Life, ...]:
    """The lives of the unmodified step."""
    return Rollout(graph).lives()
