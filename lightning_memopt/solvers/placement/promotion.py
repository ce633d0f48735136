"""Repeated best-fit: buffers that ended above the target are placed earlier the next time.

A few orders are kept, the best first. Every round takes one of them at random and moves the buffers that end above the target
to the front (or near it), together with a few of those that are live at the same time as the worst of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.solvers.placement.best_fit import best_fit
from lightning_memopt.solvers.placement.buffers import Ints, Problem

POOL = 8
"""Number of orders that are kept."""

Placer = Callable[[Problem, Ints], Ints]


def repeated(
    problem: Problem,
    starts: Iterable[Ints],
    target_nbytes: int,
    until: float,
    *,
    place: Placer = best_fit,
    better: Callable[[Ints, int], None] = lambda offsets, height: None,
    stop: Callable[[], bool] = lambda: False,
) -> Ints:
    """The lowest placement that was found, as offsets of shape (n,). It is returned early if it is not above `target_nbytes`.

    starts: the first orders; at least one.
    until: `clocks.monotonic()` at which the last round begins; the starts are always placed.
    place: best-fit in Python, or the native function that does the same.
    better: is called with each placement, and its height, that is lower than all before.
    stop: ends the rounds when it returns True.
    """
    rng = np.random.default_rng(0)
    pool: list[tuple[int, Ints, Ints]] = []  # (height, order, offsets), the lowest first
    best: tuple[int, Ints] | None = None

    def run(order: Ints) -> bool:
        nonlocal best
        offsets = place(problem, order)
        height = problem.height_nbytes(offsets)
        pool.append((height, order, offsets))
        pool.sort(key=lambda entry: entry[0])
        del pool[POOL:]
        if best is None or height < best[0]:
            best = (height, offsets)
            better(offsets, height)
        return best[0] <= target_nbytes

    reached = any([run(order) for order in starts])
    assert best is not None, "there is at least one start"
    while not reached and not stop() and clocks.monotonic() < until:
        _, order, offsets = pool[int(len(pool) * rng.random() ** 2)]
        reached = run(_promoted(problem, order, offsets, target_nbytes, rng))
    return best[1]


def _promoted(problem: Problem, order: Ints, offsets: Ints, target_nbytes: int, rng: np.random.Generator) -> Ints:
    """The next order: buffers above the target come earlier, and with them a few random ones that are live at the same time as
    one of them.
    """
    above = offsets + problem.size > target_nbytes
    worst = rng.choice(np.flatnonzero(above))
    beside = (problem.lower < problem.upper[worst]) & (problem.upper > problem.lower[worst])
    chosen = (above | (beside & (rng.random(len(problem)) < rng.choice([0.0, 0.06, 0.2]))))[order]
    early, rest = order[chosen], order[~chosen]
    at = int(len(rest) * rng.choice([0.0, 0.0, 0.05, 0.2]))
    return np.concatenate([rest[:at], early, rest[at:]])
