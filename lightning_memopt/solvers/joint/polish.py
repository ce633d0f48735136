"""Improve a plan with trips step by step: change the trip of one tensor, or of two if only few can be parked.

A change removes a trip, gives it another form, or moves its begin or its end. A change is kept if the plan fits the budget and
is faster by the simulator's clocks. If only few tensors can be parked, all changes are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from types import MappingProxyType

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, simulate
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.forms import tier_of
from lightning_memopt.plan.tiers import Limits, within
from lightning_memopt.solvers.joint.bound import Forms
from lightning_memopt.solvers.offload.trips import Trip, TripPlanner, send_away, trips_in_tiers

_FEW = 6
"""If there are at most this many points at which a trip can begin or end, all are tried; else the nearest, the first and the
last.
"""
_WORK = 300_000
"""Limit of the work, in points of timelines: a count, so that the result does not depend on how busy the machine is."""
_PAIRS = 6
"""If at most this many tensors can be parked, two of them are also changed at once."""


class _Polish:
    def __init__(
        self, graph: Graph, lives: tuple[Life, ...], trips: Iterable[Trip], forms: Forms, rates: TransferRates
    ) -> None:
        self.graph, self.lives, self.rates = graph, lives, rates
        self.planner = TripPlanner(graph, lives, rates)
        self.forms = {t: offered for t, offered in forms.items() if offered and t in self.planner.gaps}
        self.trips = {trip.gap.tensor: trip for trip in trips}
        self._fences = frozenset(self.planner.fences(()))
        self._asked = self.planner.unpacks(self.forms)

    def seconds(self, trips: Mapping[int, Trip]) -> float:
        return simulate(self.graph, send_away(self.lives, trips.values()), rates=self.rates).predicted.seconds

    def may(self, trips: Iterable[Trip]) -> bool:
        """Whether the engine can wait at the points at which these trips begin."""
        trips = list(trips)
        fences = self._fences.union(trip.gap.leaves for trip in trips)
        return all(trip.gone_at in fences for trip in trips)

    def ways(self, t: int) -> list[Trip | None]:
        """The trips that a tensor may make, the present one first. None means that it stays on the device."""
        gap, now = self.planner.gaps[t], self.trips.get(t)
        trips: list[Trip | None] = [now] if now is None else [now, None]
        freed_at = self.graph.tensors[t].freed_at
        for form, nbytes in self.forms[t]:
            if not tier_of(form):
                trips.append(Trip(gap, gap.leaves, gap.needed, form, nbytes))
                continue
            leaves = {gap.leaves, *self._fences, *(other.gap.leaves for other in self.trips.values())}
            gone = sorted(p for p in leaves if gap.leaves <= p < min(gap.needed, self.graph.backward_begins))
            for out in _near(gone, now.gone_at if now else gap.leaves):
                back = [p for p in self._asked if max(out, freed_at) < p <= gap.needed]
                trips += [Trip(gap, out, p, form, nbytes) for p in _near(back, now.back_at if now else gap.needed)]
        return [way for i, way in enumerate(trips) if i == 0 or way != now]


def _near(points: Sequence[int], now: int) -> Iterator[int]:
    """All points if they are few; else the first, the last, the present one and its neighbours."""
    if len(points) <= _FEW:
        yield from points
        return
    i = min(range(len(points)), key=lambda j: abs(points[j] - now))
    yield from (points[j] for j in sorted({0, len(points) - 1, max(0, i - 1), i, min(len(points) - 1, i + 1)}))


def polished(
    graph: Graph,
    lives: tuple[Life, ...],
    trips: Iterable[Trip],
    budget_nbytes: int,
    forms: Forms,
    rates: TransferRates,
    limit_seconds: float,
    clock: Callable[[], float],
    limits: Limits = MappingProxyType({}),
) -> list[Trip]:
    """The best trips within the budget and the limits of tiers that can be reached from `trips` by such changes. `lives` are
    those of the plan without trips.
    """
    began = clock()
    polish = _Polish(graph, lives, trips, forms, rates)
    best = polish.seconds(polish.trips)
    tensors = sorted(polish.forms, key=lambda t: (t not in polish.trips, -graph.tensors[t].nbytes))
    groups: list[tuple[int, ...]] = [(t,) for t in tensors]
    if len(tensors) <= _PAIRS:
        groups += combinations(tensors, 2)
    better, tries = True, _WORK // len(graph.points)
    while better:
        better = False
        for group in groups:
            for ways in product(*map(polish.ways, group)):
                tries -= 1
                if tries < 0 or clock() - began > limit_seconds:
                    return list(polish.trips.values())
                tried = dict(polish.trips)
                for t, way in zip(group, ways, strict=True):
                    tried.pop(t, None)
                    if way is not None:
                        tried[t] = way
                if (
                    tried != polish.trips
                    and polish.may(tried.values())
                    and within(trips_in_tiers(tried.values()), limits)
                    and max(polish.planner.levels(tried.values())) <= budget_nbytes
                ):
                    seconds = polish.seconds(tried)
                    if seconds < best * (1 - 1e-9):
                        polish.trips, best, better = tried, seconds, True
    return list(polish.trips.values())
