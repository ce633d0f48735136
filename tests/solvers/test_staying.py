"""What stays of what rests beside a plan, and the fewest bytes that a step moves, against all choices of what to park."""

from __future__ import annotations

import pytest
from resting import Resting, moved_nbytes, resting

from benchmarks.offload.fixed import least_moved_nbytes
from lightning_memopt.graph import fingerprint
from lightning_memopt.plan import Machine, Plan, fixed_levels, simulate
from lightning_memopt.plan.resting import Parked, Rests
from lightning_memopt.plan.states import StateOf
from lightning_memopt.plan.weights import UnitOf
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.solvers.staying import least_parked, staying

SEEDS = range(40)


def plan_of(case: Resting) -> Plan:
    """A plan that rebuilds nothing, with all parked that rests."""
    step = case.in_step(case.rests)
    lives = keep_all(step)
    predicted = simulate(step, lives).predicted
    peak = predicted.peak_nbytes
    return Plan(
        fingerprint=fingerprint(step),
        lives=lives,
        solver="by hand",
        budget_nbytes=peak,
        predicted=predicted,
        unmodified_peak_nbytes=peak,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_keeps_the_budget_with_what_stays(seed: int) -> None:
    """For every budget from all parked to nothing parked. Where there is room for everything, everything stays."""
    case = resting(seed)
    plan = plan_of(case)
    step = case.in_step(case.rests)
    everything = sum(each.parking.nbytes for each in case.rests)
    saved = []
    for budget in range(plan.budget_nbytes, plan.budget_nbytes + everything + 1):
        stays = staying(step, plan, case.rests, case.chunks, budget)
        away = [each for each in case.rests if each not in stays]
        assert simulate(case.in_step(away), plan.lives).predicted.peak_nbytes <= budget
        saved.append(sum(each.parking.seconds for each in stays))
    assert len(stays) == len(case.rests) and saved[0] < saved[-1]


def test_what_stays_saves_nearly_as_much_as_the_best_choice() -> None:
    """Of all budgets of all steps, in seconds of copies: the greedy choice takes few more than the best one that is allowed."""
    ours = best = 0.0
    for seed in SEEDS:
        case = resting(seed)
        plan, step = plan_of(case), case.in_step(case.rests)
        everything = sum(each.parking.nbytes for each in case.rests)
        choices = [(simulate(case.in_step(each), plan.lives).predicted.peak_nbytes, each) for each in case.choices()]
        for budget in range(plan.budget_nbytes, plan.budget_nbytes + everything, 9):
            stays = staying(step, plan, case.rests, case.chunks, budget)
            ours += sum(each.parking.seconds for each in case.rests if each not in stays)
            best += min(sum(each.parking.seconds for each in away) for peak, away in choices if peak <= budget)
    assert best < ours < 1.05 * best


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_moves_fewer_bytes_than_the_bound(seed: int) -> None:
    """At any budget, whatever is rebuilt: what no plan changes is counted alone."""
    case = resting(seed)
    needed = {each: max(fixed_levels(case.in_step(each))) for each in case.choices()}
    moved = {each: sum(map(moved_nbytes, each)) for each in needed}
    tight = 0
    for budget in range(min(needed.values()), max(needed.values()) + 1):
        least = min(moved[each] for each in needed if needed[each] <= budget)
        bound = least_moved_nbytes(case.graph, case.once_nbytes, budget)
        assert bound <= least
        tight += bound > 0
    assert tight and least_moved_nbytes(case.graph, case.once_nbytes, max(needed.values())) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_choice_that_needs_more_than_its_estimate_is_not_made_twice(seed: int) -> None:
    """Whatever a plan needs beside, a choice within the budget is found where one exists, or everything is parked."""
    case = resting(seed)
    step = case.in_step(case.rests)
    frontier = planner.of_one(step, ("by hand", keep_all(step)), Machine())
    states = tuple(each for each in case.rests if isinstance(each, StateOf))
    rests = Rests(states, tuple(each for each in case.rests if isinstance(each, UnitOf)))
    found = 0
    for beside in (1, 20, 60):
        asked = list[Rests]()

        def needed_nbytes(some: Rests, plan: Plan, beside: int = beside, asked: list[Rests] = asked) -> int:
            assert some not in asked
            asked.append(some)
            return needed_nbytes_of(case, some, plan) + beside

        for budget in range(frontier.smallest_nbytes, frontier.smallest_nbytes + 400, 7):
            asked.clear()
            least = least_parked(frontier, Parked(case.graph, rests, case.chunks), budget, needed_nbytes)
            found += least is not None
            assert least is None or needed_nbytes_of(case, *least) + beside <= budget
    assert found


def needed_nbytes_of(case: Resting, some: Rests, plan: Plan) -> int:
    return simulate(case.in_step(some.by_price()), plan.lives).predicted.peak_nbytes
