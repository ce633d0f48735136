"""Plans of a fitted step at any batch size: the largest size that some plan makes fit, and the fastest plan within a budget.

A plan is lives on the points of the step, and the points are the same at every size. So a plan that was solved at one size is
priced at another by simulating it there. With `offload` or `compress`, plans are solved and priced as in a session, at
measured rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning_memopt.batching.fit import StepFit
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, Machine, simulate
from lightning_memopt.session.parking.joint_frontier import JointFrontier, peak_nbytes
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.solvers import joint, planner
from lightning_memopt.units import ceil_div

Lives = tuple[Life, ...]
Solve = Callable[[Graph], planner.Frontier]
_ROUNDS = 4
"""Maximum number of times that the smallest plan is solved again at the largest size that the previous plan allows."""
_POOL = 32
"""Maximum number of plans of a frontier that are priced at other sizes."""


def largest(
    peak: Callable[[int], int],
    budget_nbytes: int,
    low: int,
    high: int,
    near: float = 0.0,
    known: dict[int, int] | None = None,
) -> int:
    """The largest size in [low, high] whose peak is within the budget; 0 if that of `low` is not. Peaks must not fall.

    They grow nearly on a line: two tries on it, then one in the middle.

    near: the share of the size by which it may be too small.
    known: size -> peak, of sizes that were asked about before; those that are asked about here are added.
    """
    known = {} if known is None else known

    def fits(size: int) -> bool:
        if size not in known:
            known[size] = peak(size)
        return known[size] <= budget_nbytes

    if high < low or not fits(low):
        return 0
    low = max(size for size in known if low <= size <= high and fits(size))
    tries = 0
    while True:
        above = min((size for size in known if size > low), default=None)
        beyond = high + 1 if above is None else min(above, high + 1)
        step = max(1, int(near * low))
        if beyond - low <= step:
            return low
        tries += 1
        if above is None:
            size = high
        elif tries % 3 == 0:
            size = (low + beyond) // 2
        else:
            on_line = low + (above - low) * (budget_nbytes - known[low]) // max(1, known[above] - known[low])
            size = min(max(on_line - step // 4, low + step), beyond - 1)
        if fits(size):
            low = size


class Plans:
    """Plans that rebuild tensors, at any batch size.

    fit: the step at any batch size.
    solve: graph -> frontier, as a session calls the planner for this machine.
    """

    def __init__(self, fit: StepFit, solve: Solve, machine: Machine | None = None) -> None:
        self.fit, self.solve, self.machine = fit, solve, machine or Machine()
        self._pool: list[tuple[Lives, float]] = []

    def largest(self, fitting_size: int, cap: int, budget_nbytes: int) -> int:
        """The largest size, at most `cap`, for which a plan fits; 0 if there is none.

        `fitting_size` is a size that fits, or 0. The smallest plan of one size may also fit larger sizes; solved again at the
        largest of those, it may fit even larger ones.
        """

        size = fitting_size
        for _ in range(_ROUNDS):
            if size >= cap:
                break
            start = max(size, 1)
            larger_size = largest(partial(self.needs, lives=self.smallest(start)), budget_nbytes, start, cap)
            if larger_size <= size:
                break
            size = larger_size
        # the smallest plan of a size itself may need less than the smallest plan of the size below it
        while size < cap and self.needs(size + 1, self.smallest(size + 1)) <= budget_nbytes:
            size += 1
        return size

    def needs(self, size: int, lives: Lives) -> int:
        """The smallest budget, in bytes, that the plan with these lives needs at this size."""
        return _needs(self.fit.at(size), lives, self.machine)

    def smallest(self, size: int) -> Lives:
        """The lives of a plan that needs few bytes at this size."""
        return planner.smallest(self.fit.at(size), self.machine).lives

    def fastest(self, size: int, budget_nbytes: int) -> tuple[float, int] | None:
        """(extra seconds, needed bytes) of the fastest plan within the budget at this size; None if no plan fits.

        The plans of one frontier, solved at the first size that was asked for, are priced at this size.
        """
        graph = self.fit.at(size)
        best: tuple[float, int] | None = None
        for lives, overhead in self._pooled(size):
            try:
                seconds = simulate(graph, lives).predicted.seconds + overhead
            except LoweringError:
                continue
            if best is None or seconds < best[0]:
                needs = self.needs(size, lives)
                if needs <= budget_nbytes:
                    best = (seconds, needs)
        if best is not None:
            return best
        lives = self.smallest(size)  # the pooled plans were solved at another size, so a plan solved at this size may still fit
        needs = self.needs(size, lives)
        return (simulate(graph, lives).predicted.seconds, needs) if needs <= budget_nbytes else None

    def _pooled(self, size: int) -> list[tuple[Lives, float]]:
        """(lives, seconds that recording takes) of plans, solved once, at the first size that is asked for."""
        if not self._pool:
            smallest = planner.smallest(self.fit.at(size), self.machine)
            candidates = self.solve(self.fit.at(size)).candidates
            pooled = (*candidates[:: ceil_div(len(candidates), _POOL)], smallest)
            self._pool = [(plan.lives, plan.predicted.overhead_seconds) for plan in pooled]
        return self._pool


class EitherPlans:
    """Plans of the step as it is, and of the step whose loss head runs in tiles: at each size, the better ones.

    plain, tiled: these plans.
    """

    def __init__(self, plain: Plans, tiled: Plans) -> None:
        self.plain, self.tiled = plain, tiled

    def largest(self, fitting_size: int, cap: int, budget_nbytes: int) -> int:
        """See `Plans.largest`."""
        return max(plans.largest(fitting_size, cap, budget_nbytes) for plans in (self.plain, self.tiled))

    def fastest(self, size: int, budget_nbytes: int) -> tuple[float, int] | None:
        """See `Plans.fastest`. Seconds are those beyond the step as it is."""
        plain, tiled = (plans.fastest(size, budget_nbytes) for plans in (self.plain, self.tiled))
        if tiled is None:
            return plain
        as_it_is, in_tiles = (sum(op.seconds for op in plans.fit.at(size).ops) for plans in (self.plain, self.tiled))
        seconds, nbytes = tiled
        tiled = seconds + in_tiles - as_it_is, nbytes
        return tiled if plain is None else min(plain, tiled)


class ParkingPlans(Plans):
    """Plans that rebuild tensors, or park them in the forms that `offloading` allows. `solve` gives frontiers of such plans."""

    def __init__(self, fit: StepFit, solve: Solve, offloading: Offloading, machine: Machine | None = None) -> None:
        super().__init__(fit, solve, machine)
        self.offloading = offloading
        self._frontiers: dict[int, planner.Frontier] = {}

    def needs(self, size: int, lives: Lives) -> int:
        return _needs(self.fit.at(size), self.resized(size, lives), self.machine)

    def resized(self, size: int, lives: Lives) -> Lives:
        """The lives, which may come from another size, with the bytes that parked tensors take at this size."""
        forms = self.offloading.forms(self.fit.at(size))

        def nbytes(life: Life) -> int:
            return dict(forms.get(life.tensor, ())).get(life.form, life.parked_nbytes)

        return tuple(replace(life, parked_nbytes=nbytes(life)) if life.how == "fetch" else life for life in lives)

    def smallest(self, size: int) -> Lives:
        frontier, graph = self._frontier(size), self.fit.at(size)
        plans = [c.lives for c in frontier.candidates]
        least = frontier.least if isinstance(frontier, JointFrontier) else None
        if least is None:
            forms, needs = self.offloading.forms(graph), partial(_needs, graph, machine=self.machine)
            least = joint.least(graph, plans, forms, needs, self.offloading.limits)[1]
        return min((least, plans[0]), key=lambda lives: _needs(graph, lives, self.machine))

    def fastest(self, size: int, budget_nbytes: int) -> tuple[float, int] | None:
        try:
            predicted = self._frontier(size).plan(budget_nbytes).predicted
        except InfeasibleError:
            return None
        return predicted.seconds, predicted.needed_nbytes

    def _frontier(self, size: int) -> planner.Frontier:
        frontier = self._frontiers.get(size)
        if frontier is None:
            frontier = self.solve(self.fit.at(size))
            self._frontiers[size] = frontier
        return frontier


def _needs(graph: Graph, lives: Lives, machine: Machine) -> int:
    """The smallest budget, in bytes, that the plan with these lives needs."""
    peak, reserve = peak_nbytes(graph, lives), machine.reserve(graph)
    if reserve is not None:  # the allocator's model does not know the workspaces of codecs, which `peak_nbytes` includes
        peak += reserve(lives) - simulate(graph, lives).predicted.peak_nbytes
    return peak + planner.UNSEEN_NBYTES
