"""The plans of a graph, a smaller budget never a faster one, and the choice of the one for a budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, fingerprint, resident_text
from lightning_memopt.plan import (
    Life,
    Machine,
    Plan,
    Prediction,
    RegionPlan,
    at_least,
    early,
    fewest,
    fixed_levels,
    simulate,
    updated,
)
from lightning_memopt.solvers.recompute import bound
from lightning_memopt.units import format_nbytes

UNSEEN_NBYTES = 4096
"""Bytes left free in every budget, for scalars that no op makes (a loss read by Python, a counter)."""


_TRIES = 4
"""Maximum number of limits to try where a step reserves more than it allocates."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan of the pool.

    lives: its lives.
    predicted: their price.
    solver: name of the solver that made it.
    beside_nbytes: bytes that a budget must have beside the prediction, for what no plan sees.
    """

    lives: tuple[Life, ...]
    predicted: Prediction
    solver: str
    beside_nbytes: int = 0

    @property
    def budget_nbytes(self) -> int:
        """The smallest budget for the plan; one that rebuilds nothing needs no room for what is unseen."""
        unseen = UNSEEN_NBYTES if self.predicted.rebuilt_ops else 0
        return self.predicted.needed_nbytes + self.beside_nbytes + unseen


def with_reserved(candidate: Candidate, reserve: Callable[[tuple[Life, ...]], int] | None) -> Candidate:
    """The candidate with the bytes that the device's allocator reserves for it, where there is such an allocator."""
    if reserve is None:
        return candidate
    return replace(candidate, predicted=replace(candidate.predicted, reserved_nbytes=reserve(candidate.lives)))


