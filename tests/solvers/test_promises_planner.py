"""P7, P8 and P32: frontiers are monotone, a budget with room changes nothing, and time limits are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest
from graphs import graph_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import lower, simulate, validate
from lightning_memopt.solvers import planner


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.floats(0, 1.2), min_size=2, max_size=8), st.sampled_from(["throughput", "flops"]))
def test_p7_a_lower_budget_never_gives_a_higher_peak(seed: int, shares: list[float], objective: planner.Objective) -> None:
    """Nor a faster plan; every plan keeps its budget, is valid, and is as long as it says."""
    graph = graph_of(seed)
    frontier = planner.solve(graph, objective=objective)
    peaks, costs = [], []
    for budget in sorted(int(share * frontier.unmodified_peak_nbytes) for share in shares):
        try:
            plan = frontier.plan(budget)
        except InfeasibleError as error:
            assert not peaks and error.smallest_nbytes is not None and error.smallest_nbytes > budget
            continue
        p = plan.predicted
        assert p.peak_nbytes <= budget and validate(graph, plan.lives, lower(graph, plan.lives)).ok
        assert simulate(graph, plan.lives).predicted.peak_nbytes == p.peak_nbytes
        peaks.append(p.peak_nbytes)
        costs.append((p.extra_flops, p.seconds) if objective == "flops" else p.seconds)
    assert peaks == sorted(peaks)
    assert costs == sorted(costs, reverse=True)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_p8_nothing_is_run_again_where_the_budget_has_room(seed: int) -> None:
    """From the unmodified peak on the plan is the unmodified step, and no plan has a peak above it."""
    frontier = planner.solve(graph_of(seed))
    for budget in (frontier.unmodified_peak_nbytes, 2 * frontier.unmodified_peak_nbytes):
        assert frontier.plan(budget).predicted.rebuilt_ops == 0
    assert all(c.predicted.peak_nbytes <= frontier.unmodified_peak_nbytes for c in frontier.candidates)


@pytest.mark.parametrize("tick", [0.0, 0.1, 0.4, 1.5, 1e9])
def test_p32_time_limit_gives_a_valid_plan_or_the_unmodified_step(tick: float) -> None:
    """However slow the solvers are, wherever the limit falls: what is given is valid and keeps its budget."""
    for seed in range(4):
        graph = graph_of(seed, 25)
        said: list[str] = []
        clock = partial(next, count(step=tick))  # goes on whenever it is read
        frontier = planner.solve(graph, limit_seconds=30.0, say=said.append, clock=clock)
        stopped = any("time limit" in line for line in said)
        assert stopped or tick < 1e9
        assert tick or not stopped
        plans = [frontier.plan(frontier.smallest_nbytes), frontier.plan(1 << 60)]
        for plan in plans:
            assert plan.predicted_peak_nbytes <= plan.budget_nbytes
            assert validate(graph, plan.lives, lower(graph, plan.lives)).ok
        assert plans[1].predicted.rebuilt_ops == 0 or plans[1].predicted.seconds < 0
        assert tick < 1e9 or plans[0].predicted.rebuilt_ops == 0, "there was no time for anything but the unmodified step"


def test_p32_a_solver_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that would give plans for ever is left at the limit."""

    def endless(graph: Graph) -> Iterator[tuple[str, object]]:
        while True:
            yield "slow", planner.keep_all(graph)

    monkeypatch.setattr(planner, "_smallest", endless)
    began = time.perf_counter()
    frontier = planner.solve(graph_of(0), limit_seconds=0.2)
    assert time.perf_counter() - began < 60
    assert frontier.plan(frontier.unmodified_peak_nbytes).predicted.rebuilt_ops == 0
