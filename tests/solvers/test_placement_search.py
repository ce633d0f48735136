"""The exact search: its answers against CP-SAT's, perfect packings, and the C++ code against the Python code."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
from placements import by_cp_sat, full

from benchmarks.placement.instances import perfect
from lightning_memopt import cxx
from lightning_memopt.solvers.placement import Buffer, best_fit, faults, native, place, search
from lightning_memopt.solvers.placement.buffers import Problem
from lightning_memopt.solvers.placement.merging import Merging
from lightning_memopt.solvers.placement.sections import Sections

compiled = pytest.mark.skipif(not native.available(), reason="no C++ compiler")


def limits(seed: int = 1, most_nodes: int = 10**8) -> dict[str, object]:
    return {"seed": seed, "nodes_a_try": most_nodes, "most_nodes": most_nodes, "seconds": 20.0, "stop": native.Stop()}


@compiled
def test_what_cannot_be_placed_is_proven_as_by_cp_sat() -> None:
    """Of 8,000 problems of full load, those that the search refuses; and all placements are valid."""
    refused = 0
    for seed in range(8_000):
        buffers = full(seed, 5 + seed % 7, 3 + seed % 5, (0.0, 0.1, 0.2)[seed % 3])
        problem = Problem.of(buffers)
        offsets, proven, _ = native.search(Sections.of(problem), problem.bound_nbytes, **limits(seed))
        assert proven
        if offsets is not None:
            assert not faults(buffers, offsets.tolist(), problem.bound_nbytes)
        else:
            refused += 1
            assert not by_cp_sat(buffers, problem.bound_nbytes)
            assert place(buffers, seconds=5).height_nbytes > problem.bound_nbytes
    assert refused


@compiled
@pytest.mark.parametrize("seed", range(30))
def test_the_two_codes_search_the_same_nodes(seed: int) -> None:
    if seed % 2:
        buffers = full(seed, 40, 12, 0.1 * (seed % 3))
        capacity = Problem.of(buffers).bound_nbytes + seed % 4 // 3
    else:
        buffers, _, capacity = perfect(40, seed, pinwheels=seed % 4 == 0, length=30, holes=0.15 * (seed % 3))
    sections = Sections.of(Problem.of(buffers))
    few = {"seed": seed, "nodes_a_try": 60, "most_nodes": 500, "seconds": 99.0, "stop": native.Stop()}
    offsets, proven, nodes = native.search(sections, capacity, **few)
    same_offsets, same_proven, same_nodes = search.search(sections, capacity, **few)
    assert (proven, nodes) == (same_proven, same_nodes)
    assert (offsets is None) == (same_offsets is None)
    assert offsets is None or np.array_equal(offsets, same_offsets)


@compiled
@pytest.mark.parametrize("seed", range(10))
def test_the_two_codes_of_best_fit_are_equal(seed: int) -> None:
    buffers, _, _ = perfect(120, seed, pinwheels=True, length=50, unit=1 << 16)
    problem = Problem.of(buffers)
    for order in best_fit.orders(problem).values():
        assert np.array_equal(native.best_fit(problem, order), best_fit.best_fit(problem, order))


@compiled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pinwheels", [False, True])
def test_perfect_packings_are_filled(seed: int, pinwheels: bool) -> None:
    buffers, offsets, capacity = perfect(150, seed, pinwheels=pinwheels)
    assert not faults(buffers, offsets, capacity) and Problem.of(buffers).bound_nbytes == capacity
    placement = place(buffers, capacity, seconds=60)
    assert placement.fits and not faults(buffers, placement.offsets, capacity)


def test_without_a_compiler_python_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    buffers, _, capacity = perfect(60, 3)
    placement = place(buffers, capacity, seconds=60)
    assert placement.fits and not faults(buffers, placement.offsets, capacity)


def test_more_buffers_than_python_can_search_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    buffers = [Buffer(str(i), i % 7, i % 7 + 3, 1 + i % 5) for i in range(1500)]
    sections = Sections.of(Problem.of(buffers))
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # other libraries raise it
    try:
        offsets, proven, _ = search.search(sections, int(sections.load_nbytes.max()), **limits())
    finally:
        sys.setrecursionlimit(before)
    assert offsets is None and not proven
    placement = place(buffers, seconds=1)
    assert not faults(buffers, placement.offsets, placement.height_nbytes)


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise cxx.BuildError("there is no C++ compiler")

    monkeypatch.setattr(cxx, "library", broken)
    native._library.cache_clear()
    try:
        assert not native.available()
    finally:
        native._library.cache_clear()


@pytest.mark.parametrize("seed", range(20))
def test_a_merged_problem_leads_back_to_a_valid_placement(seed: int) -> None:
    buffers, _, capacity = perfect(80, seed, pinwheels=seed % 2 == 0, holes=0.1 * (seed % 3))
    merging = Merging(Problem.of(buffers), capacity, seed)
    reduced = merging.problem()
    assert len(reduced) < len(buffers) and reduced.bound_nbytes == capacity
    offsets = best_fit.best_fit(reduced, best_fit.orders(reduced)["area"])
    assert not faults(buffers, merging.offsets(offsets).tolist(), reduced.height_nbytes(offsets))


@compiled
def test_a_search_ends_when_it_is_told_to_and_when_its_time_is_over() -> None:
    buffers, _, capacity = perfect(500, 1, pinwheels=True, holes=0.1)
    sections, stop = Sections.of(Problem.of(buffers)), native.Stop()
    began = time.monotonic()
    threading.Timer(0.2, stop.set).start()
    native.search(sections, capacity, seed=1, nodes_a_try=10**9, most_nodes=10**12, seconds=60.0, stop=stop)
    assert time.monotonic() - began < 20
    placement = place(buffers, capacity, seconds=0.5)
    assert placement.seconds < 10 and not faults(buffers, placement.offsets, placement.height_nbytes)
