"""The cost of a schedule: bytes at every point, peak, extra seconds. All solvers are compared by this simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import Graph, Levels, Op, base_levels, workspaces
from lightning_memopt.plan.clocks import TransferRates, Transfers, leaves_at, transfers
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.lower import Fetch, Rebuild, Schedule, Segment, lower
from lightning_memopt.plan.model import Life, Prediction


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    nbytes: bytes at every point, at the worst moment within the point.
    predicted: the cost of the plan.
    """

    nbytes: tuple[int, ...]
    predicted: Prediction

    @property
    def peak_at(self) -> int:
        """The point of the peak, counted from the first point of the window."""
        return self.nbytes.index(self.predicted.peak_nbytes)


class SegmentCost(NamedTuple):
    """What a segment costs.

    rise_nbytes: by how many bytes memory rises at most while it runs, lives that begin at its point included.
    seconds, flops: the seconds and FLOPs of its ops.
    made_nbytes: bytes that its ops make, copies included.
    ops: how many ops it runs.
    """

    rise_nbytes: int
    seconds: float
    flops: int
    made_nbytes: int
    ops: int


@lru_cache(maxsize=4)
def fixed_levels(graph: Graph) -> list[int]:
    """The bytes at every point that no plan changes, workspaces included."""
    return list(map(add, base_levels(graph), workspaces(graph)))


@lru_cache(maxsize=4)
def _made(graph: Graph) -> list[int]:
    """Bytes that every op makes when it runs again."""
    made = []
    for op in graph.ops:
        in_place = {new for _, new in op.mutates}
        made.append(sum(graph.tensors[t].nbytes for t in op.outputs if t not in in_place))
    return made


def added_by(graph: Graph, life: Life) -> tuple[int, int, int]:
    """What a life adds to `fixed_levels`, as (first point, last point, bytes). The fixed levels have the tensor until user code
    frees it.
    """
    t = graph.tensors[life.tensor]
    return max(life.born_at, t.freed_at + 1) if life.how == "original" else life.born_at, life.freed_at, t.nbytes


def segment_cost(graph: Graph, steps: Segment) -> SegmentCost:
    """Price a segment by itself."""
    made = _made(graph)
    now = rise = flops = made_nbytes = count = 0
    seconds = 0.0
    for step in steps:
        if isinstance(step, Rebuild):
            op = graph.ops[step.op]
            seconds += op.seconds
            flops += op.flops
            count += 1
            allocated = made[step.op]
            for clone in step.clones:
                allocated += graph.tensors[clone].nbytes
            made_nbytes += allocated
            now += allocated
            if now + op.workspace_nbytes > rise:
                rise = now + op.workspace_nbytes
        elif not isinstance(step, Fetch):
            now -= graph.tensors[step.tensor].nbytes
    return SegmentCost(rise, seconds, flops, made_nbytes, count)


def simulate(
    graph: Graph,
    lives: Iterable[Life],
    schedule: Schedule | None = None,
    window: tuple[int, int] | None = None,
    rates: TransferRates | None = None,
) -> Timeline:
    """Price the schedule of `lives`. An op that runs again takes its seconds of the forward. Copies and codecs take the seconds
    that `rates` give, and no time without `rates`. The bytes on the device do not depend on rates.

    `window` (first and last point) restricts the simulation to a part of the axis; `Timeline.nbytes` then starts at its first
    point, and only segments inside it count.
    """
    lives = tuple(lives)
    schedule = schedule or lower(graph, lives)
    fixed = fixed_levels(graph)
    first_point, last_point = window or (0, len(graph.points) - 1)
    levels = Levels(last_point - first_point + 1)
    for life in lives:
        first, last, life_nbytes = added_by(graph, life)
        levels.add(first - first_point, last - first_point, life_nbytes)
    if schedule.parked:
        for _, first, last, encoded_nbytes in encoded(graph, lives):
            levels.add(first - first_point, last - first_point, encoded_nbytes)
    for op in states(graph, schedule):
        levels.add(op.at - first_point, graph.last_release - first_point, op.state_nbytes)
    nbytes = list(map(add, fixed[first_point : last_point + 1], levels.levels()))
    seconds, flops, rebuilt, count = 0.0, 0, 0, 0
    born_nbytes: dict[int, int] = {}
    for life in lives:
        if life.how == "rebuild":
            born_nbytes[life.born_at] = born_nbytes.get(life.born_at, 0) + graph.tensors[life.tensor].nbytes
    for point, steps in schedule.segments.items():
        if not first_point <= point <= last_point:
            continue
        cost = segment_cost(graph, steps)
        seconds += cost.seconds
        flops += cost.flops
        rebuilt += cost.made_nbytes
        count += cost.ops
        began = nbytes[point - first_point] - born_nbytes.get(point, 0)
        nbytes[point - first_point] = max(nbytes[point - first_point], began + cost.rise_nbytes)
    moved = transfers(graph, lives, schedule, rates) if rates is not None and schedule.parked else Transfers()
    predicted = Prediction(
        peak_nbytes=max(nbytes, default=0),
        extra_seconds=seconds,
        extra_flops=flops,
        rebuilt_nbytes=rebuilt,
        rebuilt_ops=count,
        moved_nbytes=moved.moved_nbytes,
        copy_seconds=moved.copy_seconds,
        stall_seconds=moved.stall_seconds,
        codec_seconds=moved.codec_seconds,
        tier_nbytes=moved.tier_nbytes,
    )
    return Timeline(tuple(nbytes), predicted)


def states(graph: Graph, schedule: Schedule) -> Iterator[Op]:
    """The ops that run again and for which the device keeps a generator state as long as autograd holds anything. Torch keeps
    the states of an accelerator's generator on the host.
    """
    if kind_of(graph.device).is_host:
        yield from (graph.ops[op] for op in schedule.rebuilt if graph.ops[op].state_nbytes)


def first_read(graph: Graph, life: Life) -> int:
    """The point at which autograd first asks for the tensor in this life; the life's first point if it never asks."""
    return next((at for at, _ in graph.reads(life.tensor) if at >= life.born_at), life.born_at)


def encoded(graph: Graph, lives: Iterable[Life]) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, first point, last point, bytes) of every encoded tensor on the device.

    A tensor that is encoded without a tier stays on the device from its encoding until it is decoded. If the encoded bytes go
    to a tier, they are on the device only in transit: out, until the original bytes are freed, and in, from the first point of
    the fetched life until it is read.
    """
    before: dict[int, Life] = {}
    spans: dict[int, tuple[int, int, int]] = {}
    for life in sorted(lives, key=lambda life: (life.tensor, life.born_at)):
        if life.how == "fetch" and codec_of(life.form):
            leaves = leaves_at(graph, life.tensor)
            read = first_read(graph, life)
            if not tier_of(life.form):
                spans[life.tensor] = (leaves, read, life.parked_nbytes)
            else:
                last = before.get(life.tensor)
                if last is not None and last.how == "original":
                    yield life.tensor, leaves, last.freed_at, life.parked_nbytes
                yield life.tensor, life.born_at, read, life.parked_nbytes
        before[life.tensor] = life
    for tensor, (first, last_point, nbytes) in spans.items():
        yield tensor, first, last_point, nbytes
