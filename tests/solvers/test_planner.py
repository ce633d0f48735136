"""What a frontier promises, whatever the clock said while the step was observed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from graphs import lstm_steps, random_steps, step, training_step

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import BEFORE, LATE_HOOK, Graph, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, Machine, Overhead, lower, simulate, validate
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.between import mixed, moments_between
from lightning_memopt.solvers.rollout import Rollout


def random_graph(seed: int) -> Graph:
    """Tensors of up to 4 MiB: a plan must save more than the margin that it leaves."""
    graph = training_step(random_steps(random.Random(seed), 25))
    return replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes << 16) for t in graph.tensors))


def timed_otherwise(graph: Graph, seed: int) -> Graph:
    """Every op takes between a hundredth of its time and a hundred times as long, some take none."""
    rng = random.Random(seed)
    factors = [rng.choice((0, 10 ** rng.uniform(-2, 2))) for _ in graph.ops]
    return replace(graph, ops=tuple(replace(op, seconds=k * op.seconds) for op, k in zip(graph.ops, factors, strict=True)))


def test_the_smallest_budget_does_not_depend_on_measured_times() -> None:
    for graph in [training_step(lstm_steps(30)), *map(random_graph, range(2))]:
        smallest = planner.solve(graph).smallest_nbytes
        for seed in range(2):
            frontier = planner.solve(timed_otherwise(graph, seed))
            assert frontier.smallest_nbytes == smallest
            assert frontier.plan(smallest).predicted_peak_nbytes <= smallest


def test_plans_for_few_bytes_are_the_same_whatever_was_measured() -> None:
    graph = random_graph(0)
    plans = dict(planner._smallest(graph))
    assert len(plans) > 3
    assert all(dict(planner._smallest(timed_otherwise(graph, seed))) == plans for seed in range(5))


def test_room_is_left_for_the_buffers_of_a_collective_that_are_freed_late_on_the_cpu() -> None:
    graph = training_step([step("a", reads=["x"], saves=["a"], nbytes=8), step("b", reads=["a"], nbytes=8)])
    hooked = replace(graph, ops=(*graph.ops[:-1], replace(graph.ops[-1], name=LATE_HOOK, workspace_nbytes=70)))
    assert {c.beside_nbytes for c in planner.solve(hooked).candidates} == {70}
    assert {c.beside_nbytes for c in planner.solve(replace(hooked, device="cuda")).candidates} == {0}
    assert {c.beside_nbytes for c in planner.solve(graph).candidates} == {0}


def test_fewest_flops() -> None:
    """The other objective: fewer FLOPs than the fastest plans take, and never below their lower bound of time."""
    flops = {"fastest": 0, "cheapest": 0}
    for graph in map(random_graph, range(3)):
        rng = random.Random(5)
        graph = replace(graph, ops=tuple(replace(op, flops=rng.choice((0, 10**6, 10**8))) for op in graph.ops))
        fastest, cheapest = planner.solve(graph), planner.solve(graph, objective="flops")
        most = int(fastest.unmodified_peak_nbytes * 0.9)
        least = int(fastest.smallest_nbytes * 1.05)  # at the smallest budget there is no choice
        plans = [(fastest.plan(b), cheapest.plan(b)) for b in range(least, most, (most >> 4) + 1)]
        flops["fastest"] += sum(f.predicted.extra_flops for f, _ in plans)
        flops["cheapest"] += sum(c.predicted.extra_flops for _, c in plans)
        for plan in (plan for pair in plans for plan in pair):
            assert plan.predicted_peak_nbytes <= plan.budget_nbytes
            assert plan.predicted.seconds >= plan.lower_bound_seconds
    assert flops["cheapest"] < 0.8 * flops["fastest"]


def test_plans_between_others_use_what_a_budget_leaves() -> None:
    """They are never slower."""
    seconds, between = {"dense": 0.0, "plain": 0.0}, {"dense": 0, "plain": 0}
    for graph in map(random_graph, range(6)):
        frontiers = {"dense": planner.solve(graph, dense=True), "plain": planner.solve(graph)}
        least, most = frontiers["plain"].smallest_nbytes, frontiers["plain"].unmodified_peak_nbytes
        for budget in range(least, most, (most - least) // 16 + 1):
            plans = {name: frontier.plan(budget) for name, frontier in frontiers.items()}
            assert plans["dense"].predicted.seconds <= plans["plain"].predicted.seconds
            for name, plan in plans.items():
                seconds[name] += plan.predicted.seconds
                between[name] += plan.solver == "mixed"
    assert seconds["dense"] < 0.97 * seconds["plain"]
    assert between["dense"] and not between["plain"]


def test_plans_between_two_plans_are_plans() -> None:
    """Valid, priced between the two, and where all tensors live as in one of them, that one."""
    made = 0
    for graph in map(random_graph, range(4)):
        candidates = planner.solve(graph).candidates
        small, large = candidates[0].lives, candidates[-1].lives
        assert simulate(graph, mixed(graph, small, large, BEFORE)).predicted == simulate(graph, large).predicted
        assert simulate(graph, mixed(graph, small, large, len(graph.points))).predicted == simulate(graph, small).predicted
        for moment in moments_between(graph, small, large, 5):
            for early, late in ((small, large), (large, small)):
                try:
                    lives = mixed(graph, early, late, moment)
                except LoweringError:  # the late half may start from what only its own early half holds
                    continue
                assert validate(graph, lives, lower(graph, lives)).ok
                made += lives not in (small, large)
    assert made > 8


def test_what_each_op_that_runs_again_takes_beside_its_seconds_is_searched_with() -> None:
    """Plans that are priced with it in the end only, as others are, take longer within the same budget."""
    each = 5.0  # an op takes about a second
    ops, seconds = {"told": 0, "untold": 0}, {"told": 0.0, "untold": 0.0}
    for graph in map(random_graph, range(2, 6)):
        of = lambda lives, graph=graph: each * simulate(graph, lives).predicted.rebuilt_ops  # noqa: E731
        least, most = planner.smallest_nbytes(graph), max(unmodified_levels(graph))
        for budget in range(least, most, (most - least) // 3 + 1):
            for name, rebuilt_op in (("told", each), ("untold", 0.0)):
                frontier = planner.solve(graph, budgets=[budget], machine=Machine(overhead=Overhead(of, rebuilt_op)))
                plan = frontier.plan(budget)
                assert plan.predicted_peak_nbytes <= budget
                assert plan.predicted.overhead_seconds == each * plan.predicted.rebuilt_ops
                assert plan.predicted.extra_seconds >= plan.lower_bound_seconds - 1e-9, "a bound for the ops' own seconds"
                ops[name] += plan.predicted.rebuilt_ops
                seconds[name] += plan.predicted.seconds
    assert seconds["told"] < 0.95 * seconds["untold"] and ops["told"] < 0.95 * ops["untold"]


def test_a_plan_that_needs_few_enough_bytes_ends_the_search_for_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal priced
        priced += 1
        return simulate(*args, **options)

    monkeypatch.setattr(planner, "simulate", counted)
    for graph in map(random_graph, range(2, 6)):
        priced = 0
        least, most = planner.smallest_nbytes(graph), max(unmodified_levels(graph))
        of_all, priced = priced, 0
        assert planner.smallest_nbytes(graph, enough_nbytes=most) == most
        assert priced == 1, "the unmodified step is enough"
        middle, priced = (least + most) // 2, 0
        assert least <= planner.smallest_nbytes(graph, enough_nbytes=middle) <= middle
        assert priced < of_all
        assert planner.smallest_nbytes(graph, enough_nbytes=least) == least
        assert planner.smallest_nbytes(graph, enough_nbytes=least - 1) == least


def test_faster_plans_are_searched_for_no_longer_than_that_may_take() -> None:
    """By a clock that moves with each look at it. The plans for few bytes are made whatever the search may take."""
    graph = random_graph(2)
    whole = planner.solve(graph)
    budget = (whole.smallest_nbytes + whole.unmodified_peak_nbytes) // 2
    made = []
    for seconds in (0.0, 20.0, 1e9):
        looks = map(float, itertools.count())
        clock = partial(next, looks)
        frontier = planner.solve(graph, budgets=[budget], limit_seconds=math.inf, search_seconds=seconds, clock=clock)
        made.append(clock())
        assert frontier.smallest_nbytes == whole.smallest_nbytes and not frontier.cut_off
        assert frontier.plan(budget).predicted_peak_nbytes <= budget
    at_once, short, long = made
    assert at_once + 20 <= short <= at_once + 24 and long > short + 20


def test_the_time_limit_holds_for_both_searches() -> None:
    looks = itertools.count()
    frontier = planner.solve(random_graph(2), limit_seconds=3, search_seconds=1e9, clock=lambda: float(next(looks)))
    assert frontier.cut_off and next(looks) <= 6 + len(frontier.candidates)


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_kept_though_time_is_up(seed: int) -> None:
    """The search for few bytes goes on until a plan keeps the budget: on a slow machine, too, it is kept where it can be."""
    graph = random_graph(seed)
    smallest = planner.solve(graph).smallest_nbytes
    looks = map(float, itertools.count())
    late = partial(planner.solve, graph, limit_seconds=0.0, clock=partial(next, looks))
    found = late(keep_nbytes=smallest)
    assert found.smallest_nbytes == smallest and found.plan(smallest).predicted_peak_nbytes <= smallest
    refused = late(keep_nbytes=smallest - 1)
    assert refused.smallest_nbytes == smallest and not refused.cut_off, "none of these fits, and no other was left out"


def test_the_smallest_plan_that_is_fast_enough() -> None:
    """No plan that takes at most these seconds is smaller. If only the unmodified step is fast enough, it is chosen."""
    chosen = set()
    for graph in map(random_graph, range(2, 6)):
        frontier = planner.solve(graph)
        assert frontier.smallest_plan() == frontier.plan(frontier.smallest_nbytes)
        slowest = frontier.smallest_plan().predicted.seconds
        for most in (slowest, 0.7 * slowest, 0.3 * slowest, 0.0):
            plan = frontier.smallest_plan(most)
            assert plan.predicted.seconds <= most
            fast = [c.least_budget_nbytes for c in frontier.candidates if c.predicted.seconds <= most]
            assert plan.budget_nbytes <= max(frontier.smallest_nbytes, min(fast))
            chosen.add(plan.lives)
        assert frontier.smallest_plan(0.0).predicted.rebuilt_ops == 0
    assert len(chosen) > 8


def test_past_its_time_only_few_plans_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its time, the search gives the exact price to some plans of the frontier: its ends, and some between."""
    graph = training_step(lstm_steps(30))
    monkeypatch.setattr(planner, "_PRICED", 4)
    priced = []

    def of(lives: tuple[Life, ...]) -> float:
        priced.append(lives)
        return 0.0

    whole = planner.solve(graph)
    assert len(whole.candidates) > 4
    looks = itertools.count()

    def clock() -> float:  # the time is over when plans are priced
        next(looks)
        return 1e9 if priced else 0.0

    frontier = planner.solve(graph, machine=Machine(overhead=Overhead(of)), clock=clock)
    assert len(priced) == 4 and len(frontier.candidates) == 4
    assert all(frontier.candidates[i].lives == whole.candidates[i].lives for i in (0, -1))


