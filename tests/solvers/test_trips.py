"""What goes away and comes back: lives, schedule, simulator and validator agree; trips fit budgets, waiting where they must."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from build import Step, random_step
from graphs import names, step, training_step
from test_plan import disjoint, random_lives

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, lower, simulate, validate
from lightning_memopt.plan.allocator.reserved import reserved
from lightning_memopt.solvers.offload.trips import Trip, TripPlanner, gaps, send_away
from lightning_memopt.solvers.rollout import Rollout, keep_all


@dataclass(frozen=True)
class Link:
    """Bytes a second of every tier, both ways; codecs take a tenth of that."""

    rate: float = 100.0

    def out_seconds(self, tier: str, nbytes: int) -> float:
        return nbytes / self.rate

    in_seconds = out_seconds

    def encode_seconds(self, codec: str, nbytes: int) -> float:
        return nbytes / self.rate / 10

    decode_seconds = encode_seconds


def sizes(form: str, nbytes: int) -> int:
    return -(-nbytes // 4) if form not in ("disk", "host") else nbytes


def random_trips(graph: Graph, lives: tuple[Life, ...], rng: random.Random) -> list[Trip]:
    """Some of what may go away does, for a random part of its gap; inexact forms only of what no rebuild reads."""
    exact = ("disk", "host", "bools", "bools@host")
    read = {t for op in lower(graph, lives).rebuilt for t in graph.ops[op].inputs}
    trips = []
    for t, gap in gaps(graph, lives).items():
        asked = (s for s in graph.saves if s.tensor in graph.producers)
        requests = [p for s in asked for p in s.unpacked_at if gap.leaves < p <= gap.needed]
        if rng.random() < 0.6:
            form = rng.choice(exact if t in read else (*exact, "block8", "block8@disk"))
            back = rng.choice(sorted({*requests, gap.needed}))
            gone = rng.randint(gap.leaves, min(back - 1, graph.backward_begins - 1)) if back > gap.leaves else gap.leaves
            trips.append(Trip(gap, gone, back, form, sizes(form, graph.tensors[t].nbytes)))
    return trips


def test_both_counts_agree_on_random_trips() -> None:
    """The validator carries the schedule out without a problem and counts the bytes that simulator, planner and the requests
    to the allocator count.
    """
    away = counted = 0
    for seed in range(300):
        rng = random.Random(seed)
        graph = random_step(rng)
        base = random_lives(graph, rng) if seed % 3 else keep_all(graph)
        if not disjoint(base):
            continue
        trips = random_trips(graph, base, rng)
        lives = send_away(base, trips)
        schedule = lower(graph, lives)
        report = validate(graph, lives, schedule)
        assert report.ok, (seed, report.problems[:3])
        line = simulate(graph, lives, schedule)
        assert report.peak_nbytes == line.predicted.peak_nbytes, seed
        assert reserved(graph, lives, schedule=schedule).requested_nbytes == line.predicted.peak_nbytes, seed
        if all(max(t.gone_at, graph.tensors[t.gap.tensor].freed_at) < t.back_at for t in trips):
            assert TripPlanner(graph, base, Link()).levels(trips) == list(line.nbytes), seed
            counted += 1
        away += len(schedule.parked)
    assert away > 200 and counted > 150


def chain(n: int = 12, nbytes: int = 100) -> Graph:
    """Ops of one second each, two in backward, that save what they read."""
    names = [f"x{i}" for i in range(n)]
    steps = [step(names[0], reads=["in"], nbytes=nbytes, recomputable=False)]
    steps += [step(b, reads=[a], saves=[a], nbytes=nbytes, recomputable=False) for a, b in pairwise(names)]
    graph = training_step(steps, inputs={"in": nbytes}, gradients=False)
    return replace(graph, ops=tuple(op if op.phase == "forward" else replace(op, seconds=2.0) for op in graph.ops))


def asked_twice() -> Graph:
    """Each save is asked for again after all of them, right after a backward op that takes two seconds."""
    hand = Step()
    t = hand.given(100)
    for _ in range(6):
        (t,) = hand.op(t, makes=(100,), saves=("out",), recomputable=False)
    graph = hand.build(twice=True)
    return replace(graph, ops=tuple(op if op.phase == "forward" else replace(op, seconds=2.0) for op in graph.ops))


@pytest.mark.parametrize("rate", [15.0, 40.0, 99.0, 100.0, 101.0, 1000.0])
@pytest.mark.parametrize("spread", [True, False])
def test_one_trip_leaves_as_its_copy_ends_and_comes_back_in_time(rate: float, spread: bool) -> None:
    """By definition: the first fence at which the copy out has ended, and the last unpack from which the copy back ends before
    the tensor is needed; the first one where none is that early.
    """
    graph, link = chain() if spread else asked_twice(), Link(rate)
    planner = TripPlanner(graph, keep_all(graph), link)
    forms = {t: ("disk", graph.tensors[t].nbytes) for t in planner.gaps}
    fences, unpacks = planner.fences(forms), planner.unpacks(forms)
    ends = [sum(op.seconds for op in graph.ops if op.at <= p) for p in range(len(graph.points))]
    seen = set()
    for t, gap in planner.gaps.items():
        planner.fences = lambda _: fences  # type: ignore[assignment,method-assign]
        planner.unpacks = lambda _: unpacks  # type: ignore[assignment,method-assign]
        (trip,) = planner.plan({t: forms[t]})
        takes = graph.tensors[t].nbytes / rate
        gone = [p for p in fences if p >= gap.leaves and ends[p] >= ends[gap.leaves] + takes]
        assert trip.gone_at == (gone or fences[-1:])[0]
        after = [p for p in unpacks if max(trip.gone_at, graph.tensors[t].freed_at) < p <= gap.needed]
        back = [p for p in after if ends[p - 1] + takes <= ends[gap.needed - 1]]
        assert trip.back_at == (back[-1] if back else (after or [gap.needed])[0])
        seen.add((trip.gone_at - gap.leaves, gap.needed - trip.back_at))
    assert len(seen) > 1 or rate == 1000.0


def test_a_fast_link_hides_everything() -> None:
    """Bytes go as copies end and come back just in time: half of the bytes, and no waiting."""
    graph, link = chain(), Link(1000.0)
    base = keep_all(graph)
    planner = TripPlanner(graph, base, link)
    forms = {t: ("disk", graph.tensors[t].nbytes) for t in planner.gaps}
    lives = send_away(base, planner.plan(forms))
    found, before = simulate(graph, lives, rates=link).predicted, simulate(graph, base).predicted
    assert found.peak_nbytes < 0.6 * before.peak_nbytes
    assert found.stall_seconds < 0.35 and found.overlap > 0.85  # the last one leaves and comes back at once
    assert found.moved_nbytes == 2 * sum(nbytes for _, nbytes in forms.values())


def test_a_slow_link_is_waited_for() -> None:
    """The budget holds all the same; what the link has no time for is predicted as waiting."""
    graph, link = chain(), Link(50.0)
    base = keep_all(graph)
    planner = TripPlanner(graph, base, link)
    forms = {t: ("disk", graph.tensors[t].nbytes) for t in planner.gaps}
    least = simulate(graph, send_away(base, planner.plan(forms))).predicted.peak_nbytes
    trips = planner.within(forms, least - 200)
    assert trips is not None
    lives = send_away(base, trips)
    found = simulate(graph, lives, rates=link).predicted
    assert found.peak_nbytes <= least - 200 and found.stall_seconds > 1
    assert validate(graph, lives, lower(graph, lives)).ok
    assert planner.within(forms, 10) is None


@pytest.mark.parametrize("form", ["disk", "block8"])
def test_what_a_codec_changes_is_no_start(form: str) -> None:
    """A rebuild that would start from what a lossy codec gave back is refused."""
    graph = training_step(
        [
            step("a", reads=["in"], saves=["a"], nbytes=64, recomputable=False),
            step("b", reads=["a"], saves=["b"], nbytes=64),
            step("c", reads=["b"], nbytes=64, recomputable=False),
        ],
        inputs={"in": 8},
    )
    a = names(graph)["a"]
    roll = Rollout(graph)
    roll.serve(sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at), {a})
    base = roll.lives()
    gap = gaps(graph, base)[a]
    lives = send_away(base, [Trip(gap, gap.leaves, gap.needed, form, 16)])
    if form == "disk":
        assert validate(graph, lives, lower(graph, lives)).ok and lower(graph, lives).rebuilt
    else:
        with pytest.raises(LoweringError):
            lower(graph, lives)


@pytest.mark.parametrize("damage", ["form", "how"])
def test_what_never_went_away_is_not_fetched(damage: str) -> None:
    """A fetched life needs one before it, and one form for all."""
    graph, link = chain(), Link()
    base = keep_all(graph)
    planner = TripPlanner(graph, base, link)
    forms = {t: ("disk", 100) for t in planner.gaps}
    lives = send_away(base, planner.plan(forms))
    schedule = lower(graph, lives)
    first = next(i for i, life in enumerate(lives) if life.how == "fetch")
    if damage == "form":
        broken = [replace(life, form="host") if i == first else life for i, life in enumerate(lives)]
    else:
        broken = [life for i, life in enumerate(lives) if i != first - 1]
    assert not validate(graph, broken, schedule).ok