@dataclass(frozen=True, eq=False)
class Frontier:
    """The Pareto set of plans of a graph.

    graph: the observed graph.
    candidates: the plans, needed bytes rising and the objective falling; the last one is the unmodified step or better.
    smallest_nbytes: the smallest budget that holds for any op times; for the times of this graph a little less may do.
    unmodified_peak_nbytes: the peak without a plan.
    moments: points of the step that prove lower bounds.
    seconds: how long solving took.
    machine: the machine that they were made for.
    smallest: a plan that reserves at most `smallest_nbytes`; None without `reserve`.
    regions: what was decided for the step's compiled regions: a part of all these plans.
    others: plans for the step that updates nothing early, where early updates take time: they may need fewer of these.
    cut_off: the time limit was over before the plans for few bytes were made: smaller ones may exist.
    """

    graph: Graph
    candidates: tuple[Candidate, ...]
    smallest_nbytes: int
    unmodified_peak_nbytes: int
    moments: tuple[bound.Moment, ...]
    seconds: float
    machine: Machine = field(default_factory=Machine)
    smallest: Candidate | None = None
    others: tuple[Candidate, ...] = ()
    cut_off: bool = False
    regions: tuple[RegionPlan, ...] = ()

    @cached_property
    def reserve(self) -> Callable[[tuple[Life, ...]], int] | None:
        """Lives of a plan -> bytes that the device's allocator reserves, which the budget is then compared with; None where the
        device has no such allocator.
        """
        return self.machine.reserve(self.graph)

    @cached_property
    def _reserving(self) -> dict[int, Candidate]:
        """Candidates by position, with their reserved bytes, as far as they were asked for."""
        return {}

    def _reserves(self, i: int) -> Candidate:
        candidate = self._reserving.get(i)
        if candidate is None:
            candidate = self._reserving[i] = with_reserved(self.candidates[i], self.reserve)
        return candidate

    def _best(self, budget_nbytes: int) -> Candidate | None:
        """The last candidate within the budget. Reserved bytes follow allocated ones closely but not strictly: where the last
        one reserves too much, the next one looked at needs less by as much; then those in between, by halves.
        """
        needs = [c.budget_nbytes for c in self.candidates]
        i = above = bisect_right(needs, budget_nbytes)
        while i:
            excess = self._reserves(i - 1).budget_nbytes - budget_nbytes
            if excess <= 0:
                break
            above, i = i - 1, min(i - 1, bisect_right(needs, needs[i - 1] - excess))
        if not i:
            last = self.smallest
            return last if last is not None and last.budget_nbytes <= budget_nbytes else None
        while above - i > 0:
            middle = (i + 1 + above) // 2
            if self._reserves(middle - 1).budget_nbytes <= budget_nbytes:
                i = middle
            else:
                above = middle - 1
        return self._reserves(i - 1)

    def within(self, budget_nbytes: int) -> Candidate:
        """The best plan whose predicted peak is within the budget. Raises InfeasibleError naming the smallest budget."""
        best = self._best(budget_nbytes)
        if best is None:
            remedy = "Give the solver more seconds, set" if self.cut_off else "Set"
            raise InfeasibleError(
                f"No plan of this model fits {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}): the smallest one "
                f"{f'of those that were found in {self.seconds:.2g} s ' if self.cut_off else ''}peaks at "
                f"{self.smallest_nbytes} bytes ({format_nbytes(self.smallest_nbytes)}). In memory when a step begins: "
                f"{resident_text(self.graph)}. "
                f"{remedy} budget={self.smallest_nbytes} or more, or make the batch smaller.",
                smallest_nbytes=self.smallest_nbytes,
                budget_nbytes=budget_nbytes,
            )
        return best

    def bound_seconds(self, budget_nbytes: int) -> float:
        """No recomputation plan within the budget takes fewer extra seconds (`bound`)."""
        return max((moment.bound_seconds(budget_nbytes) for moment in self.moments), default=0.0)

    def smallest_plan(self, most_seconds: float = math.inf) -> Plan:
        """The plan for the fewest bytes of those that take at most so many extra seconds; where all take more, the fastest."""
        plan = self.plan(self.smallest_nbytes)
        return plan if plan.predicted.seconds <= most_seconds else self.plan(self._budget_of_fast(most_seconds))

    def _budget_of_fast(self, most_seconds: float) -> int:
        """Bytes of the smallest candidate that takes at most so many extra seconds; where all take more, of the fastest."""
        fast = (i for i, c in enumerate(self.candidates) if c.predicted.seconds <= most_seconds)
        return self._reserves(next(fast, len(self.candidates) - 1)).budget_nbytes

    def plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget, with its bound. Raises InfeasibleError as `within`."""
        return replace(self._with_updates(self._plan(budget_nbytes)), regions=self.regions)

    def _plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget where all parameters are updated early that may be."""
        best = self.within(budget_nbytes)
        return Plan(
            fingerprint=fingerprint(self.graph),
            lives=best.lives,
            solver=best.solver,
            budget_nbytes=budget_nbytes,
            predicted=best.predicted,
            unmodified_peak_nbytes=self.unmodified_peak_nbytes,
            step_seconds=self.graph.step_seconds,
            solve_seconds=self.seconds,
            lower_bound_seconds=self.bound_seconds(budget_nbytes),
        )

    def _with_updates(self, plan: Plan) -> Plan:
        """The plan with its early updates. Where these take time, it is the fastest one of all plans that were found, each with
        the fewest early updates for which it fits the budget.
        """
        graph, seconds = self.graph, self.machine.update_seconds
        best = _updating(plan, early(graph), plan.predicted, seconds)
        if not seconds or not graph.updates:
            return best
        beside = self.candidates[-1].beside_nbytes
        others = sorted((*self.candidates, *self.others), key=lambda c: c.predicted.seconds)
        for candidate in (Candidate(plan.lives, plan.predicted, plan.solver, beside), *others):
            if candidate.predicted.seconds >= best.predicted.seconds:
                continue
            found = self._fewest(candidate, plan.budget_nbytes)
            if found is not None and found[1].seconds + seconds * len(found[0]) < best.predicted.seconds:
                best = _updating(replace(plan, lives=candidate.lives, solver=candidate.solver), *found, seconds)
        bound = plan.lower_bound_seconds + seconds * at_least(graph, fixed_levels(graph), plan.budget_nbytes)
        return replace(best, lower_bound_seconds=bound)

    def _fewest(self, candidate: Candidate, budget_nbytes: int) -> tuple[tuple[int, ...], Prediction] | None:
        """The fewest early updates for which these lives fit the budget, and their price; None where no tried number fits."""
        lives, line = candidate.lives, simulate(self.graph, candidate.lives)
        limit = budget_nbytes - (with_reserved(candidate, self.reserve).budget_nbytes - line.predicted.peak_nbytes)
        for _ in range(_TRIES):
            updates = fewest(self.graph, line.nbytes, limit)
            step = updated(self.graph, updates)
            more = simulate(step, lives).predicted.peak_nbytes - line.predicted.peak_nbytes
            predicted = replace(candidate.predicted, peak_nbytes=candidate.predicted.peak_nbytes + more)
            found = with_reserved(replace(candidate, predicted=predicted), self.machine.reserve(step))
            if found.budget_nbytes <= budget_nbytes:
                return updates, found.predicted
            limit -= found.budget_nbytes - budget_nbytes
        return None


def _updating(plan: Plan, updates: tuple[int, ...], predicted: Prediction, seconds: float) -> Plan:
    return replace(plan, updates=updates, predicted=replace(predicted, update_seconds=seconds * len(updates)))
