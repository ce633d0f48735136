"""When the copies and codecs of a planned step run, and how long the step waits for them. There are three clocks: one for
compute, one for copies out, one for copies in.

The compute clock runs the ops and segments in the order of the points. A copy out is queued where its tensor is parked, a copy
in where the fetched life begins. Each direction of a link carries one copy at a time. Compute waits in two cases: the bytes of
a parked tensor must be freed but its copy has not ended, or a fetched tensor is read before its copy has ended. Encoding and
decoding take compute time. (Dymem, 3.2: one stream per direction, and events instead of barriers.)

The same link carries the copies that the step makes in any case, of what rests (`Graph.copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from lightning_memopt.graph import BEFORE, Copy, Graph, Levels, Op
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.lower import Fetch, Rebuild, Schedule, Segment
from lightning_memopt.plan.model import Life


class TransferRates(Protocol):
    """Seconds that copies and codecs take. `nbytes` is what a copy copies; for a codec it is the size of the decoded tensor."""

    def out_seconds(self, tier: str, nbytes: int) -> float: ...
    def in_seconds(self, tier: str, nbytes: int) -> float: ...
    def encode_seconds(self, codec: str, nbytes: int) -> float: ...
    def decode_seconds(self, codec: str, nbytes: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Transfers:
    """See `Prediction` for what each field means. The copies of what rests are not counted."""

    moved_nbytes: int = 0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    codec_seconds: float = 0.0
    tier_nbytes: int = 0


class Interval(NamedTuple):
    """What one clock does for a while.

    lane: which clock this is: compute, or one direction of the links.
    what: the phase of an op that runs, or "rebuild", "encode", "decode"; "wait" where compute waits; "copy" on the links.
    begins, ends: seconds since the step began.
    op: id of the op; -1 where there is none.
    tensor: id of the tensor that is copied, coded or waited for; -1 where an op runs.
    """

    lane: Literal["compute", "out", "in"]
    what: str
    begins: float
    ends: float
    op: int = -1
    tensor: int = -1


def leaves_at(graph: Graph, tensor: int) -> int:
    """The point after which a tensor may be parked: autograd has packed it or, if autograd does not save it, its op has run."""
    first = min((s.op for s in graph.saves_of.get(tensor, ())), default=None)
    born = graph.tensors[tensor].born_at
    if first is None:
        return born
    packed = graph.ops[first].at if first < len(graph.ops) else len(graph.points)
    return max(born, packed - 1)  # an op's inputs are packed before it runs, its outputs before the next op runs


class _Clocks:
    def __init__(self, graph: Graph, rates: TransferRates | None, log: list[Interval] | None) -> None:
        self.graph, self.log = graph, log
        self._rates = rates
        self.now = self.stalled = self.codec = self.copied = 0.0
        self.moved = 0
        self.out_free = self.in_free = 0.0
        self.gone_at: dict[int, float] = {}
        self.there_at: dict[int, float] = {}
        self._resting_until: list[float] = [0.0] * len(graph.copies)
        self.waited = [0.0] * len(graph.copies)

    @property
    def rates(self) -> TransferRates:
        assert self._rates is not None, "a plan that parks tensors can only be priced with rates"
        return self._rates

    def runs(self, op: Op, what: str) -> None:
        begins = self.now
        self.now += op.seconds
        if self.log is not None:
            self.log.append(Interval("compute", what, begins, self.now, op.id))

    def store(self, tensor: int, form: str, nbytes: int) -> None:
        if codec := codec_of(form):
            self._code("encode", tensor, self.rates.encode_seconds(codec, self.graph.tensors[tensor].nbytes))
        if tier := tier_of(form):
            begins = max(self.now, self.out_free)
            self.out_free = begins + self._copy(self.rates.out_seconds(tier, nbytes), nbytes)
            self.gone_at[tensor] = self.out_free
            self._logs("out", "copy", begins, self.out_free, tensor)

    def fetch(self, tensor: int, form: str, nbytes: int) -> None:
        if tier := tier_of(form):
            begins = max(self.now, self.in_free, self.gone_at[tensor])
            self.in_free = begins + self._copy(self.rates.in_seconds(tier, nbytes), nbytes)
            self.there_at[tensor] = self.in_free
            self._logs("in", "copy", begins, self.in_free, tensor)

    def begin(self, i: int) -> None:
        """The `i`-th copy of what rests begins, as soon as the link is free."""
        copy = self.graph.copies[i]
        begins = max(self.now, self.out_free if copy.lane == "out" else self.in_free)
        ends = self._resting_until[i] = begins + copy.seconds
        if copy.lane == "out":
            self.out_free = ends
        else:
            self.in_free = ends
        self._logs(copy.lane, "copy", begins, ends, copy.tensor)

    def end(self, i: int) -> None:
        """It must have ended."""
        before = self.stalled
        self._until(self._resting_until[i], self.graph.copies[i].tensor)
        self.waited[i] = self.stalled - before

    def wait_gone(self, tensor: int) -> None:
        self._until(self.gone_at.get(tensor, 0.0), tensor)

    def read(self, tensor: int, form: str) -> None:
        """A tensor is read for the first time since its fetch began."""
        self._until(self.there_at.pop(tensor, 0.0), tensor)
        if codec := codec_of(form):
            self._code("decode", tensor, self.rates.decode_seconds(codec, self.graph.tensors[tensor].nbytes))

    def _copy(self, seconds: float, nbytes: int) -> float:
        self.copied += seconds
        self.moved += nbytes
        return seconds

    def _logs(self, lane: Literal["compute", "out", "in"], what: str, begins: float, ends: float, tensor: int) -> None:
        if self.log is not None and ends > begins:
            self.log.append(Interval(lane, what, begins, ends, tensor=tensor))

    def _code(self, what: str, tensor: int, seconds: float) -> None:
        self.codec += seconds
        self._logs("compute", what, self.now, self.now + seconds, tensor)
        self.now += seconds

    def _until(self, then: float, tensor: int) -> None:
        if then > self.now:
            self._logs("compute", "wait", self.now, then, tensor)
            self.stalled += then - self.now
            self.now = then


def intervals(
    graph: Graph, lives: Iterable[Life], schedule: Schedule, rates: TransferRates | None
) -> tuple[list[Interval], Transfers]:
    """What each clock does in a planned step, sorted by begin, and what the step costs. `rates` may be None for a plan that
    parks nothing.
    """
    log: list[Interval] = []
    moved, _ = _run(graph, lives, schedule, rates, log)
    return log, moved


def transfers(graph: Graph, lives: Iterable[Life], schedule: Schedule, rates: TransferRates) -> Transfers:
    """What copies, stalls and codecs of the parked tensors cost, by these rates and by the seconds of the graph's ops. Stalls
    are those in addition to `stall_seconds`.
    """
    lives = [life for life in lives if life.how == "fetch"]
    if not lives:
        return Transfers()
    moved, _ = _run(graph, lives, schedule, rates, None)
    return replace(moved, stall_seconds=moved.stall_seconds - stall_seconds(graph, schedule)) if graph.copies else moved


@lru_cache(maxsize=8)
def waits(graph: Graph) -> tuple[float, ...]:
    """For how many seconds the step waits for each copy of what rests, if no plan changes it otherwise."""
    _, waited = _run(graph, (), Schedule(frozenset(), {}, {}, {}), None, None)
    return tuple(waited)


def stall_seconds(graph: Graph, schedule: Schedule) -> float:
    """For how long the step waits for the copies of what rests, as if nothing else were parked: they run beside what is
    rebuilt, too.
    """
    rebuilds: dict[int, Segment] = {}
    for point, steps in schedule.segments.items():
        rebuilds[point] = tuple(step for step in steps if isinstance(step, Rebuild))
    moved, _ = _run(graph, (), replace(schedule, segments=rebuilds, parked={}), None, None)
    return moved.stall_seconds


def _run(
    graph: Graph, lives: Iterable[Life], schedule: Schedule, rates: TransferRates | None, log: list[Interval] | None
) -> tuple[Transfers, Sequence[float]]:
    """What it costs, and for how long the step waits for each copy of what rests."""
    begins, ends_of = _moments(graph.copies)
    fetched = [life for life in lives if life.how == "fetch"]
    nbytes = {life.tensor: life.parked_nbytes for life in fetched}
    leaving: dict[int, list[int]] = {}
    for t in schedule.parked:
        leaving.setdefault(leaves_at(graph, t), []).append(t)
    in_tiers = Levels(len(graph.points))
    last: dict[int, int] = {}
    ends: dict[int, int] = {}
    for life in fetched:
        last[life.tensor] = max(life.born_at, last.get(life.tensor, 0))
        ends[life.tensor] = max(life.freed_at, ends.get(life.tensor, 0))
    for t, form in schedule.parked.items():
        if tier_of(form):
            in_tiers.add(leaves_at(graph, t), ends[t], nbytes[t])
    clocks = _Clocks(graph, rates, log)
    coming: set[int] = set()

    def reads(tensors: Iterable[int]) -> None:
        for t in coming.intersection(tensors):
            coming.discard(t)
            clocks.read(t, schedule.parked[t])

    def passed(point: int) -> None:
        for t in leaving.get(point, ()):
            clocks.store(t, schedule.parked[t], nbytes[t])
        for i in begins.get(point, ()):
            clocks.begin(i)

    passed(BEFORE)
    for p, point in enumerate(graph.points):
        for i in ends_of.get(p, ()):
            clocks.end(i)
        for step in schedule.segments.get(p, ()):
            if isinstance(step, Fetch):
                clocks.fetch(step.tensor, schedule.parked[step.tensor], nbytes[step.tensor])
                coming.add(step.tensor)
            elif isinstance(step, Rebuild):
                reads(graph.ops[step.op].inputs)
                clocks.runs(graph.ops[step.op], "rebuild")
        if point.kind == "unpack":
            reads((graph.saves[point.id].tensor,))
        elif point.kind == "op":
            op = graph.ops[point.id]
            clocks.runs(op, op.phase)
        passed(p)
        for t in schedule.frees.get(p, ()):
            if t in schedule.parked and p < last[t]:
                clocks.wait_gone(t)
    for i in ends_of.get(len(graph.points), ()):
        clocks.end(i)
    moved = Transfers(clocks.moved, clocks.copied, clocks.stalled, clocks.codec, max(in_tiers.levels(), default=0))
    return moved, clocks.waited


def _moments(copies: Sequence[Copy]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Point -> the copies that begin after it, those that are needed first before others; and point -> those that must have
    ended before it.
    """
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for i, copy in sorted(enumerate(copies), key=lambda pair: pair[1].before):
        begins.setdefault(copy.after, []).append(i)
        ends.setdefault(copy.before, []).append(i)
    return begins, ends
