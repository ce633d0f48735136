"""Best-fit: place buffers one after the other, each into the smallest gap that has space for it."""

from __future__ import annotations

import numpy as np

from lightning_memopt.solvers.placement.buffers import Ints, Problem


def best_fit(problem: Problem, order: Ints) -> Ints:
    """Offsets, shape (n,), from placing the buffers in this order.

    A gap is between two placed buffers that are alive at the same time as the new one. Of equal gaps the lowest is taken. If
    there is no gap, the buffer goes on top.
    """
    lower, upper, size = problem.lower, problem.upper, problem.size
    offsets = np.zeros(len(problem), dtype=np.int64)
    placed, bottoms = np.empty(len(problem), dtype=np.int64), np.empty(len(problem), dtype=np.int64)
    for count, index in enumerate(order):
        before = placed[:count]  # ascending by offset
        alive = before[(lower[before] < upper[index]) & (upper[before] > lower[index])]
        floors = np.concatenate([[0], np.maximum.accumulate(offsets[alive] + size[alive])])
        gaps = offsets[alive] - floors[:-1]
        fitting = np.flatnonzero(gaps >= size[index])
        at = floors[fitting[np.argmin(gaps[fitting])]] if len(fitting) else floors[-1]
        offsets[index] = at
        rank = int(np.searchsorted(bottoms[:count], at, side="right"))
        placed[rank + 1 : count + 1], bottoms[rank + 1 : count + 1] = placed[rank:count], bottoms[rank:count]
        placed[rank], bottoms[rank] = index, at
    return offsets


def orders(problem: Problem) -> dict[str, Ints]:
    """The orders of the literature: by size, by area and by lifetime, each with the largest first, and by time."""
    lower, size, lifetime = problem.lower, problem.size, problem.upper - problem.lower
    area = size.astype(float) * lifetime
    return {
        "size": np.lexsort((lower, -lifetime, -size)),
        "area": np.lexsort((lower, -size, -area)),
        "lifetime": np.lexsort((lower, -size, -lifetime)),
        "lifetime, then area": np.lexsort((lower, -area, -lifetime)),
        "time": np.lexsort((-size, lower)),
    }
