"""Which light ops to run again so that autograd saves fewer bytes: a dataflow analysis in near-linear time.

Input: an observed graph. Output: lives whose simulated peak is below that of the unmodified step, or its own lives.
No budget and no search: what cannot shrink the footprint is not run again, so the extra seconds stay small.
Source: Zheng, Vijaykumar, Pekhimenko, *Echo: Compiler-based GPU memory footprint reduction for LSTM RNN training*
(ISCA 2020), sections IV and V, Algorithm 1. Mathematics and departures from it: docs/formulation-echo.md.

The *path* is the set of ops to run again. A *feature* is a tensor that backward asks for. What the path reads and does
not make must be held. Heavy ops are never on the path, but what their gradients read may be rebuilt: the saves say so.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.graph import BEFORE, Graph, Op
from lightning_memopt.plan import Life, simulate
from lightning_memopt.solvers.rollout import Rollout, keep_all

_CONE = 64
"""A judgement looks this many ops upstream for what dies with a removal."""
_ROUNDS = 3
"""How often the schedule is simulated to find recomputation that is back in memory at the peak."""


class Footprint:
    """The path of a graph and the bytes it costs: `light_ops` until ops are removed. Tensors count once a storage.

    Of the versions of a storage only the last can be held (the others are overwritten), so counting tensors is enough.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: set[int] = set()
        self.features = {s.tensor for s in graph.saves if s.unpacked_at}
        self.made_by = {t: op.id for op in graph.forward for t in op.outputs}
        self.readers: dict[int, set[int]] = {}
        self._last_request = max((p for s in graph.saves for p in s.unpacked_at), default=BEFORE)
        seconds = sum(op.seconds for op in graph.forward)
        nbytes = sum(self.nbytes(t) for t in self.features if t in self.made_by)
        self._bytes_per_second = nbytes / seconds if seconds else 0.0
        for op in reversed(light_ops(graph, self._last_request)):
            if any(self.wanted(t) for t in op.outputs):
                self.ops.add(op.id)
                for t in op.inputs:
                    if t in self.made_by:
                        self.readers.setdefault(t, set()).add(op.id)

    def wanted(self, tensor: int) -> bool:
        return tensor in self.features or bool(self.readers.get(tensor))

    def holds(self, tensor: int) -> bool:
        """Whether the path reads it and somebody else makes it, for the path alone: not a feature."""
        return tensor not in self.features and tensor in self.made_by and self.made_by[tensor] not in self.ops

    def nbytes(self, tensor: int) -> int:
        """What holding it costs; nothing if it is there through backward anyway."""
        t = self.graph.tensors[tensor]
        return 0 if t.freed_at >= self._last_request else t.nbytes

    def replay_nbytes(self, op: Op) -> float:
        """What a random op costs beyond its inputs: its state, and its seconds at the rate of the whole forward."""
        return op.state_nbytes + op.seconds * self._bytes_per_second if op.state_nbytes else 0

    def kept(self) -> set[int]:
        """Every tensor that the path does not make."""
        return {t for op in self.graph.ops if op.id not in self.ops for t in op.outputs}

    def cut(self, group: Iterable[int]) -> set[int] | None:
        """The group and the readers of what it makes that cannot be held; None if backward asks for such a tensor."""
        gone = set(group)
        stack = list(gone)
        while stack:
            for t in self.graph.ops[stack.pop()].outputs:
                if t in self.graph.overwritten:
                    if t in self.features:
                        return None
                    new = self.readers.get(t, set()) - gone
                    gone |= new
                    stack.extend(new)
        return gone

    def upstream(self, gone: set[int], limit: int | None = None) -> float:
        """Add to `gone` the ops that nobody needs without it (at most `limit`); bytes let go by all of them."""
        released: float = 0
        seen: set[int] = set()
        stack = list(gone)
        room = limit if limit is not None else len(self.ops)
        while stack:
            op = self.graph.ops[stack.pop()]
            released += self.replay_nbytes(op)
            for t in op.inputs:
                if t in seen or t in self.features or t not in self.made_by or not self.readers[t] <= gone:
                    continue
                seen.add(t)
                maker = self.made_by[t]
                if maker not in self.ops:
                    released += self.nbytes(t)
                elif maker not in gone and room > 0 and not any(
                    self._outlives(made, gone) for made in self.graph.ops[maker].outputs
                ):
                    room -= 1
                    gone.add(maker)
                    stack.append(maker)
        return released

    def remove(self, group: Iterable[int], only_if_no_worse: bool = True) -> bool:
        """Take the group off the path if holding its results costs no more than it lets go of; whether it went."""
        gone = self.cut(group)
        if gone is None:
            return False
        if only_if_no_worse:
            made = [t for o in gone for t in self.graph.ops[o].outputs]
            released = self.upstream(gone, _CONE)
            if released < sum(self.nbytes(t) for t in made if self._outlives(t, gone)):
                return False
        self.upstream(gone)
        self.ops -= gone
        for o in gone:
            for t in self.graph.ops[o].inputs:
                if t in self.made_by:
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
                there = graph.tensors[t].born_at == BEFORE and graph.tensors[t].freed_at >= until
                if not there or t in graph.overwritten:
                    break
            elif maker.id not in light and t in graph.overwritten:
                break
        else:
            light.add(op.id)
    return [graph.ops[o] for o in sorted(light)]


