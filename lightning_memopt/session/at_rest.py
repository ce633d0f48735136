"""What rests most of a step, and may be elsewhere meanwhile: optimizer state, gradients and weights. A session parks some.

A step is solved for as it is, and with everything parked that can be. If only the second keeps the budget, or keeps it in less
time, as much is parked as makes the step fastest.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import nn, optim

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Plan, StateParking, WeightParking, simulate, states_text, updated, weights_text
from lightning_memopt.plan.resting import Rests, with_rest
from lightning_memopt.plan.simulate import fixed_levels
from lightning_memopt.plan.states import StateOf, parked
from lightning_memopt.plan.tiers import tier_budget
from lightning_memopt.plan.weights import UnitOf
from lightning_memopt.runtime.early_updates import EarlyUpdates
from lightning_memopt.runtime.parked_weights import copies_overlap
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.accumulated import Kept
from lightning_memopt.session.observe.resident import Named, resident_nbytes
from lightning_memopt.session.parked_states import StatesAtRest
from lightning_memopt.session.parked_weights import WeightsAtRest
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.session.solve.refusals import refuse_hopeless
from lightning_memopt.session.solve.solving import IN_FORCE, NONE_SMALLER, SOLVING, Solved, say_in_force
from lightning_memopt.session.worth import most_extra_seconds
from lightning_memopt.solvers.frontier import UNSEEN_NBYTES, Frontier
from lightning_memopt.solvers.staying import SHARES, least_parked

Say = Callable[[str], None]
Solve = Callable[[Graph, Say], Solved]
_RECENT = 8
"""Steps whose plans are remembered: what they park stays away in a step that has no use for it."""
_ENOUGH = 1.1
"""Nothing more is solved for if a plan takes this many times the seconds of what rests, and no more."""


@dataclass(frozen=True)
class _Try:
    """What was solved for a step in which this is parked.

    solved: None where it was refused.
    refusal: what was raised then, made anew: an error's frames would hold the batch.
    lines: what was to be said.
    """

    rests: Rests
    solved: Solved | None
    refusal: InfeasibleError | None
    lines: tuple[str, ...]

    @classmethod
    def of(cls, solve: Solve, graph: Graph, rests: Rests, say: Say, whole: Graph | None = None) -> _Try:
        """`whole`: the step with nothing parked, if this is another one. `say`: tells the user what takes time."""
        lines: list[str] = []

        def later(line: str) -> None:
            say(line) if line.startswith(SOLVING) else lines.append(line)

        try:
            solved = solve(graph, later)
        except InfeasibleError as error:
            smallest, budget, tiers = error.smallest_nbytes, error.budget_nbytes, error.tiers
            refusal = InfeasibleError(str(error), smallest_nbytes=smallest, budget_nbytes=budget, tiers=tiers)
            return cls(rests, None, refusal, tuple(lines))
        if rests and whole is not None:
            unmodified_nbytes = max(unmodified_levels(whole), default=0)
            plan = replace(with_rest(solved.plan, graph, rests), unmodified_peak_nbytes=unmodified_nbytes)
            frontier = replace(solved.frontier, rests=rests, whole=whole, unmodified_peak_nbytes=unmodified_nbytes)
            solved = solved._replace(plan=plan, frontier=frontier)
        return cls(rests, solved, None, tuple(lines))

    @property
    def fits(self) -> bool:
        return self.solved is not None and self.solved.above is None

    @property
    def seconds(self) -> float:
        return math.inf if self.solved is None else self.solved.plan.predicted.seconds

    @property
    def nbytes(self) -> float:
        """Bytes of the smallest budget for it."""
        if self.solved is None:
            return math.inf if self.refusal is None or self.refusal.smallest_nbytes is None else self.refusal.smallest_nbytes
        return self.solved.plan.budget_nbytes

    @property
    def tiers(self) -> Mapping[str, int]:
        """Budgets of tiers that are enough for it, where the budget of the device is not kept."""
        if self.solved is None:
            return {} if self.refusal is None else self.refusal.tiers
        return self.solved.tiers

    def told(self, tiers: Mapping[str, int]) -> _Try:
        """The same, which is not within the budget, and says that one would be with these budgets of tiers."""
        if not tiers or tiers == self.tiers:
            return self
        words = " and ".join(map(tier_budget, tiers.items()))
        if self.solved is not None:
            return replace(self, solved=self.solved._replace(above=f"{self.solved.above} Or set {words}.", tiers=tiers))
        old = self.refusal
        assert old is not None
        smallest, budget = old.smallest_nbytes, old.budget_nbytes
        refusal = InfeasibleError(f"{old} Or set {words}.", smallest_nbytes=smallest, budget_nbytes=budget, tiers=tiers)
        return replace(self, refusal=refusal)

    def bounded(self, seconds: float) -> _Try:
        """The same, with a bound on the seconds of all plans that park any of what rests."""
        if self.solved is None:
            return self
        plan = self.solved.plan
        plan = replace(plan, lower_bound_seconds=min(seconds, plan.lower_bound_seconds))
        return replace(self, solved=self.solved._replace(plan=plan))


class AtRest(Part):
    """What a session parks of what rests.

    states, weights: the parts that move it.
    park_more: parks weights where the device has no memory for an observed step (`WeightsAtRest`); None if nothing is parked.
    steps, planned_nbytes: the steps of the plans in force so far, and the bytes that they moved, out and back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        offloading: Offloading,
        alone: Callable[[], bool],
        say: Say,
        parts: Parts,
        written: AbstractSet[int],
        kept: Kept,
    ) -> None:
        """`alone`: whether no other process trains the model. `parts`: those of the session; it is one if a plan may park.
        `written`: identities of the storages that ops of observed steps wrote to. `kept`: their gradients that cannot be
        parked.
        """
        # first, so that weights come home before what was made later, for which the device may have no room
        self.weights = WeightsAtRest(model, offloading, alone, say, parts, written)
        self.states = StatesAtRest(model, optimizers, offloading, alone, say, parts, kept)
        self.weights.in_chunks = self.states.in_chunks
        self.park_more = self.weights.park_more if offloading.tier else None
        self._offloading = offloading
        self._observed: tuple[StateParking, ...] = ()
        self._recent = deque[list[Plan]](maxlen=_RECENT)  # of the last steps
        self._moved_nbytes = 0  # until it ended
        self.steps = self.planned_nbytes = 0
        if offloading.tier:
            parts.add(self)

    # -- moments of a step -------------------------------------------------------------------------

    def begins(self, tensors: Sequence[Named], budget_nbytes: int) -> None:
        """The first step is about to be observed. `tensors`: those that are there. If they exceed the budget, all frozen
        weights that can be are parked before it. If they do together with gradients and the state that updates will make, all
        state and gradients that can be are parked in observed steps, too. Raises InfeasibleError if the others exceed the
        budget.
        """
        device, headroom = self._offloading.device, self._offloading.config.headroom
        self.weights.tell_of_placed()
        units = self.weights.may_be_parked() if self._offloading.tier else {}
        resident, limit = resident_nbytes(tensors, device), budget_nbytes - headroom
        if units and resident > limit:
            self.weights.put_modules(tuple(units))
        states = self.states.all_of(kind_of(device.type).allocated_nbytes)
        gradients = sum(t.nbytes for t, kind, _ in tensors if kind == "parameter" and t.requires_grad)
        if resident + gradients + sum(state.nbytes for state in states if state.what == "state") > limit:
            self._observed = states
        refuse_hopeless(tensors, device, budget_nbytes, headroom)

    def step_begins(self, state: object, limit_nbytes: int | None) -> None:
        if isinstance(state, Running):
            self._put(state)
        else:
            self.states.put(self._observed, self.weights.parked)

    def step_ended(self, planned: Sequence[object]) -> None:
        before = self._recent[-1] if self._recent else []
        plans = [state.plan for state in planned if isinstance(state, Running)]
        self._recent.append(plans)
        moved_nbytes = self.moved_nbytes
        if [*map(id, before)] != [*map(id, plans)]:  # this step has also moved what the ones before had elsewhere
            self.steps = self.planned_nbytes = 0
        elif plans:
            self.steps += 1
            self.planned_nbytes += moved_nbytes - self._moved_nbytes
        self._moved_nbytes = moved_nbytes

    def between_steps(self, state: object) -> None:
        if isinstance(state, Running):
            self._put(state)

    def _put(self, state: Running) -> None:
        """What the plan of this state parks, is parked from now on. If a step has several forwards, each with a backward and a
        plan of its own, or steps take turns (batches of two shapes, a GAN), what another plan parks stays away, too, as far as
        the tier has room for both.
        """
        plan, limit = state.plan, self._offloading.limit_nbytes
        plans = [*{id(other): other for others in self._recent for other in others if other is not plan}.values(), plan]
        states = {(each.what, each.parameter): each for other in plans for each in other.states}
        weights = {each.module: each for other in plans for each in other.weights}
        more_nbytes = _tier_nbytes((*states.values(), *weights.values())) - _tier_nbytes((*plan.states, *plan.weights))
        if limit is None or plan.predicted.tier_nbytes + more_nbytes <= limit:
            self.weights.put(tuple(weights.values()))
            self.states.put(tuple(states.values()), self.weights.parked)
        else:
            self.weights.put(plan.weights)
            self.states.put(plan.states, self.weights.parked)

    def also_in_backward(self, updates: EarlyUpdates | None) -> None:
        """These updates read state, and write weights, too."""
        if updates is not None and self._offloading.tier:
            updates.around = self._updating

    def _updating(self, p: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Around the update of a parameter in backward."""
        if self.weights.parked is not None:
            self.weights.parked.is_updated(p)
        return self.states.updating(p)

    @property
    def moved_nbytes(self) -> int:
        """Bytes that steps have moved, out and back."""
        return self.states.moved_nbytes + self.weights.moved_nbytes

    # -- the plan ----------------------------------------------------------------------------------

    def solved(self, solve: Solve, limit_nbytes: int | None, say: Say, graph: Graph) -> Solved:
        """Solve for the step of this graph, and park what rests where that is better (see the module). `say` tells the user a
        line. Raises InfeasibleError as `solve` does.
        """
        self._offloading.measures_after(graph)
        self._offloading.look_for_room(self.states.tier_nbytes + self.weights.tier_nbytes)
        found = Rests(tuple(self.states.found(graph)), tuple(self.weights.found(graph)))
        rests, most_in_tier = self._that_fit(graph, found), self._offloading.limit_nbytes
        hopeless = rests and limit_nbytes is not None and max(fixed_levels(graph), default=0) > limit_nbytes
        whole = _Try(Rests(), None, None, ()) if hopeless else _Try.of(solve, graph, Rests(), say)  # solving takes minutes
        if limit_nbytes is None or not whole.fits:
            self._tell_of_others(graph)
        if not rests or (whole.fits and whole.seconds == 0 and limit_nbytes is not None):
            return self._chosen(say, graph, whole)

        tried = partial(self._tried, solve, say, graph)
        if limit_nbytes is None:
            return self._chosen(say, graph, self._smallest_of(graph, rests, whole, tried))
        tries = self._within(graph, rests, limit_nbytes, [] if hopeless else [whole], tried)
        if most_in_tier is None or any(each.fits for each in tries):
            return self._chosen(say, graph, min(tries, key=_by_seconds))
        if any(each.tiers for each in tries):  # what rests takes room from saved tensors
            tries.append(tried(self._priced(graph, rests.within(most_in_tier // 2))))
        more = [] if len(rests) == len(found) else [tried(found)]  # for which the tier has no room
        enough = {self._offloading.tier: found.tier_nbytes} if any(each.fits for each in more) else {}
        tiers = min((*(each.tiers for each in (*tries, *more)), enough), key=_by_bytes)
        return self._chosen(say, graph, min(tries, key=_by_seconds).told(tiers))

    def _tried(self, solve: Solve, say: Say, graph: Graph, rests: Rests) -> _Try:
        """What was solved for the step of this graph with this parked."""
        with self._offloading.beside(rests.tier_nbytes):
            return _Try.of(solve, self._in_step(graph, rests), rests, say, graph)

    def _smallest_of(self, graph: Graph, rests: Rests, whole: _Try, tried: Callable[[Rests], _Try]) -> _Try:
        """The smallest step that is fast enough. `whole`: with nothing parked."""
        most = most_extra_seconds(graph, self._offloading.config)
        tries = [whole, tried(rests)]
        ahead = self._ahead(graph, rests) if tries[-1].seconds > most else None
        if ahead is not None:
            tries.append(tried(ahead))
        smallest = min(tries, key=lambda each: (each.seconds > most, each.nbytes))
        if smallest.solved is None:
            return smallest
        overlap = copies_overlap(self._offloading.device)
        return smallest.bounded(_least_seconds(graph, rests, overlap, smallest.solved.plan.budget_nbytes))

    def _within(
        self, graph: Graph, rests: Rests, limit_nbytes: int, whole: list[_Try], tried: Callable[[Rests], _Try]
    ) -> list[_Try]:
        """`whole`, and what `_parking` finds, also without weights."""
        tries = [*whole, *self._parking(graph, rests, limit_nbytes, tried)]
        overlap = copies_overlap(self._offloading.device)
        if rests.states and min(tries, key=_by_seconds).rests.units:
            states = self._priced(graph, rests.only(rests.states))  # which move less often than weights that are trained
            if max(fixed_levels(self._in_step(graph, states))) <= limit_nbytes:
                tries += self._parking(graph, states, limit_nbytes, tried)
        least = _least_seconds(graph, rests, overlap, limit_nbytes)
        return [each.bounded(least) for each in tries]

    def _parking(self, graph: Graph, rests: Rests, limit_nbytes: int, tried: Callable[[Rests], _Try]) -> list[_Try]:
        """With all of this parked and, if that fits the limit, with as much as makes the step fastest."""
        ahead = self._ahead(graph, rests)
        tries = [] if ahead is None else [tried(ahead)]
        if not tries or not tries[0].fits or tries[0].seconds > rests.seconds:
            tries.append(tried(rests))
        best = min(tries, key=_by_seconds)
        if best.solved is None or not best.fits:
            return tries
        some = self._enough(graph, best.solved.frontier, best.rests, limit_nbytes)
        if len(some) < len(rests):
            tries.append(tried(self._priced(graph, some)))
        if not tries[-1].fits or tries[-1].seconds > _ENOUGH * tries[-1].rests.seconds:  # saved tensors cost much, too
            others = _fastest(best.solved.frontier, best.rests, limit_nbytes)
            if len(others) < len(rests):
                tries.append(tried(self._priced(graph, others)))
        return tries

    def smallest(self, graph: Graph, all_of_it: bool = False, early: AbstractSet[str] = frozenset()) -> tuple[Graph, int]:
        """The step of this graph with everything parked that the tier has room for, as the first update will make it, and the
        bytes that this takes there. `all_of_it`: with everything that can be. `early`: names of the parameters that are updated
        early, of which the graph does not say it yet.
        """
        found = Rests(tuple(self.states.found(graph, timed=False)), tuple(self.weights.found(graph, timed=False)))
        states = (s for s in found.states if s.parking.what == "state" or s.parking.parameter not in early)
        found = replace(found, states=tuple(states))
        self._tell_of_others(graph)
        rests = found if all_of_it else found.within(self._offloading.limit_nbytes)
        if not rests:  # the rehearsal of chunks takes long
            return graph, 0
        chunks = [[chunk.without(early) for chunk in own] for own in self.states.chunks(graph, rests)]
        return rests.in_step(graph, chunks), rests.tier_nbytes

    def _tell_of_others(self, graph: Graph) -> None:
        """A budget is missed, or the least is looked for: tell what rests and cannot be parked, and why."""
        self.weights.tell_of_others(graph)
        self.states.tell_of_gradients(graph)

    def _that_fit(self, graph: Graph, found: Rests) -> Rests:
        """What the tier has room for."""
        rests = found.within(self._offloading.limit_nbytes)
        return rests if len(rests) == len(found) else self._priced(graph, rests)

    def _ahead(self, graph: Graph, rests: Rests) -> Rests | None:
        """The same, with copies that run while the step computes; None where that hides nothing."""
        if not rests or not copies_overlap(self._offloading.device):
            return None
        ahead = self._priced(graph, replace(rests, ahead=True))
        return ahead if rests.units or any(state.leaves_before for state in ahead.parked_states) else None

    def _priced(self, graph: Graph, rests: Rests) -> Rests:
        """The same, priced for a step in which only this is parked."""
        return rests.priced(graph, self.states.chunks(graph, rests))

    def _in_step(self, graph: Graph, rests: Rests) -> Graph:
        return rests.in_step(graph, self.states.chunks(graph, rests))

    def _enough(self, graph: Graph, frontier: Frontier, rests: Rests, limit_nbytes: int) -> Rests:
        """What to park for the fastest step within the limit."""

        def needed_nbytes(some: Rests, plan: Plan) -> int:
            step = updated(self._in_step(graph, some), plan.updates)
            beside_nbytes = max(0, plan.predicted.needed_nbytes - plan.predicted.peak_nbytes)
            beside_nbytes += UNSEEN_NBYTES if plan.predicted.rebuilt_ops else 0
            return simulate(step, plan.lives).predicted.peak_nbytes + beside_nbytes

        chunks = self.states.chunks(graph, rests)
        found = least_parked(frontier, rests, chunks, limit_nbytes, needed_nbytes)
        return rests if found is None else found[0]

    def _chosen(self, say: Say, graph: Graph, chosen: _Try) -> Solved:
        """What was solved, and its lines. `graph`: that of the step with nothing parked."""
        states, weights = chosen.rests.parked_states, chosen.rests.parked_weights
        for line in chosen.lines:
            if not (chosen.rests and line.startswith((NONE_SMALLER, IN_FORCE))):  # they speak of the step with all parked
                say(line)
        if chosen.refusal is not None:
            raise chosen.refusal
        assert chosen.solved is not None
        if chosen.rests:
            say_in_force(say, chosen.solved.plan, chosen.solved.frontier, graph)
        if states:
            say(f"MemOpt: parked between updates: {states_text(states)}; {_copies_text(states)}")
        if weights:
            say(f"MemOpt: on the device only while their module runs: {weights_text(weights)}; {_copies_text(weights)}")
        return chosen.solved


def _tier_nbytes(each: Sequence[StateParking | WeightParking]) -> int:
    return sum(one.tier_nbytes for one in each)


def _copies_text(each: Sequence[StateParking] | Sequence[WeightParking]) -> str:
    took, waits = 1e3 * sum(one.copy_seconds for one in each), 1e3 * sum(one.seconds for one in each)
    return f"copies take {took:.1f} ms of a step, which waits for {waits:.1f} ms of that"


def _by_seconds(each: _Try) -> tuple[int, float]:
    """Those that fit first, the fastest first; then the smallest."""
    return (0, each.seconds) if each.fits else (1, each.nbytes)


def _by_bytes(tiers: Mapping[str, int]) -> float:
    return sum(tiers.values()) if tiers else math.inf


def _fastest(frontier: Frontier, rests: Rests, limit_nbytes: int) -> Rests:
    """What to park for the fastest step within the limit, by the plans that are known: shares of what rests. `frontier`: of the
    step in which everything is parked.

    State that stays takes its bytes at every point of a step. So the plans of a step that parks less are those of the step
    that parks all, for a budget that is smaller by what stays. Weights that stay take no more than that.
    """
    cheapest = rests.by_price()
    nbytes = [0, *accumulate(each.parking.nbytes for each in cheapest)]
    seconds = [0.0, *accumulate(each.parking.seconds for each in cheapest)]
    best = math.inf, len(cheapest)
    for count in sorted({bisect_left(nbytes, k * nbytes[-1] / SHARES) for k in range(1, SHARES + 1)}):
        with contextlib.suppress(InfeasibleError):
            plan = frontier.known_plan(limit_nbytes - (nbytes[-1] - nbytes[count]))
            best = min(best, (plan.predicted.seconds - seconds[-1] + seconds[count], count))  # the plan has all copies
    return rests.only(cheapest[: best[1]])


def _surely_seconds(each: StateOf | UnitOf) -> float:
    """Seconds of its copies, less those that other state's may hide."""
    return each.parking.copy_seconds - (each.back_seconds if isinstance(each, StateOf) else 0.0)


def _least_seconds(graph: Graph, rests: Rests, ahead: bool, limit_nbytes: int) -> float:
    """No step within the limit takes fewer extra seconds: whatever is rebuilt, what rests must make room for the rest of the
    step. `ahead`: copies may run while the step computes. `rests`: priced without that.
    """
    excess = max(fixed_levels(parked(graph, (), ())), default=0) - limit_nbytes  # an update in chunks takes little beside
    copies = max(0, excess) * min(_surely_seconds(each) / each.parking.nbytes for each in rests.by_price())
    return max(0.0, copies - graph.step_seconds) if ahead else copies
