"""What rests most of a step, and may be elsewhere meanwhile: optimizer state, gradients and weights. A session parks some.

A step is solved for as it is, and with everything parked that can be. If only the second keeps the budget, or keeps it in less
time, as much is parked as makes the step fastest.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn, optim

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.logs import Say
from lightning_memopt.plan import Plan, StateParking, WeightParking
from lightning_memopt.plan.resting import Parked, Rests, with_rest
from lightning_memopt.plan.simulate import fixed_levels
from lightning_memopt.plan.tiers import tier_budget
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
from lightning_memopt.session.solve.solving import Solved
from lightning_memopt.session.worth import most_extra_seconds
from lightning_memopt.solvers.parking import Parking, Tried, by_seconds

_RECENT = 8
"""Steps whose plans are remembered: what they park stays away in a step that has no use for it."""


@dataclass(frozen=True)
class _Try(Tried):
    """What was solved for a step.

    solved: None where it was refused.
    refusal: what was raised then, made anew: an error's frames would hold the batch.
    """

    solved: Solved | None = None
    refusal: InfeasibleError | None = None

    @classmethod
    def of(cls, solve: Callable[[Graph], Solved], parked: Parked) -> _Try:
        rests, graph = parked.rests, parked.graph
        try:
            solved = solve(graph)
        except InfeasibleError as error:
            smallest, budget, tiers = error.smallest_nbytes, error.budget_nbytes, error.tiers
            refusal = InfeasibleError(str(error), smallest_nbytes=smallest, budget_nbytes=budget, tiers=tiers)
            nbytes = math.inf if smallest is None else smallest
            return cls(parked, nbytes=nbytes, refusal=refusal)
        frontier, plan, above, _ = solved
        if rests:
            unmodified_nbytes = max(unmodified_levels(parked.whole), default=0)
            plan = replace(with_rest(plan, graph, rests), unmodified_peak_nbytes=unmodified_nbytes)
            frontier = replace(frontier, rests=rests, whole=parked.whole, unmodified_peak_nbytes=unmodified_nbytes)
            solved = solved._replace(plan=plan, frontier=frontier)
        seconds = plan.predicted.seconds
        return cls(parked, frontier, above is None, seconds, plan.budget_nbytes, solved)

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

    def solved(self, solve: Callable[[Graph], Solved], limit_nbytes: int | None, graph: Graph) -> Solved:
        """Solve for the step of this graph, and park what rests where that is better (see the module). Raises InfeasibleError
        as `solve` does.
        """
        self._offloading.measures_after(graph)
        self._offloading.look_for_room(self.states.tier_nbytes + self.weights.tier_nbytes)
        found = Rests(tuple(self.states.found(graph)), tuple(self.weights.found(graph)))

        def tried(parked: Parked, _: Plan | None) -> _Try:
            with self._offloading.beside(parked.rests.tier_nbytes):
                return _Try.of(solve, parked)

        parking = Parking(graph, partial(self.states.chunks, graph), copies_overlap(self._offloading.device), tried)
        most_in_tier = self._offloading.limit_nbytes
        parked = parking.parked(found, most_in_tier)
        whole = _Try(Parked(graph, Rests(), ()))
        hopeless = parked.rests and limit_nbytes is not None and max(fixed_levels(graph), default=0) > limit_nbytes
        if not hopeless:  # solving takes minutes
            whole = parking.solve(whole.parked, None)
        if limit_nbytes is None or not whole.fits:
            self._tell_of_others(graph)
        if not parked.rests or (whole.fits and whole.seconds == 0 and limit_nbytes is not None):
            return _chosen(whole)

        if limit_nbytes is None:
            smallest = parking.smallest(parked, whole, most_extra_seconds(graph, self._offloading.config))
            bound = parking.least_seconds(parked, smallest.nbytes)
            return _chosen(smallest.bounded(bound))
        bound = parking.least_seconds(parked, limit_nbytes)
        tries = [each.bounded(bound) for each in parking.within(parked, limit_nbytes, [] if hopeless else [whole])]
        if most_in_tier is None or any(each.fits for each in tries):
            return _chosen(min(tries, key=by_seconds))
        if any(each.tiers for each in tries):  # what rests takes room from saved tensors
            tries.append(parking.solve(parking.parked(parked.rests, most_in_tier // 2), None))
        # for all of which the tier has no room
        more = [] if len(parked.rests) == len(found) else [parking.solve(parking.parked(found), None)]
        enough = {self._offloading.tier: found.tier_nbytes} if any(each.fits for each in more) else {}
        tiers = min((*(each.tiers for each in (*tries, *more)), enough), key=_by_bytes)
        return _chosen(min(tries, key=by_seconds).told(tiers))

    def all_parked(self, graph: Graph, all_of_it: bool = False, early: AbstractSet[str] = frozenset()) -> tuple[Graph, int]:
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


def _chosen(chosen: _Try) -> Solved:
    if chosen.refusal is not None:
        raise chosen.refusal
    assert chosen.solved is not None
    return chosen.solved


def _tier_nbytes(each: Sequence[StateParking | WeightParking]) -> int:
    return sum(one.tier_nbytes for one in each)


def _by_bytes(tiers: Mapping[str, int]) -> float:
    return sum(tiers.values()) if tiers else math.inf
