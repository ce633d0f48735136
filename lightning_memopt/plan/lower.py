"""Turn the lives of a plan into a schedule. This is the only definition of what lives mean.

At an unpack point where lives begin, the ops that make those tensors run again, starting from tensors that are in memory there.
A tensor that is made on the way and has no life of its own is freed after its last use within the segment. An op that works in
place runs on its input itself if nothing needs that input any more, and else on a copy. Fetches begin before any op of the
segment runs, in the order in which the tensors are read, because a link carries one copy after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_memopt.errors import MemOptError
from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.plan.model import Life


class LoweringError(MemOptError, ValueError):
    """The lives need a tensor at a point where it cannot be made.

    Remedy: make the plan again.
    """


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Run a forward op again.

    op: id of the op.
    clones: inputs that the op overwrites although they are still needed: the op runs on copies of them.
    """

    op: int
    clones: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Free a tensor."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to fetch a parked tensor; its first reader waits for it."""

    tensor: int


Segment = tuple[Rebuild | Free | Fetch, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of a planned step, by point of the graph.

    holds: tensors that are held from their birth in forward.
    segments: unpack point -> steps to run before the unpack is answered.
    frees: point -> tensors to free after it. A free of a parked tensor waits until its copy is complete.
    rebuilt: every op that a segment runs -> the last point at which a segment runs it.
    parked: every tensor that is parked -> its form.
    """

    holds: frozenset[int]
    segments: dict[int, Segment]
    frees: dict[int, tuple[int, ...]]
    rebuilt: dict[int, int]
    parked: dict[int, str] = field(default_factory=dict)

    @property
    def runs(self) -> list[int]:
        """The ops that run again, in order. An op that runs twice is listed twice."""
        return [step.op for steps in self.segments.values() for step in steps if isinstance(step, Rebuild)]


class Residency:
    """Tells which tensors a rebuild may start from at a point: those that a life holds, and those that existed before the step.
    A tensor that only user code holds does not count, because user code may change it unnoticed. A windowed tensor counts only
    within its windows.
    """

    def __init__(self, graph: Graph, lives: Iterable[Life]) -> None:
        self.graph = graph
        self.lives: dict[int, list[Life]] = {}
        for life in lives:
            self.lives.setdefault(life.tensor, []).append(life)

    def __call__(self, tensor: int, point: int) -> bool:
        """Whether the tensor is in memory before a segment at `point` runs, and still there after it."""
        t = self.graph.tensors[tensor]
        if t.born_at == BEFORE and t.freed_at >= point and (not t.windows or t.there(point)):
            return True
        for life in self.lives.get(tensor, ()):  # a loop is faster than a generator: planners call this a million times
            if (
                life.born_at <= point <= life.freed_at
                and not (life.how == "rebuild" and life.born_at == point)
                and (not life.form or codec_of(life.form) in EXACT)
            ):
                return True
        return False


def segment(graph: Graph, point: int, births: Iterable[int], resident: Residency) -> Segment:
    """The steps that bring the tensors `births` into memory at `point`, with ops in the order of the forward. Raises
    LoweringError.
    """
    targets = {t for t in births if not resident(t, point)}
    ops: dict[int, None] = {}
    wanted = list(targets)
    seen = set(targets)
    while wanted:
        tensor = wanted.pop()
        op = graph.rebuilders.get(tensor)
        if op is None:
            name = graph.tensors[tensor].name
            raise LoweringError(
                f"tensor {tensor} ({name}) is needed at point {point} but is not in memory and no op can make it"
            )
        if op.id in ops:
            continue
        ops[op.id] = None
        for t in op.inputs:
            if t not in seen and not resident(t, point):
                seen.add(t)
                wanted.append(t)
    order = sorted(ops)
    last_use = {t: i for i, o in enumerate(order) for t in graph.ops[o].inputs}
    steps: list[Rebuild | Free] = []
    for i, o in enumerate(order):
        op = graph.ops[o]
        overwritten: tuple[int, ...] = ()
        clones: tuple[int, ...] = ()
        if op.mutates:
            overwritten = tuple(old for old, _ in op.mutates)
            clones = tuple(old for old in overwritten if old in targets or resident(old, point) or last_use[old] > i)
        steps.append(Rebuild(o, clones))
        for t in dict.fromkeys(op.inputs):
            if t in seen and t not in targets and last_use[t] == i and (t not in overwritten or t in clones):
                steps.append(Free(t))
        for out in op.outputs:
            # a second copy of a tensor that is already in memory, an output that no op of the segment reads, or one that the
            # op does not make again
            if out not in targets and (last_use.get(out, -1) <= i or resident(out, point)):
                steps.append(Free(out))
    return tuple(steps)


def _reads(graph: Graph, segments: dict[int, Segment]) -> dict[int, list[int]]:
    """Tensor -> the points at which autograd asks for it or a segment reads it, in rising order."""
    reads: dict[int, list[int]] = {}
    for save in graph.saves:
        reads.setdefault(save.tensor, []).extend(save.unpacked_at)
    for p, steps in segments.items():
        for step in steps:
            if isinstance(step, Rebuild):
                for t in graph.ops[step.op].inputs:
                    reads.setdefault(t, []).append(p)
    return {t: sorted(points) for t, points in reads.items()}


def lower(graph: Graph, lives: Iterable[Life]) -> Schedule:
    """The schedule for a set of lives. Raises LoweringError if a life cannot begin at its point."""
    lives = tuple(lives)
    resident = Residency(graph, lives)
    births: dict[int, list[int]] = {}
    fetches: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    holds = set()
    for life in lives:
        if life.how == "original":
            holds.add(life.tensor)
        elif life.how == "rebuild":
            births.setdefault(life.born_at, []).append(life.tensor)
        else:
            fetches.setdefault(life.born_at, []).append(life.tensor)
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
            raise LoweringError(f"lives begin at point {p}, but autograd asks there for no tensor that an op of the step made")
    rebuilt = {step.op: p for p, steps in segments.items() for step in steps if isinstance(step, Rebuild)}
    return Schedule(frozenset(holds), segments, {p: tuple(ts) for p, ts in frees.items()}, rebuilt, parked)
