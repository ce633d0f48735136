"""Choose the light ops to run again so that autograd saves fewer bytes: a dataflow analysis in near-linear time.

Input: an observed graph. Output: lives whose simulated peak is below that of the unmodified step, or else the lives of the
unmodified step. There is no budget and no search: ops that cannot shrink the footprint are not run again, so the extra seconds
stay small. Source: Zheng, Vijaykumar, Pekhimenko, *Echo: Compiler-based GPU memory footprint reduction for LSTM RNN training*
(ISCA 2020), sections IV and V, Algorithm 1. Mathematics and departures from it: docs/formulation.md.

The *path* is the set of ops to run again. A *feature* is a tensor that backward asks for. A tensor that the path reads and does
not make must be held. Heavy ops are never on the path, but tensors that their gradients read may be rebuilt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Life, Schedule, Timeline, simulate
from lightning_memopt.solvers.collector import collector_paused
from lightning_memopt.solvers.recompute.footprint import Footprint
from lightning_memopt.solvers.rollout import Rollout, keep_all, rebuilt_by

_NOTHING_RUNS = Schedule(frozenset(), {}, {}, {})


def subgraphs(path: Footprint, ops: Iterable[int]) -> list[list[int]]:
    """Split ops of the path where they share no bytes: disjoint, each in topological order, the last of forward first.

    Two ops belong together if one reads what the other makes, or if both read a tensor that is held for the path alone.
    Compute-heavy ops and anchors separate subgraphs, because they are not on the path.
    """
    root = {o: o for o in ops}

    def find(o: int) -> int:
        while root[o] != o:
            root[o] = o = root[root[o]]
        return o

    first_reader: dict[int, int] = {}
    for o in root:
        for t in path.reads[o]:
            maker = path.made_by[t]
            if maker in root:
                root[find(o)] = find(maker)
            elif path.holds(t) and path.nbytes(t):
                root[find(o)] = find(first_reader.setdefault(t, o))
    groups: dict[int, list[int]] = {}
    for o in sorted(root, reverse=True):
        groups.setdefault(find(o), []).append(o)
    return [group[::-1] for group in groups.values()]


def sweep(path: Footprint, subgraph: list[int]) -> None:
    """Remove ops that do not shrink the footprint, in topological order.

    Ops that read a tensor held for the path alone are judged together, when the first and when the last of them is met:
    its bytes are let go only if all of them are removed. Then each op is judged by itself.
    """
    last = {t: o for o in subgraph for t in path.reads[o]}
    met: set[int] = set()
    for o in subgraph:
        if o not in path.ops:
            continue
        inputs = [t for t in path.reads[o] if path.holds(t)]
        due = [t for t in inputs if t not in met or last[t] == o]
        met.update(inputs)
        group = {o}.union(*(path.readers[t] for t in due))
        if not path.remove(group) and len(group) > 1:
            path.remove({o})


def prune(path: Footprint, piece: list[int]) -> None:
    """Keep the results of a piece of the path rather than its inputs if that costs no more bytes."""
    ops = [path.graph.ops[o] for o in piece]
    features = {t for op in ops for t in rebuilt_by(op) if t in path.features}
    inputs = {t for op in ops for t in path.reads[op.id] if path.holds(t)}
    rebuilt = sum(path.nbytes(t) for t in features)
    held = sum(path.nbytes(t) for t in inputs) + sum(path.rebuild_nbytes(op) for op in ops)
    if rebuilt <= held:
        path.remove(piece, only_if_no_worse=False)


def trim(path: Footprint, subgraph: list[int]) -> None:
    """Sweep a subgraph, then prune the pieces that are left of it."""
    sweep(path, subgraph)
    for piece in subgraphs(path, [o for o in subgraph if o in path.ops]):
        prune(path, piece)


def recomputation(graph: Graph) -> Footprint:
    """The path that is left after every subgraph was trimmed by itself."""
    path = Footprint(graph)
    for subgraph in subgraphs(path, sorted(path.ops)):
        trim(path, subgraph)
    return path


def just_in_time(path: Footprint, held: Collection[int] = ()) -> tuple[Life, ...]:
    """Lives that hold `held` and the tensors that the path reads and does not make; ops of the path run when needed."""
    roll = Rollout(path.graph)
    kept = {t for op in path.graph.ops for t in op.outputs if path.made_by.get(t) not in path.ops}.union(held)
    saved = [s for s in path.graph.saves if path.made_by.get(s.tensor) in path.ops]
    roll.serve(sorted((p, s.tensor) for s in saved for p in s.unpacked_at), kept)
    return roll.lives()


@collector_paused()
def echo(graph: Graph) -> tuple[Life, ...]:
    """The lives that result from the analysis if they have a lower simulated peak, else those of `keep_all`."""
    path = recomputation(graph)
    if not path.ops:
        return keep_all(graph)
    lives = just_in_time(path)
    floor = simulate(graph, lives, _NOTHING_RUNS)  # rebuilds take bytes as well: the peak of `lives` is this or higher
    back = back_at_peak(path, lives, floor)
    for t in back:
        if path.made_by[t] in path.ops:
            path.remove({path.made_by[t]}, only_if_no_worse=False)
    fewer = just_in_time(path) if back else lives
    peak = simulate(graph, fewer).predicted.peak_nbytes
    if back and peak > floor.predicted.peak_nbytes and (other := simulate(graph, lives).predicted.peak_nbytes) < peak:
        fewer, peak = lives, other
    return fewer if peak < unmodified_peak_nbytes(graph) else keep_all(graph)


def back_at_peak(path: Footprint, lives: Iterable[Life], timeline: Timeline) -> list[int]:
    """Tensors that are rebuilt before the peak and in memory at it, so that dropping them has not lowered the peak. As many are
    chosen as can be held until then without making a new peak, the earliest to be rebuilt first.
    """
    peak = timeline.peak_at
    at_peak = [life for life in lives if life.how == "rebuild" and life.born_at <= peak <= life.freed_at]
    at_peak.sort(key=lambda life: (life.born_at - life.freed_at, life.tensor))
    before = list(accumulate(timeline.nbytes[:peak], max, initial=0))
    taken, back = 0, []
    for life in at_peak:
        nbytes = path.nbytes(life.tensor)
        if before[life.born_at] + taken + nbytes <= timeline.predicted.peak_nbytes:
            taken += nbytes
            back.append(life.tensor)
    return back


def unmodified_peak_nbytes(graph: Graph) -> int:
    """The simulated peak of `keep_all`, without making its lives: saved tensors are in memory until they are released."""
    until: dict[int, int] = {}
    for save in graph.saves:
        if save.unpacked_at and graph.tensors[save.tensor].born_at != BEFORE:
            until[save.tensor] = max(save.released_at, until.get(save.tensor, BEFORE))
    held = [Life(tensor=t, born_at=graph.tensors[t].born_at, freed_at=p, how="original") for t, p in until.items()]
    return simulate(graph, held, _NOTHING_RUNS).predicted.peak_nbytes
