"""The bytes that it costs and saves to run light ops again, updated as ops are removed: the data of Echo's dataflow analysis.

Input: an observed graph. State: the path (ops to run again) and who on it reads what; the bytes of a storage are counted once,
however many ops share it. Source: Echo (ISCA 2020), sections IV-A and V-A; see docs/formulation.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.graph import BEFORE, Graph, Op
from lightning_memopt.solvers.rollout import rebuilt_by

_CONE = 64
"""Maximum number of upstream ops that are considered when a removal is judged: ops that nothing would need after it."""


class Footprint:
    """The path of a graph and the bytes it costs. At first it has all `light_ops`; then ops are removed. Each storage counts
    once: only its last version can be held, because the others are overwritten, so counting tensors is enough.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: set[int] = set()
        self.features = {s.tensor for s in graph.saves if s.unpacked_at}
        self.made_by = {t: op.id for op in graph.forward for t in rebuilt_by(op)}
        """Without outputs that an op does not make again: they are held whatever the path is, like what was there before."""
        self.readers: dict[int, set[int]] = {}
        self.reads: dict[int, list[int]] = {}
        """What an op of the path reads, except what existed before the step."""
        self._last_request = max((p for s in graph.saves for p in s.unpacked_at), default=BEFORE)
        seconds = sum(op.seconds for op in graph.forward)
        nbytes = sum(self.nbytes(t) for t in self.features if t in self.made_by)
        self._bytes_per_second = nbytes / seconds if seconds else 0.0
        for op in reversed(light_ops(graph, self._last_request)):
            if any(self.wanted(t) for t in rebuilt_by(op)):
                self.ops.add(op.id)
                self.reads[op.id] = [t for t in dict.fromkeys(op.inputs) if t in self.made_by]
                for t in self.reads[op.id]:
                    self.readers.setdefault(t, set()).add(op.id)

    def wanted(self, tensor: int) -> bool:
        return tensor in self.features or bool(self.readers.get(tensor))

    def holds(self, tensor: int) -> bool:
        """Whether a tensor that the path reads is in memory only for the path: the path does not make it, and it is not a
        feature.
        """
        return tensor not in self.features and self.made_by[tensor] not in self.ops

    def nbytes(self, tensor: int) -> int:
        """Bytes that holding the tensor costs; 0 if it is in memory through backward anyway."""
        t = self.graph.tensors[tensor]
        return 0 if t.freed_at >= self._last_request else t.nbytes

    def rebuild_nbytes(self, op: Op) -> float:
        """Bytes that rebuilding a random op's result costs beyond its inputs; 0 for other ops.

        They are its state, and its seconds turned into bytes at the rate of the whole forward.
        """
        if not op.state_nbytes:
            return 0
        return op.state_nbytes + op.seconds * self._bytes_per_second

    def cut(self, group: Iterable[int]) -> set[int] | None:
        """The group, and the readers of its results that cannot be held. None if backward asks for such a result."""
        gone = set(group)
        stack = list(gone)
        while stack:
            for t in rebuilt_by(self.graph.ops[stack.pop()]):
                if t in self.graph.overwritten:
                    if t in self.features:
                        return None
                    new = self.readers.get(t, set()) - gone
                    gone |= new
                    stack.extend(new)
        return gone

    def upstream(self, gone: set[int], limit: int | None = None) -> float:
        """Add to `gone` up to `limit` ops that nothing else needs. Returns the bytes that removing all of `gone` frees."""
        released: float = 0
        seen: set[int] = set()
        stack = list(gone)
        room = limit if limit is not None else len(self.ops)
        while stack:
            op = self.graph.ops[stack.pop()]
            released += self.rebuild_nbytes(op)
            for t in self.reads[op.id]:
                if t in seen or t in self.features or not self.readers[t] <= gone:
                    continue
                seen.add(t)
                maker = self.made_by[t]
                if maker not in self.ops:
                    released += self.nbytes(t)
                elif (
                    maker not in gone
                    and room > 0
                    and not any(self._outlives(made, gone) for made in rebuilt_by(self.graph.ops[maker]))
                ):
                    room -= 1
                    gone.add(maker)
                    stack.append(maker)
        return released

    def remove(self, group: Iterable[int], only_if_no_worse: bool = True) -> bool:
        """Take the group off the path if holding its results costs no more than removing it frees. Returns whether it was
        removed.
        """
        gone = self.cut(group)
        if gone is None:
            return False
        if only_if_no_worse:
            made = [t for o in gone for t in rebuilt_by(self.graph.ops[o])]
            released = self.upstream(gone, _CONE)
            if released < sum(self.nbytes(t) for t in made if self._outlives(t, gone)):
                return False
        self.upstream(gone)
        self.ops -= gone
        for o in gone:
            for t in self.reads[o]:
                self.readers[t].discard(o)
        return True

    def _outlives(self, tensor: int, gone: set[int]) -> bool:
        return tensor in self.features or not self.readers.get(tensor, gone) <= gone


def light_ops(graph: Graph, until: int) -> list[Op]:
    """Forward ops that may run again up to the point `until` without a heavy op or an anchor doing so."""
    light: set[int] = set()
    for op in graph.forward:
        if op.heavy or not op.recomputable:
            continue
        for t in op.inputs:
            maker = graph.producers.get(t)
            if maker is None:
                before = graph.tensors[t]
                there = before.born_at == BEFORE and before.freed_at >= until
                if not (there or before.windows) or t in graph.overwritten:
                    break
            elif t in graph.overwritten and (maker.id not in light or t in maker.unrebuilt):
                break
        else:
            light.add(op.id)
    return [graph.ops[o] for o in sorted(light)]
