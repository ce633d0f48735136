"""Plan when tensors are parked and fetched, for the lives of a plan and a choice of tensors.

A *gap* is the stretch of points at which a held tensor is not needed: from where it may be parked to where backward, or a
rebuild, first reads it. A *trip* is the part of the gap during which its bytes are off the device. Trips are planned so that
the step does not wait: the bytes are freed when the copy out ends, and the copy in begins just in time (Dymem, 3.2). Where the
budget needs longer trips, they begin earlier and end later, and the step waits for the link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_memopt.graph import BEFORE, Graph, Levels
from lightning_memopt.plan import Life, Rebuild, Schedule, lower, simulate
from lightning_memopt.plan.clocks import TransferRates, leaves_at
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.simulate import encoded
from lightning_memopt.plan.tiers import taken


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of points at which a held tensor is not read.

    tensor: id of the tensor.
    leaves: the point after which it may be parked.
    needed: the point at which backward or a rebuild first reads it again.
    """

    tensor: int
    leaves: int
    needed: int


@dataclass(frozen=True, slots=True)
class Trip:
    """The time during which a tensor's bytes are off the device.

    gap: the gap of which the trip uses a part.
    gone_at: the last point at which the bytes are on the device.
    back_at: the first point at which they are on the device again.
    form: the form in which the tensor is parked.
    parked_nbytes: bytes that it takes in this form.
    """

    gap: Gap
    gone_at: int
    back_at: int
    form: str
    parked_nbytes: int


Form = tuple[str, int]
"""A form and the bytes that a tensor takes in it."""


def gaps(graph: Graph, lives: Iterable[Life], schedule: Schedule | None = None) -> dict[int, Gap]:
    """Tensor -> its gap, for tensors that the lives hold from forward and that user code frees before backward needs them."""
    lives = tuple(lives)
    schedule = schedule or lower(graph, lives)
    needed: dict[int, int] = {}
    for save in graph.saves:
        for p in save.unpacked_at[:1]:
            needed[save.tensor] = min(p, needed.get(save.tensor, p))
    for p, steps in schedule.segments.items():
        for step in steps:
            if isinstance(step, Rebuild):
                for t in graph.ops[step.op].inputs:
                    needed[t] = min(p, needed.get(t, p))
    found_gaps = {}
    changed = {save.tensor for save in graph.saves if graph.packed(save) != save.tensor}
    for life in lives:
        t = life.tensor
        if life.how != "original" or life.born_at == BEFORE or t in graph.overwritten or t in changed or t not in needed:
            continue
        leaves = leaves_at(graph, t)
        if max(leaves, graph.tensors[t].freed_at) < needed[t] <= life.freed_at:
            found_gaps[t] = Gap(t, leaves, needed[t])
    return found_gaps


def send_away(lives: Iterable[Life], trips: Iterable[Trip]) -> tuple[Life, ...]:
    """The lives of a plan with these trips: the original life of each trip's tensor is cut in two, the second one fetched."""
    by_tensor = {trip.gap.tensor: trip for trip in trips}
    cut_lives: list[Life] = []
    for life in lives:
        trip = by_tensor.get(life.tensor) if life.how == "original" else None
        if trip is None:
            cut_lives.append(life)
            continue
        cut_lives.append(replace(life, freed_at=trip.gone_at))
        cut_lives.append(replace(life, born_at=trip.back_at, how="fetch", form=trip.form, parked_nbytes=trip.parked_nbytes))
    return tuple(sorted(cut_lives, key=lambda life: (life.tensor, life.born_at)))


def trips_in_tiers(trips: Iterable[Trip]) -> dict[str, int]:
    """Tier -> the bytes that these trips take there."""
    nbytes: dict[str, int] = {}
    for trip in trips:
        if tier := tier_of(trip.form):
            nbytes[tier] = nbytes.get(tier, 0) + taken(trip.form, trip.parked_nbytes)
    return nbytes


def brought_home(graph: Graph, lives: Iterable[Life]) -> tuple[tuple[Life, ...], list[Trip]]:
    """The lives of a plan without its trips, and the trips: what `send_away` was given."""
    home: dict[int, Life] = {}
    gone: dict[int, tuple[int, Life]] = {}
    others: list[Life] = []
    for life in lives:
        if life.how == "original":
            home[life.tensor] = life
        elif life.how == "fetch":
            gone[life.tensor] = home[life.tensor].freed_at, life
            home[life.tensor] = replace(home[life.tensor], freed_at=life.freed_at)
        else:
            others.append(life)
    together = tuple(sorted((*home.values(), *others), key=lambda life: (life.tensor, life.born_at)))
    found = gaps(graph, together)
    trips = [Trip(found[t], at, life.born_at, life.form, life.parked_nbytes) for t, (at, life) in gone.items()]
    return together, trips