def test_a_budget_is_refused_with_one_that_works() -> None:
    dropped = 0
    for graph in map(random_graph, range(7)):
        frontier = planner.solve(graph)
        budget = frontier.candidates[0].predicted.peak_nbytes - 1
        with pytest.raises(InfeasibleError) as refused:
            frontier.plan(budget)
        assert refused.value.smallest_nbytes is not None and refused.value.budget_nbytes == budget
        dropped += frontier.plan(refused.value.smallest_nbytes).predicted.rebuilt_ops > 0
    assert dropped > 2


def test_the_planner_can_do_without_what_no_op_can_make_again() -> None:
    """Results of ops that cannot run again, overwritten in place: what was made from them is held, not made again."""
    for seed in (7, 14, 23, 37):
        graph = random_graph(seed)
        for candidate in planner.solve(graph).candidates:
            assert validate(graph, candidate.lives, lower(graph, candidate.lives)).ok


def test_rebuilding_a_skip_does_not_leave_the_way_down_in_memory() -> None:
    """The end of the way up reads the last map of the way down, and backward asks for it first, for the others last."""
    down = [step(f"d{i}", reads=[f"d{i - 1}" if i else "x"], nbytes=16, saves=[f"d{i}"]) for i in range(6)]
    middle = [step(f"m{i}", reads=[f"m{i - 1}" if i else "d5"], nbytes=4, saves=[f"m{i}"]) for i in range(20)]
    graph = training_step([*down, *middle, step("up", reads=["d5", "m19"], saves=["d5", "m19"])], inputs={"x": 1})
    requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
    held = {t.id for t in graph.tensors if t.name.startswith("m")}
    peaks, runs = [], []
    for horizon in (None, len(requests) // 3):
        roll = Rollout(graph)
        roll.serve(requests, set(held), horizon)
        assert validate(graph, roll.lives(), lower(graph, roll.lives())).ok
        predicted = simulate(graph, roll.lives()).predicted
        peaks.append(predicted.peak_nbytes)
        runs.append(predicted.rebuilt_ops)
    assert runs == [6, 12], "the way down is run again once more"
    assert peaks[1] < 0.75 * peaks[0]


def test_time_is_left_for_the_search_near_a_budget() -> None:
    """Chains end early. The plan is better than one of all chains without the search."""
    graph = random_graph(1)
    budget = (planner.smallest_nbytes(graph) + max(unmodified_levels(graph))) // 2
    without_search = planner.solve(graph).plan(budget).predicted.seconds

    def solve(limit: float) -> tuple[planner.Frontier, int, list[str]]:
        """By a clock that counts how often it is looked at: the frontier, the count, and what was said."""
        looks, said = itertools.count(), list[str]()
        clock = lambda: float(next(looks))  # noqa: E731
        return planner.solve(graph, budgets=[budget], clock=clock, limit_seconds=limit, say=said.append), next(looks), said

    _, all_looks, _ = solve(1e9)
    for share in (0.7, 0.9):
        frontier, looks, said = solve(share * all_looks)
        assert looks <= share * all_looks and not any("time limit" in line for line in said)
        assert frontier.plan(budget).predicted.seconds < 0.9 * without_search
