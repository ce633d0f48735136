"""How much of what rests a step parks: optimizer state, gradients and weights. A run and `memopt fit` both ask here.

In: a step, what may be parked in it, a budget, and a function that solves for a step in which some of it is parked. Out: what
was solved. First all of it is parked, with copies that run while the step computes and, if it still waits long, without. If
that keeps the budget, as little is parked as makes the step fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan, fixed_levels, simulate, updated
from lightning_memopt.plan.resting import Parked, Rests
from lightning_memopt.plan.states import Chunks, StateOf
from lightning_memopt.plan.states import parked as in_chunks
from lightning_memopt.plan.weights import UnitOf
from lightning_memopt.solvers.frontier import Frontier, with_reserved
from lightning_memopt.solvers.staying import least_parked, share_parked

_ENOUGH = 1.1
"""Nothing more is solved for if a plan takes this many times the seconds of what rests, and no more."""


@dataclass(frozen=True)
class Tried:
    """What was solved for a step in which something is parked, or nothing.

    parked: this step.
    frontier: its plans; None where it was refused.
    fits: whether its plan keeps the budget.
    seconds: what the plan takes beyond the unmodified step.
    nbytes: the smallest budget for it.
    """

    parked: Parked
    frontier: Frontier | None = None
    fits: bool = False
    seconds: float = math.inf
    nbytes: float = math.inf


T = TypeVar("T", bound=Tried)


def by_seconds(each: Tried) -> tuple[int, float]:
    """Those that fit first, the fastest first; then the smallest."""
    return (0, each.seconds) if each.fits else (1, each.nbytes)


@dataclass(frozen=True, eq=False)
class Parking(Generic[T]):
    """The choice of what a step parks.

    graph: the step, with nothing parked.
    chunks: gives the chunks of its update after backward, if this is parked.
    overlaps: whether it computes while weights are copied.
    solve: solves for the step with something parked. If a plan is known that may run then, it gets that, too.
    """

    graph: Graph
    chunks: Callable[[Rests], Chunks]
    overlaps: bool
    solve: Callable[[Parked, Plan | None], T]

    def parked(self, rests: Rests, tier_nbytes: int | None = None) -> Parked:
        """The step with this parked, as far as the tier has room for it: None: for all."""
        parked = Parked.of(self.graph, rests, self.chunks(rests) if rests else ())
        some = parked.rests.within(tier_nbytes)
        return parked if len(some) == len(rests) else self.parked(some)

    def within(self, parked: Parked, limit_nbytes: int, whole: Sequence[T] = ()) -> list[T]:
        """What was solved to keep the limit, in bytes: `whole`, in which nothing is parked, and steps in which all of `parked`
        is or some of it.
        """
        tries = [*whole, *self._some(parked, limit_nbytes)]
        if parked.rests.states and min(tries, key=by_seconds).parked.rests.units:
            states = self.parked(parked.rests.only(parked.rests.states))  # which move less often than weights that are trained
            if max(fixed_levels(states.graph)) <= limit_nbytes:
                tries += self._some(states, limit_nbytes)
        return tries

    def smallest(self, parked: Parked, whole: T, most_seconds: float) -> T:
        """The smallest step that takes no more seconds beyond the unmodified one. `whole`: with nothing parked."""
        tries = [whole, self.solve(parked, None)]
        ahead = self._ahead(parked) if tries[-1].seconds > most_seconds else None
        if ahead is not None:
            tries.append(self.solve(ahead, None))
        return min(tries, key=lambda each: (each.seconds > most_seconds, each.nbytes))

    def least_seconds(self, parked: Parked, limit_nbytes: float) -> float:
        """No step within the limit takes fewer extra seconds: whatever is rebuilt, what rests must make room for the rest of
        the step. `parked`: without copies that run while the step computes.
        """
        levels = fixed_levels(in_chunks(self.graph, (), ()))  # an update in chunks takes little beside
        excess = max(0, max(levels, default=0) - limit_nbytes)
        copies = excess * min(_surely_seconds(each) / each.parking.nbytes for each in parked.rests.by_price())
        return max(0.0, copies - self.graph.step_seconds) if self.overlaps else copies

    def _some(self, parked: Parked, limit_nbytes: int) -> list[T]:
        """With all of this parked and, if that keeps the limit, with as much as makes the step fastest."""
        ahead = self._ahead(parked)
        tries = [] if ahead is None else [self.solve(ahead, None)]
        if not tries or not tries[0].fits or tries[0].seconds > parked.rests.seconds:
            tries.append(self.solve(parked, None))
        best = min(tries, key=by_seconds)
        if best.frontier is None or not best.fits:
            return tries
        found = self._least(best.frontier, best.parked, limit_nbytes)
        if found is not None:
            tries.append(self._solved(*found))
        if not tries[-1].fits or tries[-1].seconds > _ENOUGH * tries[-1].parked.rests.seconds:  # saved tensors cost much, too
            found = share_parked(best.frontier, best.parked, limit_nbytes)
            if found is not None:
                tries.append(self._solved(*found))
        return tries

    def _solved(self, some: Rests, plan: Plan) -> T:
        return self.solve(self.parked(some), plan)

    def _ahead(self, parked: Parked) -> Parked | None:
        """The same, with copies that run while the step computes; None where that hides nothing."""
        if not parked.rests or not self.overlaps:
            return None
        ahead = Parked.of(self.graph, replace(parked.rests, ahead=True), parked.chunks)
        return ahead if ahead.rests.units or any(state.leaves_before for state in ahead.rests.parked_states) else None

    def _least(self, frontier: Frontier, parked: Parked, limit_nbytes: int) -> tuple[Rests, Plan] | None:
        """As `least_parked`."""

        def needed_nbytes(some: Rests, plan: Plan) -> int:
            step = updated(self.parked(some).graph, plan.updates)
            candidate = replace(frontier.candidate_of(plan), predicted=simulate(step, plan.lives).predicted)
            return with_reserved(candidate, frontier.machine.reserve(step)).least_budget_nbytes

        return least_parked(frontier, parked, limit_nbytes, needed_nbytes)


def _surely_seconds(each: StateOf | UnitOf) -> float:
    """Seconds of its copies, less those that other state's may hide."""
    return each.parking.copy_seconds - (each.back_seconds if isinstance(each, StateOf) else 0.0)
