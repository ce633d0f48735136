"""OLLA's preplacement (Steiner et al., 2022; section 4.5, Function 5) as a policy.

What is made early in forward is freed late in backward, so lifetimes nest. The buffers of a nested sequence are stacked at
rising addresses, the longest at the bottom, and look like a pyramid. The others are placed around them: by OLLA with an integer
program, here by best-fit.
"""

from __future__ import annotations

import numpy as np

from lightning_memopt.solvers.placement.best_fit import best_fit, orders
from lightning_memopt.solvers.placement.buffers import Ints, Problem


def nested(problem: Problem) -> Ints:
    """Indices of the buffers of the pyramid, from the bottom: each is the longest that is alive within the one below it.

    Of equally long ones the first is taken, as in the paper.
    """
    chosen: list[int] = []
    free = np.ones(len(problem), dtype=bool)
    lower, upper = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    while True:
        inside = np.flatnonzero(free & (problem.lower >= lower) & (problem.upper <= upper))
        if not len(inside):
            return np.array(chosen, dtype=np.int64)
        lifetimes = problem.upper[inside] - problem.lower[inside]
        longest = int(inside[np.argmax(lifetimes)])
        chosen.append(longest)
        free[longest] = False
        lower, upper = int(problem.lower[longest]), int(problem.upper[longest])


def pyramid(problem: Problem) -> Ints:
    """Offsets, shape (n,): the pyramid, and around it best-fit in the order of areas."""
    base = nested(problem)
    by_area = orders(problem)["area"]
    # best-fit stacks the nested buffers itself: each is alive within all before it, so that no gap is below it
    return best_fit(problem, np.concatenate([base, by_area[~np.isin(by_area, base)]]))
