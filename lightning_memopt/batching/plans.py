"""Plans of a fitted step at any batch size: how far the smallest one goes, and the fastest one within a budget.

A plan is lives on the points of the step, and those are the same at every size: one that was solved at a size is priced at
another by simulating it there. With `offload` or `compress` plans are made, and priced at measured rates, as a session does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_memopt.batching.fit import StepFit
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, reserved_nbytes_of, simulate
from lightning_memopt.session.hybrid import Hybrid, HybridFrontier, peak_nbytes
from lightning_memopt.solvers import joint, planner

Lives = tuple[Life, ...]
Solve = Callable[[Graph], planner.Frontier]
_ROUNDS = 4
"""How often the smallest plan is solved anew at the size that the one before it allows."""
_POOL = 32
"""Plans of a frontier that are priced at other sizes."""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size in [low, high] that fits, where `low` does and what fits is an interval; 0 where `low` does not."""
    if high < low or not fits(low):
        return 0
    step = 1
    while low + step <= high and fits(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class Plans:
    """Plans that rebuild tensors. `solve`: the planner, as the session calls it."""

    def __init__(self, fit: StepFit, solve: Solve) -> None:
        self.fit, self.solve = fit, solve
        self._pool: list[tuple[Lives, float]] = []

    def largest(self, found: int, cap: int, budget_nbytes: int) -> int:
        """The largest size for which there is a plan, from one that fits; 0 for none. The smallest plan of one size says how
        far it goes; solved anew there, it may go further."""

        def goes(lives: Lives) -> Callable[[int], bool]:
            return lambda size: self.needs(size, lives) <= budget_nbytes

        for _ in range(_ROUNDS):
            further = largest(goes(self.smallest(max(found, 1))), max(found, 1), cap) if found < cap else found
            if further <= found:
                break
            found = further
        # a plan that is smallest at the size itself may need less than one that is at a smaller size
        while found < cap and goes(self.smallest(found + 1))(found + 1):
            found += 1
        return found

    def needs(self, size: int, lives: Lives) -> int:
        """The smallest budget for a plan, at this size."""
        return _needs(self.fit.at(size), lives)

    def smallest(self, size: int) -> Lives:
        """A plan for few bytes."""
        return planner.smallest(self.fit.at(size)).lives

    def fastest(self, size: int, budget_nbytes: int) -> tuple[float, int] | None:
        """Extra seconds and needed bytes of the fastest plan within the budget; None for none. The frontier of one size has all
        sorts of plans: those are priced here."""
        graph, found = self.fit.at(size), list[tuple[float, int]]()
        for lives, overhead in self._pooled(size):
            try:
                seconds = simulate(graph, lives).predicted.seconds + overhead
            except LoweringError:
                continue
            if not found or seconds < found[-1][0]:
                needs = self.needs(size, lives)
                if needs <= budget_nbytes:
                    found.append((seconds, needs))
        if found:
            return found[-1]
        lives = self.smallest(size)  # solved at another size, all of them: this one has a plan of its own
        needs = self.needs(size, lives)
        return (simulate(graph, lives).predicted.seconds, needs) if needs <= budget_nbytes else None

    def _pooled(self, size: int) -> list[tuple[Lives, float]]:
        """Plans with the seconds that recording takes, solved once, at the first size that is asked for."""
        if not self._pool:
            smallest = planner.smallest(self.fit.at(size))
            candidates = self.solve(self.fit.at(size)).candidates
            some = (*candidates[:: -(-len(candidates) // _POOL)], smallest)
            self._pool = [(c.lives, c.predicted.overhead_seconds) for c in some]
        return self._pool


class AwayPlans(Plans):
    """Plans that rebuild tensors, and put them away: in the forms that `hybrid` allows. `solve` gives its frontiers."""

    def __init__(self, fit: StepFit, solve: Solve, hybrid: Hybrid) -> None:
        super().__init__(fit, solve)
        self.hybrid = hybrid
        self._frontiers: dict[int, planner.Frontier] = {}

    def needs(self, size: int, lives: Lives) -> int:
        return _needs(self.fit.at(size), self.resized(size, lives))

    def resized(self, size: int, lives: Lives) -> Lives:
        """Lives that were found at any size, with the bytes that what is away takes at this one."""
        forms = self.hybrid.forms(self.fit.at(size))

        def nbytes(life: Life) -> int:
            return dict(forms.get(life.tensor, ())).get(life.form, life.parked_nbytes)

        return tuple(replace(life, parked_nbytes=nbytes(life)) if life.how == "fetch" else life for life in lives)

    def smallest(self, size: int) -> Lives:
        frontier, graph = self._frontier(size), self.fit.at(size)
        plans = [c.lives for c in frontier.candidates]
        least = frontier.least if isinstance(frontier, HybridFrontier) else None
        if least is None:
            least = joint.least(graph, plans, self.hybrid.forms(graph), lambda lives: _needs(graph, lives))[1]
        return min((least, plans[0]), key=lambda lives: _needs(graph, lives))

    def fastest(self, size: int, budget_nbytes: int) -> tuple[float, int] | None:
        try:
            predicted = self._frontier(size).plan(budget_nbytes).predicted
        except InfeasibleError:
            return None
        return predicted.seconds, predicted.needed_nbytes

    def _frontier(self, size: int) -> planner.Frontier:
        found = self._frontiers.get(size)
        if found is None:
            found = self._frontiers[size] = self.solve(self.fit.at(size))
        return found


def _needs(graph: Graph, lives: Lives) -> int:
    """The smallest budget for a plan."""
    peak, reserve = peak_nbytes(graph, lives), reserved_nbytes_of(graph)
    if reserve is not None:  # it knows nothing of what codecs allocate beside what they read and make
        peak += reserve(lives) - simulate(graph, lives).predicted.peak_nbytes
    return peak + planner.UNSEEN_NBYTES