def subgraphs(path: Footprint, ops: Iterable[int]) -> list[list[int]]:
    """Split ops of the path where they share no bytes: disjoint, each in topological order, the last of forward first.

    Two ops belong together if one reads what the other makes, or if both read a tensor that is held for the path alone.
    Compute-heavy ops and anchors are the boundaries, for they are not on the path.
    """
    root = {o: o for o in ops}

    def find(o: int) -> int:
        while root[o] != o:
            root[o] = o = root[root[o]]
        return o

    first_reader: dict[int, int] = {}
    for o in root:
        for t in path.graph.ops[o].inputs:
            if t not in path.made_by:
                continue
            maker = path.made_by[t]
            if maker in root:
                root[find(o)] = find(maker)
            elif path.holds(t) and path.nbytes(t):
                root[find(o)] = find(first_reader.setdefault(t, o))
    found: dict[int, list[int]] = {}
    for o in sorted(root, reverse=True):
        found.setdefault(find(o), []).append(o)
    return [group[::-1] for group in found.values()]


def sweep(path: Footprint, subgraph: list[int]) -> None:
    """Remove what does not shrink the footprint, in topological order.

    Ops that read a tensor held for the path alone are judged together, when the first and when the last of them is met:
    its bytes are let go only if all of them are removed. Then each op is judged by itself.
    """
    last = {t: o for o in subgraph for t in path.graph.ops[o].inputs if t in path.made_by}
    met: set[int] = set()
    for o in subgraph:
        if o not in path.ops:
            continue
        inputs = [t for t in path.graph.ops[o].inputs if path.holds(t)]
        due = [t for t in inputs if t not in met or last[t] == o]
        met.update(inputs)
        group = {o}.union(*(path.readers[t] for t in due))
        if not path.remove(group) and len(group) > 1:
            path.remove({o})


def prune(path: Footprint, piece: list[int]) -> None:
    """Keep the results of a piece of the path rather than its inputs if that costs no more bytes."""
    ops = [path.graph.ops[o] for o in piece]
    features = {t for op in ops for t in op.outputs if t in path.features}
    inputs = {t for op in ops for t in op.inputs if path.holds(t)}
    rebuilt = sum(path.nbytes(t) for t in features)
    held = sum(path.nbytes(t) for t in inputs) + sum(path.replay_nbytes(op) for op in ops)
    if rebuilt <= held:
        path.remove(piece, only_if_no_worse=False)


def trim(path: Footprint) -> None:
    """Sweep and prune every subgraph by itself."""
    for subgraph in subgraphs(path, sorted(path.ops)):
        sweep(path, subgraph)
        for piece in subgraphs(path, [o for o in subgraph if o in path.ops]):
            prune(path, piece)


def just_in_time(graph: Graph, kept: set[int]) -> tuple[Life, ...]:
    """Lives that hold of `kept` what is read, and rebuild the rest, each op when backward first needs it."""
    roll = Rollout(graph)
    roll.serve(sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at), set(kept))
    return roll.lives()


def echo(graph: Graph) -> tuple[Life, ...]:
    """Lives of the analysis, never worse than the unmodified step: a lower simulated peak, or `keep_all`."""
    unmodified = keep_all(graph)
    path = Footprint(graph)
    trim(path)
    if not path.ops:
        return unmodified
    lives = just_in_time(graph, path.kept())
    timeline = simulate(graph, lives)
    for _ in range(_ROUNDS):
        for t in back_at_peak(lives, timeline.peak_at):
            if path.made_by[t] in path.ops:
                path.remove({path.made_by[t]}, only_if_no_worse=False)
        trim(path)
        fewer = just_in_time(graph, path.kept())
        if fewer == lives:
            break
        priced = simulate(graph, fewer)
        if priced.predicted.peak_bytes > timeline.predicted.peak_bytes:
            break
        lives, timeline = fewer, priced
    if timeline.predicted.peak_bytes < simulate(graph, unmodified).predicted.peak_bytes:
        return lives
    return unmodified


def back_at_peak(lives: Iterable[Life], peak: int) -> list[int]:
    """Tensors that are rebuilt by the peak and in memory at it: dropping them has not lowered it."""
    return [life.tensor for life in lives if life.how == "replay" and life.born_at <= peak <= life.freed_at]
