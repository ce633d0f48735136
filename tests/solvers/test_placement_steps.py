"""The buffers of steps are those that the model of the allocator is asked for."""

from __future__ import annotations

import random

import pytest
from build import random_step

from lightning_memopt.plan.allocator import reserved
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.placement import buffers_of, faults, place


@pytest.mark.parametrize("seed", range(6))
def test_buffers_are_what_is_requested(seed: int) -> None:
    """Their max-live and what is resident are the requested peak of the model of the allocator."""
    graph = random_step(random.Random(seed), 24)
    frontier = planner.solve(graph, limit_seconds=2)
    plan = frontier.plan(frontier.smallest_nbytes)
    last = len(graph.points) - 1
    resident = sum(t.nbytes for t in graph.tensors if t.born_at < 0 and t.freed_at == last)
    buffers = buffers_of(graph, plan.lives)
    placement = place(buffers, seconds=2)
    assert placement.bound_nbytes + resident == reserved(graph, plan.lives).requested_nbytes
    assert not faults(buffers, placement.offsets, placement.height_nbytes)
    whole = buffers_of(graph)
    assert len(buffers) > 3 and place(whole, seconds=2).bound_nbytes >= placement.bound_nbytes
