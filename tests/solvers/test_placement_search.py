"""The exact search: its answers against CP-SAT's, perfect packings, and what is done without a compiler."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from placements import by_cp_sat, full

from benchmarks.placement.instances import perfect
from lightning_memopt import cxx
from lightning_memopt.solvers.placement import Buffer, best_fit, faults, place, search
from lightning_memopt.solvers.placement.buffers import Problem
from lightning_memopt.solvers.placement.sections import Sections

compiled = pytest.mark.skipif(not search.available(), reason="no C++ compiler")


@compiled
def test_what_cannot_be_placed_is_proven_as_by_cp_sat() -> None:
    """Of 8,000 problems of full load, those that the search refuses; and all placements are valid."""
    refused = 0
    for seed in range(8_000):
        buffers = full(seed, 5 + seed % 7, 3 + seed % 5, (0.0, 0.1, 0.2)[seed % 3])
        problem = Problem.of(buffers)
        offsets, certain = search.search(Sections.of(problem), problem.bound_nbytes, 20.0, search.Stop())
        assert certain
        if offsets is not None:
            assert not faults(buffers, offsets.tolist(), problem.bound_nbytes)
        else:
            refused += 1
            assert not by_cp_sat(buffers, problem.bound_nbytes)
            assert place(buffers, seconds=5).height_nbytes > problem.bound_nbytes
    assert refused


@compiled
@pytest.mark.parametrize("seed", range(20))
def test_a_capacity_above_the_bound_is_searched_as_by_cp_sat(seed: int) -> None:
    """There is space to spare, so that buffers may stand on what is still to come."""
    rng = random.Random(seed)
    rows = [(at := rng.randrange(12), at + rng.randint(1, 6), rng.randint(1, 30)) for _ in range(14)]
    buffers = [Buffer(str(i), *row) for i, row in enumerate(rows)]
    problem = Problem.of(buffers)
    for capacity in range(problem.bound_nbytes, problem.bound_nbytes + 8):
        offsets, certain = search.search(Sections.of(problem), capacity, 60.0, search.Stop())
        assert certain and (offsets is not None) == by_cp_sat(buffers, capacity)
        assert offsets is None or not faults(buffers, offsets.tolist(), capacity)


@compiled
@pytest.mark.parametrize("seed", range(10))
def test_the_two_codes_of_best_fit_are_equal(seed: int) -> None:
    buffers, _, _ = perfect(120, seed, pinwheels=True, length=50, unit=1 << 16)
    problem = Problem.of(buffers)
    for order in best_fit.orders(problem).values():
        assert np.array_equal(search.best_fit(problem, order), best_fit.best_fit(problem, order))


@compiled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pinwheels", [False, True])
def test_perfect_packings_are_filled(seed: int, pinwheels: bool) -> None:
    buffers, offsets, capacity = perfect(100, seed, pinwheels=pinwheels)
    assert not faults(buffers, offsets, capacity) and Problem.of(buffers).bound_nbytes == capacity
    placement = place(buffers, capacity, seconds=60)
    assert placement.fits and not faults(buffers, placement.offsets, capacity)


def test_without_a_compiler_best_fit_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "available", lambda: False)
    buffers, _, capacity = perfect(40, 3)
    first = min(Problem.of(buffers).height_nbytes(best_fit.best_fit(Problem.of(buffers), o)) for o in orders_of(buffers))
    placement = place(buffers, capacity, seconds=2)
    assert not faults(buffers, placement.offsets, placement.height_nbytes) and placement.height_nbytes <= first


def orders_of(buffers: list[Buffer]) -> list[np.ndarray]:
    return list(best_fit.orders(Problem.of(buffers)).values())


@compiled
def test_thousands_of_buffers_are_searched_as_deep_as_they_are_many() -> None:
    buffers = [Buffer(str(i), i % 7, i % 7 + 3, 1 + i % 5) for i in range(4000)]
    placement = place(buffers, seconds=2)
    assert not faults(buffers, placement.offsets, placement.height_nbytes)


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise cxx.BuildError("there is no C++ compiler")

    monkeypatch.setattr(cxx, "library", broken)
    search._library.cache_clear()
    try:
        assert not search.available()
    finally:
        search._library.cache_clear()


@compiled
def test_a_search_ends_when_it_is_told_to_and_when_its_time_is_over() -> None:
    buffers, _, capacity = perfect(500, 1, pinwheels=True, holes=0.1)
    sections, stop = Sections.of(Problem.of(buffers)), search.Stop()
    began = time.monotonic()
    threading.Timer(0.2, stop.set).start()
    assert search.search(sections, capacity, 60.0, stop) == (None, False)
    assert time.monotonic() - began < 20
    placement = place(buffers, capacity, seconds=0.5)
    assert placement.seconds < 10 and not faults(buffers, placement.offsets, placement.height_nbytes)
