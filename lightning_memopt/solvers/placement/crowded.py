"""Sections on demand: the search decides the most crowded moments, and best-fit places the rest around them.

At most moments of a step there is space to spare. The search decides them, too, and takes long. So it gets the sections of the
highest load alone, as if there were no others. Buffers that live through all of these stand on the ground, those that live
longest at the bottom. Repeated best-fit places the remaining buffers around what was placed. This may break two rules: two
searched buffers overlap at a moment that the search did not see, or a buffer ends above the target. Then the search sees more
sections of these buffers, and runs again.

Fewer sections are fewer rules. So what is proven to be impossible for a few sections is impossible for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.solvers.placement import best_fit, promotion
from lightning_memopt.solvers.placement.buffers import Ints, Problem
from lightning_memopt.solvers.placement.sections import Sections

_CROWDED = 0.998
"""The first sections have at least this share of the highest load."""
_GROWTHS = (1, 4, 16)
"""Sections that are added at once; the seed chooses. One keeps the search small, many need fewer searches."""
_ORDERS = ("area", "lifetime")
"""The first orders of best-fit for the rest."""
_ROUNDS = 8
"""Of repeated best-fit."""

Searcher = Callable[[Sections, int, float, int], tuple[Ints | None, bool]]
"""Sections, capacity in bytes, seconds, seed -> (offsets or None, whether that is proven)."""
Placer = Callable[[Problem, Ints, Ints], Ints]
"""Best-fit of an order around fixed offsets, as `best_fit.best_fit`."""


def on_demand(
    problem: Problem,
    target_nbytes: int,
    until: float,
    patience_seconds: float,
    *,
    search: Searcher,
    place: Placer,
    better: Callable[[Ints], None] = lambda offsets: None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Ints | None, bool]:
    """(offsets of shape (n,) within the target or None, whether that is proven).

    target_nbytes: not below max-live.
    until: `clocks.monotonic()` at which it is given up.
    patience_seconds: it is given up, too, when a search takes longer.
    better: is called with placements on the way, which are above the target.
    stop: ends it when it returns True; it ends the search, too.
    """
    crowd = _Crowd(problem)
    all_orders = best_fit.orders(problem)
    for turn in itertools.count():
        seconds = until - clocks.monotonic()
        if seconds <= 0 or stop():
            break
        offsets, proven = crowd.searched(target_nbytes, min(seconds, patience_seconds), search, seed + turn)
        if offsets is None:
            return None, proven
        fixed = crowd.fixed(offsets)

        def around(problem: Problem, order: Ints, fixed: Ints = fixed) -> Ints:
            return place(problem, order, fixed)

        placement = promotion.repeated(
            problem, [order[fixed[order] < 0] for order in map(all_orders.__getitem__, _ORDERS)], target_nbytes, until,
            place=around, rounds=_ROUNDS, seed=seed + turn, stop=stop,
        )  # fmt: skip
        if problem.height_nbytes(placement) <= target_nbytes:
            return placement, True
        better(placement)
        crowd.grow(np.flatnonzero(placement + problem.size > target_nbytes), _GROWTHS[seed % len(_GROWTHS)])
    return None, False


class _Crowd:
    """The sections that the search sees, and the buffers that are alive in them."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._sections = problem, Sections.of(problem)
        load = self._sections.load_nbytes
        self._by_load = np.argsort(-load, kind="stable")
        self._seen = load >= _CROWDED * load.max()
        self._look()

    def _look(self) -> None:
        seen, size = np.flatnonzero(self._seen), self._problem.size
        first, last = np.searchsorted(seen, self._sections.first), np.searchsorted(seen, self._sections.last)
        through = (first == 0) & (last == len(seen))
        grounded, lived = np.flatnonzero(through), self._problem.upper - self._problem.lower
        self._ground = grounded[np.argsort(-lived[grounded], kind="stable")]
        self._above = np.flatnonzero((last > first) & ~through)
        self._ground_nbytes = int(size[self._ground].sum())
        self._reduced = Problem(first[self._above], last[self._above], size[self._above])
        self._overlaps: list[tuple[int, int]] = []

    def searched(self, capacity: int, seconds: float, search: Searcher, seed: int) -> tuple[Ints | None, bool]:
        """Offsets of the buffers above the ground, or None; whether that is proven."""
        if not len(self._above):
            return np.empty(0, dtype=np.int64), True
        return search(Sections.of(self._reduced), capacity - self._ground_nbytes, seconds, seed)

    def fixed(self, offsets: Ints) -> Ints:
        """Offsets of the seen buffers, shape (n,), from those of `searched`; -1 for the rest, and for a seen one that would
        overlap with one of a larger area."""
        lower, upper, size = self._problem.lower, self._problem.upper, self._problem.size
        fixed = np.full(len(size), -1, dtype=np.int64)
        fixed[self._ground] = np.cumsum(size[self._ground]) - size[self._ground]
        fixed[self._above] = offsets + self._ground_nbytes
        seen = np.flatnonzero(fixed >= 0)
        seen = seen[np.argsort(-size[seen].astype(float) * (upper - lower)[seen], kind="stable")]
        for rank, j in enumerate(seen.tolist()):
            larger = seen[:rank]
            beside = (lower[larger] < upper[j]) & (upper[larger] > lower[j]) & (fixed[larger] >= 0)
            beside &= (fixed[larger] < fixed[j] + size[j]) & (fixed[larger] + size[larger] > fixed[j])
            if beside.any():
                self._overlaps += [(j, int(k)) for k in larger[beside]]
                fixed[j] = -1
        return fixed

    def grow(self, too_high: Ints, most: int) -> None:
        """See more: the sections of the highest load in which the buffers `too_high` are alive, `most` in all, and a section of
        every two seen buffers that would overlap."""
        first, last = self._sections.first, self._sections.last
        lived = np.zeros(len(self._seen), dtype=bool)
        for j in too_high.tolist():
            lived[first[j] : last[j]] = True
        new = self._by_load[(lived & ~self._seen)[self._by_load]]
        self._seen[new[:most]] = True
        for j, k in self._overlaps:
            together = slice(max(first[j], first[k]), min(last[j], last[k]))
            self._seen[together.start + int(np.argmax(self._sections.load_nbytes[together]))] = True
        self._look()
