"""Steps whose updates run early: valid sequences, OLLA's control edges, and an order that is proven to be the best."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ordering import lowest, network, random_problem

from benchmarks.papers.olla_updates import control_edges, early, ordered, renumbered, with_control_edges
from lightning_memopt.solvers.ordering import Problem, faults


def random_updates(problem: Problem, seed: int) -> frozenset[int]:
    rng = random.Random(seed)
    return frozenset(op for op in range(len(problem) // 2, len(problem)) if rng.random() < 0.4)


@given(st.integers(0, 10**6), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_every_sequence_is_valid(seed: int, n: int) -> None:
    problem = random_problem(seed, n)
    updates = random_updates(problem, seed)
    first = early(problem, updates, range(n))
    assert not faults(problem, first)
    assert renumbered(problem, first).levels_nbytes(range(n)).tolist() == problem.levels_nbytes(first).tolist()
    with_control_edges(problem, updates)  # raises if an edge goes back


@pytest.mark.parametrize("seed", range(12))
def test_small_problems_are_as_low_as_exhaustive_search(seed: int) -> None:
    problem = random_problem(seed, n=5 + seed % 6)
    best, early_nbytes = ordered(problem, random_updates(problem, seed), seconds=5)
    assert not faults(problem, best.sequence, best.peak_nbytes)
    assert best.bound_nbytes <= lowest(problem) == best.peak_nbytes <= min(best.given_nbytes, early_nbytes)


def test_early_updates_free_gradients() -> None:
    """One gradient is in memory at a time, and the minimum cut proves that no sequence needs fewer bytes."""
    problem = network(6)
    best, early_nbytes = ordered(problem, frozenset(range(12, 18)), seconds=5)
    assert best.given_nbytes == 6 * 10 + 3
    assert early_nbytes == best.peak_nbytes == best.bound_nbytes == 6 * 3 + 10


def test_a_control_edge_leads_from_an_update_to_the_backward_of_an_earlier_layer() -> None:
    edges = dict(control_edges(network(6), frozenset(range(12, 18))))
    # the update of layer k waits for its backward, op 11 - k; the anchor is the op after that one's next
    assert edges == {12 + k: 11 - k + 2 for k in range(6) if 11 - k + 2 < 12}
