"""A plan with trips, made better step by step: one tensor, or two where there are few, goes otherwise.

Otherwise is: not at all, in another form, earlier or later, back earlier or later. What fits the budget and is faster by the
simulator's clocks is kept. Where few tensors may go away, these are all the ways there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, simulate
from lightning_memopt.plan.clocks import Rates
from lightning_memopt.plan.forms import tier_of
from lightning_memopt.solvers.joint.bound import Forms
from lightning_memopt.solvers.offload.trips import Planner, Trip, send_away

_FEW = 6
"""Where no more places than these to leave or to come back, all of them are tried; else the nearest, the first and the last."""
_WORK = 300_000
"""So many points of timelines are looked at; a count, so that the result does not depend on how busy the machine is."""
_PAIRS = 6
"""Where no more tensors than these may go away, two of them change at once."""


class _Polish:
    def __init__(self, graph: Graph, lives: tuple[Life, ...], trips: Iterable[Trip], forms: Forms, rates: Rates) -> None:
        self.graph, self.lives, self.rates = graph, lives, rates
        self.planner = Planner(graph, lives, rates)
        self.forms = {t: found for t, found in forms.items() if found and t in self.planner.gaps}
        self.trips = {trip.gap.tensor: trip for trip in trips}
        self._fences = frozenset(self.planner.fences(()))
        self._asked = self.planner.requests(self.forms)

    def seconds(self, trips: Mapping[int, Trip]) -> float:
        return simulate(self.graph, send_away(self.lives, trips.values()), rates=self.rates).predicted.seconds

    def may(self, trips: Iterable[Trip]) -> bool:
        """Whether the engine can wait where these trips say."""
        trips = list(trips)
        places = self._fences.union(trip.gap.leaves for trip in trips)
        return all(trip.gone_at in places for trip in trips)

    def ways(self, t: int) -> list[Trip | None]:
        """How a tensor may go: as it does comes first."""
        gap, now = self.planner.gaps[t], self.trips.get(t)
        found: list[Trip | None] = [now] if now is None else [now, None]
        freed_at = self.graph.tensors[t].freed_at
        for form, nbytes in self.forms[t]:
            if not tier_of(form):
                found.append(Trip(gap, gap.leaves, gap.needed, form, nbytes))
                continue
            leaves = {gap.leaves, *self._fences, *(other.gap.leaves for other in self.trips.values())}
            gone = sorted(p for p in leaves if gap.leaves <= p < min(gap.needed, self.graph.backward_begins))
            for out in _near(gone, now.gone_at if now else gap.leaves):
                back = [p for p in self._asked if max(out, freed_at) < p <= gap.needed]
                found += [Trip(gap, out, p, form, nbytes) for p in _near(back, now.back_at if now else gap.needed)]
        return [way for i, way in enumerate(found) if i == 0 or way != now]


def _near(points: Sequence[int], now: int) -> Iterator[int]:
    """All of them where they are few; else the ends, and those beside the present one."""
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
    rates: Rates,
    limit_seconds: float,
    clock: Callable[[], float],
) -> list[Trip]:
    """The best trips of the plan `lives` that were found from these, which fit the budget."""
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
                    and max(polish.planner.levels(tried.values())) <= budget_nbytes
                ):
                    seconds = polish.seconds(tried)
                    if seconds < best * (1 - 1e-9):
                        polish.trips, best, better = tried, seconds, True
    return list(polish.trips.values())
