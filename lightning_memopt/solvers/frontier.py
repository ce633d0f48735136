"""The frontier: plans of a graph, each slower but smaller than the next, and the choice of the one for a budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, fingerprint, resident_text
from lightning_memopt.plan import (
    Life,
    Machine,
    Plan,
    Prediction,
    RegionPlan,
    TiledHead,
    at_least,
    early,
    fewest,
    fixed_levels,
    simulate,
    updated,
)
from lightning_memopt.plan.resting import Rests, with_rest
from lightning_memopt.plan.tiers import tier_budgets_text
from lightning_memopt.solvers.recompute import bound
from lightning_memopt.units import format_nbytes

UNSEEN_NBYTES = 4096
"""Bytes left free in every budget, for scalars that no recorded op makes (a loss read by Python, a counter)."""


_TRIES = 4
"""Maximum number of limits to try if a step reserves more than it allocates."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that was found.

    lives: its lives.
    predicted: its predicted cost.
    solver: name of the solver that made it.
    beside_nbytes: bytes that a budget must have in addition to the prediction, for memory that no plan knows about.
    """

    lives: tuple[Life, ...]
    predicted: Prediction
    solver: str
    beside_nbytes: int = 0

    @property
    def least_budget_nbytes(self) -> int:
        """The smallest budget for the plan. A plan that rebuilds nothing needs no reserve for unseen memory."""
        unseen = UNSEEN_NBYTES if self.predicted.rebuilt_ops else 0
        return self.predicted.needed_nbytes + self.beside_nbytes + unseen

    @property
    def beside_peak_nbytes(self) -> int:
        """Bytes of this budget beside the peak: what the device's allocator reserves in addition, too."""
        return self.least_budget_nbytes - self.predicted.peak_nbytes


def with_reserved(candidate: Candidate, reserve: Callable[[tuple[Life, ...]], int] | None) -> Candidate:
    """The candidate with the bytes that the device's allocator reserves for it, if the device has such an allocator."""
    if reserve is None:
        return candidate
    return replace(candidate, predicted=replace(candidate.predicted, reserved_nbytes=reserve(candidate.lives)))


