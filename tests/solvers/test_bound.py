"""The lower bound against every plan of small steps (`exhaustive`). The search's own tests: each of its plans is valid and
costs what the simulator says, and no other plan that anybody makes is better.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from build import Step, random_step
from exhaustive import cheapest, overwritten_late, random_small_step, then, user_holds
from windows import windowed

from benchmarks.robustness.fuzzing.plans import disjoint, random_lives
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, lower, simulate, validate
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.bound import being_read, moment, moments, near


def bound_seconds(graph: Graph, budget_nbytes: int) -> float:
    return max((m.bound_seconds(budget_nbytes) for m in moments(graph)), default=0.0)


@pytest.fixture(scope="module")
def cases() -> list[tuple[Graph, list[tuple[int, float, tuple[Life, ...]]]]]:
    found = []
    for seed in range(320):
        rng = random.Random(seed)
        graph = random_small_step(rng, rng.choice((3, 4, 4, 5)))
        if seed % 12 == 0:
            graph = then(graph, random_small_step(rng, 1))
        found.append((graph, cheapest(graph)))
    return found


@pytest.fixture(scope="module")
def windowed_cases() -> list[tuple[Graph, list[tuple[int, float, tuple[Life, ...]]]]]:
    """Steps whose ops read weights that come and go."""
    found = []
    for seed in range(160):
        rng = random.Random(seed)
        graph = windowed(random_small_step(rng, rng.choice((3, 4, 4, 5))), rng)
        found.append((graph, cheapest(graph)))
    return found


EITHER = pytest.mark.parametrize("kind", ["cases", "windowed_cases"])


@EITHER
def test_what_the_search_finds_is_valid_and_costs_what_it_says(kind: str, request: pytest.FixtureRequest) -> None:
    for graph, plans in request.getfixturevalue(kind):
        for peak, seconds, lives in plans:
            schedule = lower(graph, lives)
            predicted = simulate(graph, lives, schedule).predicted
            report = validate(graph, lives, schedule)
            assert report.ok and report.peak_nbytes == peak
            assert (predicted.peak_nbytes, predicted.extra_seconds) == (peak, seconds)
            assert at_peak(graph, lives).total == peak


def test_no_other_plan_is_better_than_what_the_search_finds(cases: list) -> None:
    tried = 0
    for seed, (graph, plans) in enumerate(cases):
        rng = random.Random(seed)
        others = [c.lives for c in planner.solve(graph).candidates] if seed % 10 == 0 else []
        for _ in range(3):
            with contextlib.suppress(ValueError):  # what was overwritten would have to be held
                others.append(random_lives(graph, rng))
        for lives in filter(disjoint, others):
            if validate(graph, lives, lower(graph, lives)).ok:
                tried += 1
                predicted = simulate(graph, lives).predicted
                assert any(p <= predicted.peak_nbytes and s <= predicted.extra_seconds for p, s, _ in plans)
    assert tried > 500


@EITHER
def test_no_plan_beats_the_bound(kind: str, request: pytest.FixtureRequest) -> None:
    """The optimum is a falling staircase and the bound falls with the budget, so every budget is tried at the stairs."""
    tight = stairs = 0
    for graph, plans in request.getfixturevalue(kind):
        for peak, seconds, _ in plans:
            bound = bound_seconds(graph, peak)
            assert bound <= seconds
            if seconds > 0:
                stairs += 1
                tight += bound > seconds - 1e-6
    assert stairs > (100 if kind == "cases" else 30)
    assert tight > 0.2 * stairs  # the rest is the gap of the convex hull, and later peaks


def test_no_plan_beats_the_bound_of_any_point(cases: list) -> None:
    for graph, plans in cases[::8]:
        for point in range(len(graph.points)):
            there = moment(graph, point, 24)
            for peak, seconds, _ in plans:
                assert there.bound_seconds(peak) <= seconds


@EITHER
def test_no_plan_beats_the_bounds_near_a_budget_and_they_prove_more(kind: str, request: pytest.FixtureRequest) -> None:
    usual = closer = 0.0
    for graph, plans in request.getfixturevalue(kind):
        for peak, seconds, _ in plans:
            bounds = [m.bound_seconds(peak) for m in near(graph, peak)]
            assert all(bound <= seconds for bound in bounds)
            usual += bound_seconds(graph, peak)
            closer += max(bound_seconds(graph, peak), *bounds, 0.0)
    assert closer > 1.02 * usual, (usual, closer)


def test_thorough_plans_of_sharded_steps_are_valid(windowed_cases: list) -> None:
    """Tensors of any size but small ones, so that the bytes left free for the unseen do not matter."""
    for graph, _ in windowed_cases[::8]:
        graph = replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes << 13) for t in graph.tensors))
        frontier = planner.solve(graph)
        for budget in range(frontier.smallest_nbytes, frontier.unmodified_peak_nbytes, 1 << 15):
            thorough = planner.solve(graph, budgets=(budget,), thorough=True)
            plan = thorough.plan(budget)
            assert validate(graph, plan.lives, lower(graph, plan.lives)).ok
            assert plan.lower_bound_seconds <= plan.predicted.seconds <= frontier.plan(budget).predicted.seconds


def test_what_is_read_at_the_peak_is_in_memory_there() -> None:
    """Backward of `out` reads all that is saved at once: whatever the budget, no plan lets go of it there."""
    graph = chain_of_two()
    point = max(s.unpacked_at[0] for s in graph.saves) + 1
    while graph.points[point].kind != "op":
        point += 1
    there = being_read(graph, point)
    lives = planner.keep_all(graph)
    assert there == {life.tensor for life in lives if life.born_at <= point <= life.freed_at}


def test_the_bound_is_below_every_plan_of_the_planner() -> None:
    for seed in range(40):
        frontier = planner.solve(user_holds(random_step(random.Random(seed)), random.Random(seed)))
        for candidate in frontier.candidates:
            assert frontier.bound_seconds(candidate.predicted.peak_nbytes) <= candidate.predicted.extra_seconds


def chain_of_two(*, held_until: int = 0) -> Graph:
    """Autograd saves `a` and `b`; user code holds `a` until a point."""
    step = Step()
    (a,) = step.op(step.given(8), makes=(100,), saves=("out",))
    step.op(a, makes=(10,), saves=("out",))
    graph = step.build()
    tensors = list(graph.tensors)
    tensors[a] = replace(tensors[a], freed_at=max(tensors[a].freed_at, held_until))
    return replace(graph, tensors=tuple(tensors))


def test_what_user_code_holds_needs_no_room() -> None:
    """Counted as natural, and once more as held by the plan, it would leave no room for a step that drops nothing."""
    graph = chain_of_two(held_until=4)
    first = moments(graph)[0]
    assert bound_seconds(graph, max(unmodified_levels(graph))) == 0
    assert first.bound_seconds(first.natural_nbytes + 10) == 0 < first.bound_seconds(first.natural_nbytes + 9)


def test_what_is_overwritten_after_backward_may_be_held() -> None:
    graph = overwritten_late(chain_of_two(), 1)
    assert bound_seconds(graph, max(unmodified_levels(graph))) == 0


def test_what_is_made_after_the_first_request_needs_no_room_at_it() -> None:
    graph = then(chain_of_two(), chain_of_two())
    assert bound_seconds(graph, max(unmodified_levels(graph))) == 0


def test_a_copy_of_what_was_overwritten_may_be_held_once_it_was_made() -> None:
    """`y` is held until the first request, at which `a` is made from it; then `a` alone is held, for `c`."""
    step = Step()
    (y,) = step.op(step.given(8), makes=(100,), seconds=8.0)
    (a,) = step.op(y, makes=(1,))
    (c,) = step.op(a, makes=(50,))
    step.op(a, makes=(), mutates=(a,))
    step.op(c, saves=(c,))
    (d,) = step.op(makes=(1,), saves=("out",))
    graph = step.build(gradient=0)
    first, second = (s.unpacked_at[0] for s in reversed(graph.saves))
    until = {y: (0, first, "original"), a: (first, second, "rebuild"), c: (second, graph.saves[0].released_at, "rebuild")}
    lives = [Life(tensor=t, born_at=b, freed_at=f, how=how) for t, (b, f, how) in until.items()]  # type: ignore[arg-type]
    lives.append(Life(tensor=d, born_at=5, freed_at=graph.saves[1].released_at, how="original"))
    assert validate(graph, lives, lower(graph, lives)).ok
    assert simulate(graph, lives).predicted.extra_seconds == 2
    between = moment(graph, first + 1, 24)
    assert between.bound_seconds(between.natural_nbytes + 2) <= 2


def test_what_autograd_saved_and_user_code_overwrote_is_read_as_it_is() -> None:
    """Through `.data`: no plan makes the old bytes again."""
    step = Step()
    (a,) = step.op(step.given(8), makes=(100,), saves=("out",))
    step.op(a, makes=(), mutates=(a,))
    graph = step.build()
    assert bound_seconds(graph, max(unmodified_levels(graph))) == 0


def test_a_budget_that_holds_nothing_costs_every_op_that_backward_needs() -> None:
    graph = chain_of_two()
    first = moments(graph)[0]
    assert first.bound_seconds(first.natural_nbytes) == pytest.approx(2.0)
