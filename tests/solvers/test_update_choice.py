"""Lives and early updates in one solve: never slower than with all updates early, and the bound against all choices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from exhaustive import cheapest, random_small_step
from updates import choices, with_updates

from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Machine, early, lower, simulate, step_of, updated, validate
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import keep_all

UNIT = 1 << 14
"""Sizes are multiples of it, so that the bytes that a budget leaves free for what is unseen are few."""


def step(seed: int) -> Graph:
    """A small step whose early updates take as much beside their gradients as these have."""
    rng = random.Random(seed)
    graph = with_updates(random_small_step(rng), rng, count=3, beside=1)
    updates = [replace(u, nbytes=u.nbytes * UNIT, beside_nbytes=u.beside_nbytes * UNIT) for u in graph.updates]
    ops = (replace(op, workspace_nbytes=op.workspace_nbytes * UNIT, state_nbytes=op.state_nbytes * UNIT) for op in graph.ops)
    return replace(
        graph,
        tensors=tuple(replace(t, nbytes=t.nbytes * UNIT) for t in graph.tensors),
        ops=tuple(ops),
        updates=tuple(updates),
        usual_nbytes=graph.usual_nbytes * UNIT,
    )


@pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(16))
def test_no_plan_of_any_choice_is_below_the_bound(seed: int, seconds: float) -> None:
    graph = step(seed)
    exact = {updates: cheapest(updated(graph, updates)) for updates in choices(graph)}
    rule = planner.solve(graph)
    most = simulate(updated(graph, ()), keep_all(graph)).predicted.peak_nbytes
    for budget in {rule.smallest_nbytes, (rule.smallest_nbytes + most) // 2, most}:
        plan = planner.solve(graph, Machine(update_seconds=seconds), budgets=[budget]).plan(budget)
        in_step = step_of(graph, plan)
        assert simulate(in_step, plan.lives).predicted.peak_nbytes == plan.predicted.peak_nbytes <= budget
        report = validate(graph, plan.lives, lower(graph, plan.lives), plan.updates)
        assert report.ok and report.peak_nbytes == plan.predicted.peak_nbytes
        all_early = rule.plan(budget)
        assert all_early.updates == early(graph)
        assert plan.predicted.seconds <= all_early.predicted.seconds + seconds * len(graph.updates) + 1e-9
        fastest = min(
            (took + seconds * len(updates) for updates, plans in exact.items() for peak, took, _ in plans if peak <= budget),
        )
        assert plan.lower_bound_seconds <= fastest + 1e-9
        assert plan.lower_bound_seconds <= plan.predicted.seconds + 1e-9
    assert not planner.solve(graph, Machine(update_seconds=seconds), budgets=[most]).plan(most).updates


def test_rebuilding_in_the_place_of_early_updates() -> None:
    """Where updates are dear, plans rebuild more and update fewer parameters early; where they are cheap, it is reversed."""
    fewer = 0
    for seed in range(40):
        graph = step(seed)
        budget = (planner.smallest_nbytes(graph) + max(unmodified_levels(updated(graph, ())))) // 2
        cheap, dear = (planner.solve(graph, Machine(update_seconds=s), budgets=[budget]).plan(budget) for s in (1e-3, 1e3))
        assert len(dear.updates) <= len(cheap.updates)
        assert cheap.predicted.extra_seconds <= dear.predicted.extra_seconds + 1e-9
        fewer += len(dear.updates) < len(cheap.updates)
    assert fewer >= 2