@dataclass(frozen=True, eq=False)
class Frontier:
    """The Pareto set of plans of a graph.

    graph: the observed graph.
    candidates: the plans, sorted so that needed bytes rise and the objective falls. The last one is at least as good as the
        unmodified step.
    smallest_nbytes: the smallest budget that works whatever ops take. With the times of this graph, slightly less may work.
    unmodified_peak_nbytes: the peak without a plan.
    moments: points of the step at which lower bounds are proven.
    seconds: how long solving took.
    machine: the machine that the plans were made for.
    smallest: a plan that reserves at most `smallest_nbytes`; None without `reserve`.
    searched: whether plans were searched for. If not, the only plan is one that was known.
    regions: what was decided for the step's compiled regions. It is part of each of these plans.
    tiles: the loss heads that run in tiles in the observed step, and so under each of these plans.
    rests: what rests and is parked in the step of this graph, and so under each of these plans.
    whole: the step as it was observed, with nothing of that parked; None where `graph` is that step.
    tier_limits: the most bytes of each tier that a plan with all that is parked may take, with their names.
    others: plans made for the step without early updates, if early updates take time. They may need fewer early updates.
    cut_off: whether time ran out before the plans for few bytes were made. If so, smaller plans may exist.
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
    searched: bool = True
    regions: tuple[RegionPlan, ...] = ()
    tiles: tuple[TiledHead, ...] = ()
    rests: Rests = field(default_factory=Rests)
    whole: Graph | None = None
    tier_limits: tuple[tuple[str, int], ...] = ()

    @cached_property
    def reserve(self) -> Callable[[tuple[Life, ...]], int] | None:
        """A function from the lives of a plan to the bytes that the device's allocator reserves, which are then compared with
        the budget; None if the device has no such allocator.
        """
        return self.machine.reserve(self.graph)

    @cached_property
    def _reserving(self) -> dict[int, Candidate]:
        """Cache: the position of a candidate -> the candidate with its reserved bytes."""
        return {}

    def _reserves(self, i: int) -> Candidate:
        candidate = self._reserving.get(i)
        if candidate is None:
            candidate = self._reserving[i] = with_reserved(self.candidates[i], self.reserve)
        return candidate

    def _best(self, budget_nbytes: int) -> Candidate | None:
        """The last candidate within the budget. Reserved bytes follow allocated bytes closely but not strictly. If a candidate
        reserves too much, the next one tried needs fewer bytes by that excess; then bisection finds the last one that fits.
        """
        needs = [c.least_budget_nbytes for c in self.candidates]
        i = above = bisect_right(needs, budget_nbytes)
        while i:
            excess = self._reserves(i - 1).least_budget_nbytes - budget_nbytes
            if excess <= 0:
                break
            above, i = i - 1, min(i - 1, bisect_right(needs, needs[i - 1] - excess))
        if not i:
            last = self.smallest
            return last if last is not None and last.least_budget_nbytes <= budget_nbytes else None
        while above - i > 0:
            middle = (i + 1 + above) // 2
            if self._reserves(middle - 1).least_budget_nbytes <= budget_nbytes:
                i = middle
            else:
                above = middle - 1
        return self._reserves(i - 1)

    def within(self, budget_nbytes: int) -> Candidate:
        """The best plan whose predicted peak is within the budget. Raises InfeasibleError, which names the smallest budget."""
        best = self._best(budget_nbytes)
        if best is None:
            raise self.refusal(budget_nbytes)
        return best

    def candidate_of(self, plan: Plan) -> Candidate:
        """A plan of this frontier as a candidate."""
        return Candidate(plan.lives, plan.predicted, plan.solver, self.candidates[-1].beside_nbytes)

    def refusal(self, budget_nbytes: int, tiers: Mapping[str, int] = MappingProxyType({})) -> InfeasibleError:
        """The error for a budget that no plan fits. `tiers`: the budget of a tier that would be enough, too."""
        remedy = "Give the solver more seconds, set" if self.cut_off else "Set"
        return InfeasibleError(
            f"No plan of this model fits {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}): the smallest one "
            f"{f'of those that were found in {self.seconds:.2g} s ' if self.cut_off else ''}peaks at "
            f"{self.smallest_nbytes} bytes ({format_nbytes(self.smallest_nbytes)}). In memory when a step begins: "
            f"{resident_text(self.graph)}. "
            f"{remedy} budget={self.smallest_nbytes} or more{tier_budgets_text(tiers)}, or make the batch smaller.",
            smallest_nbytes=self.smallest_nbytes,
            budget_nbytes=budget_nbytes,
            tiers=tiers,
        )

    def bound_seconds(self, budget_nbytes: int) -> float:
        """No recomputation plan within the budget takes fewer extra seconds (`bound`)."""
        return max((moment.bound_seconds(budget_nbytes) for moment in self.moments), default=0.0)

    def smallest_plan(self, most_seconds: float = math.inf) -> Plan:
        """The plan with the fewest bytes among those that take at most `most_seconds` extra; the fastest plan if all take
        more.
        """
        plan = self.plan(self.smallest_nbytes)
        return plan if plan.predicted.seconds <= most_seconds else self.plan(self._budget_of_fast(most_seconds))

    def _budget_of_fast(self, most_seconds: float) -> int:
        """Bytes of the smallest candidate that takes at most `most_seconds` extra; those of the fastest if all take more."""
        fast = (i for i, c in enumerate(self.candidates) if c.predicted.seconds <= most_seconds)
        return self._reserves(next(fast, len(self.candidates) - 1)).least_budget_nbytes

    def plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget, with its bound. Raises InfeasibleError as `within`."""
        return self._whole(self._plan(budget_nbytes))

    def known_plan(self, budget_nbytes: int) -> Plan:
        """As `plan`, of the plans that were made already: a frontier that also parks would search for another one."""
        return self._whole(Frontier._plan(self, budget_nbytes))

    def _whole(self, plan: Plan) -> Plan:
        """With all that was decided beside the lives."""
        plan = replace(self._with_updates(plan), regions=self.regions, tiles=self.tiles, tier_limits=self.tier_limits)
        return with_rest(plan, self.graph, self.rests)

    def _plan(self, budget_nbytes: int) -> Plan:
        """The plan for a budget if every parameter that may be updated early is."""
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
        """The plan with its early updates. If early updates take time, each plan that was found gets the fewest with which it
        fits the budget, and the fastest of these plans is returned.
        """
        graph, seconds = self.graph, self.machine.update_seconds
        best = _updating(plan, early(graph), plan.predicted, seconds)
        if not seconds or not graph.updates:
            return best
        others = sorted((*self.candidates, *self.others), key=lambda c: c.predicted.seconds)
        for candidate in (self.candidate_of(plan), *others):
            if candidate.predicted.seconds >= best.predicted.seconds:
                continue
            found = self._fewest(candidate, plan.budget_nbytes)
            if found is not None and found[1].seconds + seconds * len(found[0]) < best.predicted.seconds:
                best = _updating(replace(plan, lives=candidate.lives, solver=candidate.solver), *found, seconds)
        bound = plan.lower_bound_seconds + seconds * at_least(graph, fixed_levels(graph), plan.budget_nbytes)
        return replace(best, lower_bound_seconds=bound)

    def _fewest(self, candidate: Candidate, budget_nbytes: int) -> tuple[tuple[int, ...], Prediction] | None:
        """The fewest early updates with which these lives fit the budget, and their price; None if no number that was tried
        fits.
        """
        if candidate.least_budget_nbytes > budget_nbytes:  # even if all updates are early
            return None
        whole = with_reserved(candidate, self.reserve)  # takes long
        if whole.least_budget_nbytes > budget_nbytes:
            return None
        lives, line = candidate.lives, simulate(self.graph, candidate.lives)
        limit = budget_nbytes - (whole.least_budget_nbytes - line.predicted.peak_nbytes)
        for _ in range(_TRIES):
            updates = fewest(self.graph, line.nbytes, limit)
            step = updated(self.graph, updates)
            more = simulate(step, lives).predicted.peak_nbytes - line.predicted.peak_nbytes
            predicted = replace(candidate.predicted, peak_nbytes=candidate.predicted.peak_nbytes + more)
            found = with_reserved(replace(candidate, predicted=predicted), self.machine.reserve(step))
            if found.least_budget_nbytes <= budget_nbytes:
                return updates, found.predicted
            limit -= found.least_budget_nbytes - budget_nbytes
        return None


def _updating(plan: Plan, updates: tuple[int, ...], predicted: Prediction, seconds: float) -> Plan:
    return replace(plan, updates=updates, predicted=replace(predicted, update_seconds=seconds * len(updates)))
