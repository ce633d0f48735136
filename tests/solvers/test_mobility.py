"""Dymem's pool with two ends, which is a baseline of the benchmarks."""

from __future__ import annotations

import random

import pytest

from benchmarks.papers.mobility import Mobility, mobility, one_ended, two_ended
from benchmarks.placement.instances import perfect
from lightning_memopt.solvers.placement import Buffer, faults
from lightning_memopt.solvers.placement.buffers import Problem

GROUPS: tuple[Mobility, ...] = ("movable", "temporary", "reclaimed")


@pytest.mark.parametrize(
    "kind, readers, next_reads, group",
    [
        ("dropout", 3, False, "reclaimed"),
        ("softmax", 1, True, "reclaimed"),
        ("linear", 1, True, "reclaimed"),
        ("convolution", 2, True, "temporary"),
        ("convolution", 1, False, "temporary"),
        ("convolution", 1, True, "movable"),
    ],
)
def test_groups_are_those_of_algorithm_3(kind: str, readers: int, next_reads: bool, group: str) -> None:
    assert mobility(kind, readers, next_reads) == group


def test_temporary_buffers_at_the_high_end_leave_the_low_end_whole() -> None:
    """A fork that stays, between two that go: its bytes split the pool with one end, so that the last buffer goes on top."""
    rows = [(0, 2, 10), (1, 9, 2), (3, 5, 12)]
    problem = Problem.of([Buffer(str(i), *row) for i, row in enumerate(rows)])
    assert one_ended(problem).pool_nbytes == 24
    pool = two_ended(problem, ["movable", "temporary", "movable"])
    assert pool.offsets.tolist() == [0, 12, 0] and pool.pool_nbytes == 14 == problem.bound_nbytes
    assert two_ended(problem, ["movable", "temporary", "movable"], beta_nbytes=5).pool_nbytes == 19
    beside = two_ended(problem, ["movable", "reclaimed", "movable"])
    assert (beside.main_nbytes, beside.incremental_nbytes) == (12, 2) and beside.offsets.tolist() == [0, 12, 0]


@pytest.mark.parametrize("seed", range(20))
def test_pools_are_valid_placements(seed: int) -> None:
    rng = random.Random(seed)
    buffers, _, _ = perfect(60, seed, pinwheels=True, holes=0.2)
    problem = Problem.of(buffers)
    pool = two_ended(problem, [rng.choice(GROUPS) for _ in buffers])
    assert not faults(buffers, pool.offsets.tolist(), pool.pool_nbytes)
    assert one_ended(problem).incremental_nbytes == 0
    assert not faults(buffers, one_ended(problem).offsets.tolist(), one_ended(problem).pool_nbytes)
    assert min(pool.pool_nbytes, one_ended(problem).pool_nbytes) >= problem.bound_nbytes
