"""Tensors that go away for a while: from the lives of a plan and a choice of tensors, when each leaves and comes back.

A *gap* is where a held tensor is not needed: from when it may leave to when backward, or a rebuild, first reads it. A
*trip* uses a part of it. Trips are planned as late as copies allow: bytes go when the copy out ends, and begin to come back
just in time (Dymem, 3.2). Where the budget asks for more, they go earlier and come back later, and the step waits for the link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_memopt.graph import BEFORE, Graph, Levels
from lightning_memopt.plan import Life, Run, Schedule, lower, simulate
from lightning_memopt.plan.clocks import TransferRates, leaves_at
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.simulate import encoded


@dataclass(frozen=True, slots=True)
class Gap:
    """A held tensor that nobody reads after the point `leaves` and before the point `needed`."""

    tensor: int
    leaves: int
    needed: int


@dataclass(frozen=True, slots=True)
class Trip:
    """Its bytes are on the device up to the point `gone_at`, and again from the point `back_at`."""

    gap: Gap
    gone_at: int
    back_at: int
    form: str
    parked_nbytes: int


Form = tuple[str, int]
"""A form and the bytes that a tensor takes in it."""


def gaps(graph: Graph, lives: Iterable[Life], schedule: Schedule | None = None) -> dict[int, Gap]:
    """By tensor, of what the lives hold from forward and user code lets go of before it is needed again."""
    lives = tuple(lives)
    schedule = schedule or lower(graph, lives)
    needed: dict[int, int] = {}
    for save in graph.saves:
        for p in save.unpacked_at[:1]:
            needed[save.tensor] = min(p, needed.get(save.tensor, p))
    for p, steps in schedule.segments.items():
        for step in steps:
            if isinstance(step, Run):
                for t in graph.ops[step.op].inputs:
                    needed[t] = min(p, needed.get(t, p))
    found = {}
    changed = {save.tensor for save in graph.saves if graph.packed(save) != save.tensor}
    for life in lives:
        t = life.tensor
        if life.how != "original" or life.born_at == BEFORE or t in graph.overwritten or t in changed or t not in needed:
            continue
        leaves = leaves_at(graph, t)
        if max(leaves, graph.tensors[t].freed_at) < needed[t] <= life.freed_at:
            found[t] = Gap(t, leaves, needed[t])
    return found


def send_away(lives: Iterable[Life], trips: Iterable[Trip]) -> tuple[Life, ...]:
    """The lives with each trip's original life cut in two."""
    by_tensor = {trip.gap.tensor: trip for trip in trips}
    found: list[Life] = []
    for life in lives:
        trip = by_tensor.get(life.tensor) if life.how == "original" else None
        if trip is None:
            found.append(life)
            continue
        found.append(replace(life, freed_at=trip.gone_at))
        found.append(replace(life, born_at=trip.back_at, how="fetch", form=trip.form, parked_nbytes=trip.parked_nbytes))
    return tuple(sorted(found, key=lambda life: (life.tensor, life.born_at)))


