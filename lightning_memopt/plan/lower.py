"""From lives to a schedule: the only definition of what a plan means.

At an unpack point where lives begin, the ops that make those tensors run again, down to tensors that are in memory there;
what is made on the way and has no life of its own is freed after its last use within the segment. An op that mutates
runs on its input itself when nobody needs that input any more, and on a copy otherwise. What comes back from where it was
away begins to do so before anything runs, what is read first before the rest: a link carries one copy after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_memopt.errors import MemOptError
from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.plan.model import Life


class LoweringError(MemOptError, ValueError):
    """The lives ask for a tensor that cannot be made at that point."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run a forward op again. `clones` are inputs that it mutates and that must survive."""

    op: int
    clones: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Let a tensor go."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to bring back a tensor that was away; who reads it first waits for it."""

    tensor: int


Segment = tuple[Run | Free | Fetch, ...]


@dataclass(frozen=True)
class Schedule:
    """What to do, keyed by index on the graph's axis.

    `holds`: tensors held from their birth in forward; `segments`: before answering an unpack; `frees`: after a point.
    `rebuilt`: every op that a segment runs, with the last point at which one does. `parked`: tensors that are parked, in which
    form; a free of a parked tensor waits until its copy is complete.
    """

    holds: frozenset[int]
    segments: dict[int, Segment]
    frees: dict[int, tuple[int, ...]]
    rebuilt: dict[int, int]
    parked: dict[int, str] = field(default_factory=dict)


class Residency:
    """Which tensors a replay may start from at a point: what a life holds, and what was there before the step.

    What user code happens to hold is no such thing: it may be changed behind our back.
    """

    def __init__(self, graph: Graph, lives: Iterable[Life]) -> None:
        self.graph = graph
        self.lives: dict[int, list[Life]] = {}
        for life in lives:
            self.lives.setdefault(life.tensor, []).append(life)

    def __call__(self, tensor: int, point: int) -> bool:
        """In memory before a segment at `point` runs, and still there after it."""
        t = self.graph.tensors[tensor]
        if t.born_at == BEFORE and t.freed_at >= point:
            return True
        return any(
            life.born_at <= point <= life.freed_at
            and not (life.how == "rebuild" and life.born_at == point)
            and codec_of(life.form) in EXACT
            for life in self.lives.get(tensor, ())
        )


def segment(graph: Graph, point: int, births: Iterable[int], resident: Residency) -> Segment:
    """Steps that bring `births` into memory at `point`, ops in forward order."""
    targets = {t for t in births if not resident(t, point)}
    ops: dict[int, None] = {}
    wanted = list(targets)
    seen = set(targets)
    while wanted:
        tensor = wanted.pop()
        op = graph.producers.get(tensor)
        if op is None or not op.recomputable:
            name = graph.tensors[tensor].name
            raise LoweringError(
                f"tensor {tensor} ({name}) is needed at point {point} but is not in memory and no op can make it"
            )
        if op.id in ops:
            continue
        ops[op.id] = None
        for source in op.inputs:
            if source not in seen and not resident(source, point):
                seen.add(source)
                wanted.append(source)
    order = sorted(ops)
    last_use = {t: i for i, o in enumerate(order) for t in graph.ops[o].inputs}
    steps: list[Run | Free] = []
    for i, o in enumerate(order):
        op = graph.ops[o]
        overwritten = {old for old, _ in op.mutates}
        clones = tuple(old for old, _ in op.mutates if old in targets or resident(old, point) or last_use[old] > i)
        steps.append(Run(o, clones))
        for source in dict.fromkeys(op.inputs):
            if (
                source in seen
                and source not in targets
                and last_use[source] == i
                and (source not in overwritten or source in clones)
            ):
                steps.append(Free(source))
        # a second copy of what is in memory already, or an output that nobody here reads
        steps.extend(
            Free(out) for out in op.outputs if out not in targets and (last_use.get(out, -1) <= i or resident(out, point))
        )
    return tuple(steps)


def _reads(graph: Graph, segments: dict[int, Segment]) -> dict[int, list[int]]:
    """Tensor -> the points at which autograd asks for it or a segment reads it, rising."""
    found: dict[int, list[int]] = {}
    for save in graph.saves:
        found.setdefault(save.tensor, []).extend(save.unpacked_at)
    for p, steps in segments.items():
        for step in steps:
            for t in graph.ops[step.op].inputs if isinstance(step, Run) else ():
                found.setdefault(t, []).append(p)
    return {t: sorted(points) for t, points in found.items()}


def lower(graph: Graph, lives: Iterable[Life]) -> Schedule:
    """The schedule of a set of lives. Raises LoweringError where a life cannot begin."""
    lives = tuple(lives)
    resident = Residency(graph, lives)
    births: dict[int, list[int]] = {}
    fetches: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    holds = set()
    for life in lives:
        if life.how == "original":
            holds.add(life.tensor)
        else:
            (births if life.how == "rebuild" else fetches).setdefault(life.born_at, []).append(life.tensor)
        frees.setdefault(life.freed_at, []).append(life.tensor)
    parked = {life.tensor: life.form for life in lives if life.how == "fetch"}
    segments: dict[int, Segment] = {p: segment(graph, p, births.get(p, ()), resident) for p in sorted({*births, *fetches})}
    if fetches:
        reads = _reads(graph, segments)
        for p, coming in fetches.items():
            coming.sort(key=lambda t: (next((q for q in reads.get(t, ()) if q >= p), len(graph.points)), t))
            segments[p] = (*map(Fetch, coming), *segments[p])
    for p in segments:
        if graph.points[p].kind != "unpack" or graph.asked_at(p) not in graph.producers:
            raise LoweringError(f"lives begin at point {p}, where autograd asks for nothing that an op of the step made")
    rebuilt = {step.op: p for p, steps in segments.items() for step in steps if isinstance(step, Run)}
    return Schedule(frozenset(holds), segments, {p: tuple(ts) for p, ts in frees.items()}, rebuilt, parked)
