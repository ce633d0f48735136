"""The order in which copies of parked tensors run, beside every other order.

A copy out is queued where autograd packs its tensor, a copy back where the fetched life begins, and those that begin at one
point in the order of their first readers. So the plan decides the order. Where the copies of a direction are waited for in the
order in which they begin, the first copies together cannot end earlier in any other order, and so no wait can end earlier.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import pytest
from build import random_step
from test_plan import disjoint, random_lives
from test_trips import Link, random_trips

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Fetch, Life, Rebuild, lower
from lightning_memopt.plan.clocks import leaves_at, transfers
from lightning_memopt.plan.forms import TIERS
from lightning_memopt.solvers.offload.trips import Trip, TripPlanner, send_away
from lightning_memopt.solvers.rollout import keep_all

_MOST = 4
"""Copies in each direction: all pairs of orders are tried."""
Event = tuple[str, int | float]
"""("run", seconds), or a tensor: its copy "out" may begin, it must be "gone", its copy "back" may begin, it is "read"."""


def events(graph: Graph, lives: Sequence[Life]) -> Iterator[Event]:
    """What a planned step does about copies, in its order, with the time between."""
    schedule = lower(graph, lives)
    last = {life.tensor: life.born_at for life in lives if life.how == "fetch"}
    coming: set[int] = set()

    def read(tensors: Sequence[int]) -> Iterator[Event]:
        for t in coming.intersection(tensors):
            coming.remove(t)
            yield "read", t

    for p in range(-1, len(graph.points)):
        for step in schedule.segments.get(p, ()):
            if isinstance(step, Fetch):
                coming.add(step.tensor)
                yield "back", step.tensor
            elif isinstance(step, Rebuild):
                yield from read(graph.ops[step.op].inputs)
                yield "run", graph.ops[step.op].seconds
        if p >= 0 and graph.points[p].kind == "unpack":
            yield from read((graph.saves[graph.points[p].id].tensor,))
        elif p >= 0 and graph.points[p].kind == "op":
            yield "run", graph.ops[graph.points[p].id].seconds
        yield from (("out", t) for t in schedule.parked if leaves_at(graph, t) == p)
        yield from (("gone", t) for t in schedule.frees.get(p, ()) if t in schedule.parked and p < last[t])


def waited(happens: Sequence[Event], seconds: Mapping[int, float], out: Sequence[int], back: Sequence[int]) -> float:
    """Seconds that the step waits if each direction carries its copies in this order; infinite if it waits for ever."""
    now = waiting = 0.0
    begins: dict[tuple[str, int], float] = {}

    def ends(way: str, tensor: int) -> float:
        free = 0.0
        order = out if way == "out" else back
        for t in order[: order.index(tensor) + 1]:
            here = ends("out", t) if way == "back" else 0.0  # what comes back has been copied out
            free = max(free, here, begins.get((way, t), math.inf)) + seconds[t]
        return free

    for what, value in happens:
        if what == "run":
            now += value
        elif what in ("out", "back"):
            begins[what, int(value)] = now
        else:
            end = max(now, ends("out" if what == "gone" else "back", int(value)))
            waiting += end - now
            now = end
    return waiting


def is_in_order(happens: Sequence[Event], way: str) -> bool:
    """Whether the copies of a direction begin in the order in which they are waited for."""
    waits = ("gone", "back") if way == "out" else ("read",)
    wanted = dict.fromkeys(t for what, t in happens if what in waits)
    return list(wanted) == [t for what, t in happens if what == way]


def trips_of(graph: Graph, base: tuple[Life, ...], link: Link, rng: random.Random, kind: str) -> list[Trip] | None:
    """Trips as solvers plan them: without a budget, within one, or anyhow."""
    if kind == "random":
        return [trip for trip in random_trips(graph, base, rng) if trip.form in TIERS]
    planner = TripPlanner(graph, base, link)
    forms = {t: ("host", graph.tensors[t].nbytes) for t in planner.gaps if rng.random() < 0.8}
    trips = planner.plan(forms)
    if kind == "planned":
        return trips
    return planner.within(forms, int(max(planner.levels(trips)) * rng.uniform(0.6, 0.95)))


@pytest.mark.parametrize(("kind", "at_least"), [("planned", 150), ("within", 10), ("random", 25)])
def test_no_order_of_copies_waits_less(kind: str, at_least: int) -> None:
    """All pairs of orders are tried. Trips without a budget are nearly always in order."""
    compared = 0
    for seed in range(450):
        rng = random.Random(seed)
        graph = random_step(rng)
        base = random_lives(graph, rng) if seed % 3 else keep_all(graph)
        link = Link(rng.choice((0.2, 0.5, 1.0, 3.0, 10.0)))
        trips = trips_of(graph, base, link, rng, kind) if disjoint(base) else None
        if trips is None or not 2 <= len(trips) <= _MOST:
            continue
        lives = send_away(base, trips)
        happens = list(events(graph, lives))
        seconds = {trip.gap.tensor: link.out_seconds(trip.form, trip.parked_nbytes) for trip in trips}
        out = [int(t) for what, t in happens if what == "out"]
        back = [int(t) for what, t in happens if what == "back"]
        today = waited(happens, seconds, out, back)
        assert today == pytest.approx(transfers(graph, lives, lower(graph, lives), link).stall_seconds), seed
        if is_in_order(happens, "out") and is_in_order(happens, "back"):
            best = min(waited(happens, seconds, o, b) for o in permutations(out) for b in permutations(back))
            assert best == pytest.approx(today), seed
            compared += 1
    assert compared >= at_least