class TripPlanner:
    """Plans trips for the lives of one plan on links of certain rates."""

    def __init__(self, graph: Graph, lives: tuple[Life, ...], rates: TransferRates) -> None:
        self.graph, self.lives, self.rates = graph, lives, rates
        schedule = lower(graph, lives)
        self.gaps = gaps(graph, lives, schedule)
        seconds = [0.0] * len(graph.points)
        for op in graph.ops:
            seconds[op.at] += op.seconds
        for p, steps in schedule.segments.items():
            seconds[p] += sum(graph.ops[step.op].seconds for step in steps if isinstance(step, Run))
        self.ends = list(accumulate(seconds))
        self._dropped = {life.tensor for life in lives if life.how == "rebuild"}
        self._held = {life.tensor: life for life in lives if life.how == "original"}

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        return simulate(self.graph, self.lives).nbytes

    def plan(self, forms: Mapping[int, Form]) -> list[Trip]:
        """Trips of these tensors, in the order in which they leave."""
        chosen = sorted((self.gaps[t] for t in forms), key=lambda gap: (gap.leaves, gap.tensor))
        fences = self.fences(forms)
        requests = self.requests(forms)
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
                i = bisect_right(requests, free, key=lambda p: self.ends[p - 1]) - 1
                first = bisect_right(requests, max(out[gap.tensor], self.graph.tensors[gap.tensor].freed_at))
                back[gap.tensor] = min(gap.needed, requests[max(i, first)]) if first < len(requests) else gap.needed
        return [Trip(gap, out[gap.tensor], back[gap.tensor], *forms[gap.tensor]) for gap in chosen]

    def fences(self, forms: Iterable[int]) -> list[int]:
        """Points of the forward at which the engine may wait for a copy: where it is given what goes away, or is dropped."""
        saved = (t for t in self._dropped if t in self.graph.saves_of)
        found = {leaves_at(self.graph, t) for t in saved}.union(self.gaps[t].leaves for t in forms)
        return sorted(p for p in found if p < self.graph.backward_begins)

    def requests(self, forms: Iterable[int]) -> list[int]:
        """Unpack points at which the engine is asked: those of what is dropped or away."""
        tensors = self._dropped.union(forms)
        return sorted({p for s in self.graph.saves if s.tensor in tensors for p in s.unpacked_at})

    @staticmethod
    def _at(points: Sequence[int], i: int) -> int:
        return points[min(i, len(points) - 1)]

    def within(
        self, forms: Mapping[int, Form], budget_nbytes: int, rounds: int = 200, planned: Iterable[Trip] | None = None
    ) -> list[Trip] | None:
        """Trips of these tensors within the budget, where needed by waiting for the link; None where even that does not do.

        `planned`: trips of the same tensors to begin with, those of `plan` without them.
        """
        trips = {trip.gap.tensor: trip for trip in (self.plan(forms) if planned is None else planned)}
        fences = self.fences(trips)
        requests = self.requests(forms)
        for _ in range(rounds):
            levels = self.levels(trips.values())
            over = [p for p, nbytes in enumerate(levels) if nbytes > budget_nbytes]
            if not over:
                return list(trips.values())
            if not any([self._squeeze(trips, p, fences, requests) for p in (levels.index(max(levels)), over[0], over[-1])]):
                return None
        return None

    def levels(self, trips: Iterable[Trip]) -> list[int]:
        """Bytes at every point with these trips: those that `simulate` finds, which are the plan's less what is away."""
        trips = list(trips)
        moved = Levels(len(self._levels))
        for trip in trips:
            tensor = self.graph.tensors[trip.gap.tensor]
            moved.add(max(trip.gone_at, tensor.freed_at) + 1, trip.back_at - 1, -tensor.nbytes)
        coded = [trip for trip in trips if codec_of(trip.form)]
        for _, first, last, nbytes in encoded(self.graph, send_away((self._held[trip.gap.tensor] for trip in coded), coded)):
            moved.add(first, last, nbytes)
        return [here + more for here, more in zip(self._levels, moved.levels(), strict=True)]

    def _squeeze(self, trips: dict[int, Trip], p: int, fences: list[int], requests: list[int]) -> bool:
        """Take off the point `p` what waits there for the link, or came back before it had to; whether there was any."""
        moved = False
        for t, trip in trips.items():
            if max(trip.gap.leaves, self.graph.tensors[t].freed_at) < p <= trip.gone_at:
                earlier = bisect_left(fences, p) - 1
                trips[t] = replace(trip, gone_at=max(trip.gap.leaves, fences[earlier]))
                moved = True
            elif trip.back_at <= p < trip.gap.needed:
                later = bisect_right(requests, p)
                trips[t] = replace(trip, back_at=min(trip.gap.needed, requests[later]))
                moved = True
        return moved