class TripPlanner:
    """Plans trips for the lives of one plan, for links and codecs with these rates."""

    def __init__(self, graph: Graph, lives: tuple[Life, ...], rates: TransferRates) -> None:
        self.graph, self.lives, self.rates = graph, lives, rates
        schedule = lower(graph, lives)
        self.gaps = gaps(graph, lives, schedule)
        seconds = [0.0] * len(graph.points)
        for op in graph.ops:
            seconds[op.at] += op.seconds
        for p, steps in schedule.segments.items():
            seconds[p] += sum(graph.ops[step.op].seconds for step in steps if isinstance(step, Rebuild))
        self.ends = list(accumulate(seconds))
        self._dropped = {life.tensor for life in lives if life.how == "rebuild"}
        self._held = {life.tensor: life for life in lives if life.how == "original"}

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        return simulate(self.graph, self.lives).nbytes

    def plan(self, forms: Mapping[int, Form]) -> list[Trip]:
        """The trips of these tensors, in the order in which they begin."""
        chosen = sorted((self.gaps[t] for t in forms), key=lambda gap: (gap.leaves, gap.tensor))
        fences = self.fences(forms)
        unpacks = self.unpacks(forms)
        out: dict[int, int] = {}
        free = 0.0
        for gap in chosen:
            form, nbytes = forms[gap.tensor]
            at = gap.leaves
            if tier := tier_of(form):
                free = max(free, self.ends[gap.leaves]) + self.rates.out_seconds(tier, nbytes)
                at = self._at(fences, bisect_left(fences, free, key=self.ends.__getitem__))
            out[gap.tensor] = max(at, gap.leaves)
        back: dict[int, int] = {}
        free = self.ends[-1]
        for gap in sorted(chosen, key=lambda gap: (gap.needed, gap.tensor), reverse=True):
            form, nbytes = forms[gap.tensor]
            back[gap.tensor] = gap.needed
            if tier := tier_of(form):
                free = min(free, self.ends[gap.needed - 1]) - self.rates.in_seconds(tier, nbytes)
                i = bisect_right(unpacks, free, key=lambda p: self.ends[p - 1]) - 1
                first = bisect_right(unpacks, max(out[gap.tensor], self.graph.tensors[gap.tensor].freed_at))
                back[gap.tensor] = min(gap.needed, unpacks[max(i, first)]) if first < len(unpacks) else gap.needed
        return [Trip(gap, out[gap.tensor], back[gap.tensor], *forms[gap.tensor]) for gap in chosen]

    def fences(self, forms: Iterable[int]) -> list[int]:
        """Points of the forward at which the engine may wait for a copy: those where autograd packs a tensor that is parked or
        dropped.
        """
        saved = (t for t in self._dropped if t in self.graph.saves_of)
        points = {leaves_at(self.graph, t) for t in saved}.union(self.gaps[t].leaves for t in forms)
        return sorted(p for p in points if p < self.graph.backward_begins)

    def unpacks(self, forms: Iterable[int]) -> list[int]:
        """Unpack points at which autograd asks the engine for bytes: those of dropped and of parked tensors."""
        tensors = self._dropped.union(forms)
        return sorted({p for s in self.graph.saves if s.tensor in tensors for p in s.unpacked_at})

    @staticmethod
    def _at(points: Sequence[int], i: int) -> int:
        return points[min(i, len(points) - 1)]

    def within(
        self, forms: Mapping[int, Form], budget_nbytes: int, rounds: int = 200, planned: Iterable[Trip] | None = None
    ) -> list[Trip] | None:
        """Trips of these tensors that fit the budget. They are made longer if needed; None if even the longest do not fit.

        `planned`: trips of the same tensors to start from; by default those of `plan`.
        """
        trips = {trip.gap.tensor: trip for trip in (self.plan(forms) if planned is None else planned)}
        fences = self.fences(trips)
        unpacks = self.unpacks(forms)
        for _ in range(rounds):
            levels = self.levels(trips.values())
            over = [p for p, nbytes in enumerate(levels) if nbytes > budget_nbytes]
            if not over:
                return list(trips.values())
            squeezed = [self._squeeze(trips, p, fences, unpacks) for p in (levels.index(max(levels)), over[0], over[-1])]
            if not any(squeezed):
                return None
        return None

    def levels(self, trips: Iterable[Trip]) -> list[int]:
        """Bytes at every point with these trips, as `simulate` counts them."""
        trips = list(trips)
        moved = Levels(len(self._levels))
        for trip in trips:
            tensor = self.graph.tensors[trip.gap.tensor]
            moved.add(max(trip.gone_at, tensor.freed_at) + 1, trip.back_at - 1, -tensor.nbytes)
        coded = [trip for trip in trips if codec_of(trip.form)]
        for _, first, last, nbytes in encoded(self.graph, send_away((self._held[trip.gap.tensor] for trip in coded), coded)):
            moved.add(first, last, nbytes)
        return [level + change for level, change in zip(self._levels, moved.levels(), strict=True)]

    def _squeeze(self, trips: dict[int, Trip], p: int, fences: list[int], unpacks: list[int]) -> bool:
        """Make trips longer if their tensors are on the device at the point `p` only because they wait for the link or came
        back early.

        Returns whether there was such a trip.
        """
        moved = False
        for t, trip in trips.items():
            if max(trip.gap.leaves, self.graph.tensors[t].freed_at) < p <= trip.gone_at:
                earlier = bisect_left(fences, p) - 1
                trips[t] = replace(trip, gone_at=max(trip.gap.leaves, fences[earlier]))
                moved = True
            elif trip.back_at <= p < trip.gap.needed:
                later = bisect_right(unpacks, p)
                trips[t] = replace(trip, back_at=min(trip.gap.needed, unpacks[later]))
                moved = True
        return moved
