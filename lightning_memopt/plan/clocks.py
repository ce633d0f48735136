"""When copies and codecs of a planned step run, and what the step waits for: three clocks (compute, copy out, copy in).

Compute goes through the points in order: ops, segments. A copy out is queued where its tensor is parked, a copy in where the
fetched life begins; each direction of a link carries one copy after the other. Compute waits at two places: where the bytes of
a parked tensor must be freed and its copy has not ended, and where a fetched tensor is read before its copy has ended. Encoding
and decoding take the device's own time. (Dymem, 3.2: one stream per direction and events instead of barriers.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from lightning_memopt.graph import BEFORE, Graph, Levels
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.lower import Fetch, Rebuild, Schedule
from lightning_memopt.plan.model import Life


class TransferRates(Protocol):
    """Seconds of copies and codecs. `nbytes` of a copy are the copied bytes, of a codec the bytes of the decoded tensor."""

    def out_seconds(self, tier: str, nbytes: int) -> float: ...
    def in_seconds(self, tier: str, nbytes: int) -> float: ...
    def encode_seconds(self, codec: str, nbytes: int) -> float: ...
    def decode_seconds(self, codec: str, nbytes: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Transfers:
    """See `Prediction` for what each field means."""

    moved_nbytes: int = 0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    codec_seconds: float = 0.0
    tier_nbytes: int = 0


def leaves_at(graph: Graph, tensor: int) -> int:
    """The point after which a tensor may be parked: it has been packed, or made where autograd does not save it."""
    first = min((s.op for s in graph.saves_of.get(tensor, ())), default=None)
    born = graph.tensors[tensor].born_at
    if first is None:
        return born
    packed = graph.ops[first].at if first < len(graph.ops) else len(graph.points)
    return max(born, packed - 1)  # an op's inputs are packed before it runs, its outputs before the next op runs


class _Clocks:
    def __init__(self, graph: Graph, rates: TransferRates) -> None:
        self.graph, self.rates = graph, rates
        self.now = self.stalled = self.codec = self.copied = 0.0
        self.moved = 0
        self.out_free = self.in_free = 0.0
        self.gone_at: dict[int, float] = {}
        self.there_at: dict[int, float] = {}

    def store(self, tensor: int, form: str, nbytes: int) -> None:
        if codec := codec_of(form):
            self._code(self.rates.encode_seconds(codec, self.graph.tensors[tensor].nbytes))
        if tier := tier_of(form):
            self.out_free = max(self.now, self.out_free) + self._copy(self.rates.out_seconds(tier, nbytes), nbytes)
            self.gone_at[tensor] = self.out_free

    def fetch(self, tensor: int, form: str, nbytes: int) -> None:
        if tier := tier_of(form):
            begins = max(self.now, self.in_free, self.gone_at[tensor])
            self.in_free = begins + self._copy(self.rates.in_seconds(tier, nbytes), nbytes)
            self.there_at[tensor] = self.in_free

    def wait_gone(self, tensor: int) -> None:
        self._until(self.gone_at.get(tensor, 0.0))

    def read(self, tensor: int, form: str) -> None:
        """A tensor is read for the first time since it began to come back."""
        self._until(self.there_at.pop(tensor, 0.0))
        if codec := codec_of(form):
            self._code(self.rates.decode_seconds(codec, self.graph.tensors[tensor].nbytes))

    def _copy(self, seconds: float, nbytes: int) -> float:
        self.copied += seconds
        self.moved += nbytes
        return seconds

    def _code(self, seconds: float) -> None:
        self.codec += seconds
        self.now += seconds

    def _until(self, then: float) -> None:
        if then > self.now:
            self.stalled += then - self.now
            self.now = then


def transfers(graph: Graph, lives: Iterable[Life], schedule: Schedule, rates: TransferRates) -> Transfers:
    """Copies, stalls and codecs of the parked tensors, for these rates and the ops' seconds in the graph."""
    fetched = [life for life in lives if life.how == "fetch"]
    if not fetched:
        return Transfers()
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
    clocks = _Clocks(graph, rates)
    coming: set[int] = set()

    def reads(tensors: Iterable[int]) -> None:
        for t in coming.intersection(tensors):
            coming.discard(t)
            clocks.read(t, schedule.parked[t])

    for t in leaving.get(BEFORE, ()):
        clocks.store(t, schedule.parked[t], nbytes[t])
    for p, point in enumerate(graph.points):
        for step in schedule.segments.get(p, ()):
            if isinstance(step, Fetch):
                clocks.fetch(step.tensor, schedule.parked[step.tensor], nbytes[step.tensor])
                coming.add(step.tensor)
            elif isinstance(step, Rebuild):
                reads(graph.ops[step.op].inputs)
                clocks.now += graph.ops[step.op].seconds
        if point.kind == "unpack":
            reads((graph.saves[point.id].tensor,))
        elif point.kind == "op":
            clocks.now += graph.ops[point.id].seconds
        for t in leaving.get(p, ()):
            clocks.store(t, schedule.parked[t], nbytes[t])
        for t in schedule.frees.get(p, ()):
            if t in schedule.parked and p < last[t]:
                clocks.wait_gone(t)
    return Transfers(clocks.moved, clocks.copied, clocks.stalled, clocks.codec, max(in_tiers.levels()))
