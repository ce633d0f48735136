"""The cut against all choices: every set of held tensors is tried."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from build import Step, random_step

from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild


def problems() -> Iterator[tuple[HoldOrRebuild, random.Random]]:
    """150 problems of 1 to 9 tensors, some with free tensors, ops that cannot run again, and in-place ops."""
    found = seed = 0
    while found < 150:
        rng = random.Random(seed)
        seed += 1
        graph = random_step(rng, 8, mutation=seed % 2 == 0)
        makes = [t for op in graph.forward for t in op.outputs]
        free = frozenset(t for t in makes if rng.random() < 0.1)
        problem = HoldOrRebuild(graph, [save.tensor for save in graph.saves], free)
        if 1 <= len(problem.tensors) <= 9:
            found += 1
            yield problem, rng


def seconds_when(problem: HoldOrRebuild, held: frozenset[int]) -> float | None:
    """Seconds of the ops that run again when `held` are held; None if something can then not be made."""
    graph = problem.graph
    missing = [t for t in problem.needed if t not in held]
    ops: set[int] = set()
    while missing:
        tensor = missing.pop()
        op = graph.producers[tensor]
        if not op.recomputable or tensor in op.unrebuilt:
            return None
        if op.id not in ops:
            ops.add(op.id)
            missing += [t for t in op.inputs if t in graph.producers and t not in problem.free and t not in held]
    return sum(graph.ops[o].seconds for o in ops)


def choices(problem: HoldOrRebuild) -> list[tuple[int, float]]:
    """(bytes, seconds) of every choice."""
    holdable = [t for t in problem.tensors if t not in problem.graph.overwritten]
    found = []
    for n in range(len(holdable) + 1):
        for held in combinations(holdable, n):
            seconds = seconds_when(problem, frozenset(held))
            if seconds is not None:
                found.append((sum(problem.graph.tensors[t].nbytes for t in held), seconds))
    return found


@pytest.fixture(scope="module")
def cases() -> list[tuple[HoldOrRebuild, random.Random, list[tuple[int, float]]]]:
    return [(problem, rng, choices(problem)) for problem, rng in problems()]


def test_the_cut_is_the_best_of_all_choices(cases: list) -> None:
    for problem, rng, all_choices in cases:
        for price in [0.0, *(10 ** rng.uniform(-4, 2) for _ in range(4))]:
            choice = problem.minimum_cut(price)
            assert choice.seconds == seconds_when(problem, choice.held)
            assert choice.nbytes == sum(problem.graph.tensors[t].nbytes for t in choice.held)
            best = min(price * nbytes + seconds for nbytes, seconds in all_choices)
            assert price * choice.nbytes + choice.seconds == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_hull_is_convex_and_reaches_both_ends(cases: list) -> None:
    for problem, _, all_choices in cases:
        hull = problem.hull(points=100).vertices
        assert [c.seconds for c in hull] == sorted(c.seconds for c in hull)
        slopes = [
            (right.seconds - left.seconds) / (left.nbytes - right.nbytes)
            for left, right in pairwise(hull)
            if left.nbytes != right.nbytes
        ]
        assert all(b >= a - 1e-9 for a, b in pairwise(slopes))
        least = min(seconds for _, seconds in all_choices)
        assert hull[0].seconds == least
        assert hull[-1].nbytes == min(nbytes for nbytes, _ in all_choices)


def test_the_bound_is_below_every_choice_that_fits(cases: list) -> None:
    tight = 0
    for problem, _, all_choices in cases:
        hull = problem.hull(points=100)
        for budget in sorted({nbytes for nbytes, _ in all_choices})[::7]:
            best = min(seconds for nbytes, seconds in all_choices if nbytes <= budget)
            bound = hull.bound_seconds(budget)
            assert bound <= best
            tight += bound > 0.5 * best > 0
    assert tight > 50


def test_nanoseconds_and_terabytes(cases: list) -> None:
    """The bounds of fast ops on large tensors are those of the same problem in seconds and bytes."""
    tight = 0
    for problem, _, all_choices in cases:
        graph = problem.graph
        ops = tuple(replace(op, seconds=op.seconds * 1e-9) for op in graph.ops)
        tensors = tuple(replace(t, nbytes=t.nbytes << 40) for t in graph.tensors)
        large = HoldOrRebuild(replace(graph, ops=ops, tensors=tensors), problem.needed, problem.free)
        hull, same = large.hull(points=100), problem.hull(points=100)
        assert hull.vertices[0].seconds == pytest.approx(same.vertices[0].seconds * 1e-9, abs=1e-24)
        assert hull.vertices[-1].nbytes == same.vertices[-1].nbytes << 40
        for budget in sorted({nbytes for nbytes, _ in all_choices})[::7]:
            best = min(seconds for nbytes, seconds in all_choices if nbytes <= budget) * 1e-9
            bound = hull.bound_seconds(budget << 40)
            assert bound <= best * (1 + 1e-12)
            assert bound == pytest.approx(same.bound_seconds(budget) * 1e-9, rel=1e-3, abs=1e-3 * large.total_seconds)
            tight += bound > 0.5 * best > 0
    assert tight > 50


def test_rounding_never_raises_the_bound() -> None:
    """Seconds and bytes over many orders of magnitude, rounded to integers for the cut; no choice may lie below the bound."""
    for seed in range(8):
        rng = random.Random(seed)
        step = Step()
        made = [step.given()]
        for _ in range(200):
            nbytes, seconds = int(10 ** rng.uniform(0, 12)), 10 ** rng.uniform(-9, 1)
            made += step.op(*rng.sample(made, min(len(made), 2)), makes=(nbytes,), seconds=seconds)
        step.op(*made, saves=rng.sample(made, 100))
        graph = step.build()
        problem = HoldOrRebuild(graph, [save.tensor for save in graph.saves])
        hull = problem.hull(points=40)
        for choice in hull.cuts:
            assert hull.bound_seconds(choice.nbytes) <= choice.seconds
            total = choice.price * problem.total_nbytes + problem.total_seconds
            assert choice.value_seconds == pytest.approx(choice.price * choice.nbytes + choice.seconds, abs=1e-9 * total)


def test_shared_work_is_counted_once() -> None:
    """Two cheap tensors are made from one dear one: hold the dear one, not the two."""
    step = Step()
    (dear,) = step.op(step.given(), makes=(10,), seconds=100.0)
    (left,) = step.op(dear, makes=(10,), seconds=1.0)
    (right,) = step.op(dear, makes=(10,), seconds=1.0)
    step.op(left, right, saves=(left, right))
    problem = HoldOrRebuild(step.build(), [left, right])
    assert problem.minimum_cut(0.5).held == {dear}
    assert problem.minimum_cut(0.05).held == {left, right}
    assert problem.minimum_cut(50.0).held == set()


def test_what_cannot_be_made_again_is_held_at_any_price() -> None:
    step = Step()
    (noise,) = step.op(step.given(), makes=(10,), recomputable=False)
    (a,) = step.op(noise, makes=(1000,))
    step.op(a, saves=(a,))
    problem = HoldOrRebuild(step.build(), [a])
    assert problem.minimum_cut(1e6).held == {noise}


def test_what_was_overwritten_is_made_again() -> None:
    step = Step()
    (a,) = step.op(step.given(), makes=(10,), seconds=5.0)
    (b,) = step.op(a, makes=(7,), seconds=1.0)
    step.op(a, makes=(), mutates=(a,))
    step.op(b, saves=(b,))
    problem = HoldOrRebuild(step.build(), [b])
    choice = problem.minimum_cut(1e6)
    assert choice.held == set() and choice.seconds == 6.0
