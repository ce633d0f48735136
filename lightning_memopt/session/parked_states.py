"""What updates read, and a session parks until then: optimizer state and gradients. Which can be parked, and when they move.

Observed steps have all of it on the device, if there is room for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

import torch
from torch import nn, optim

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.device.places import is_on
from lightning_memopt.errors import OffloadError
from lightning_memopt.graph import Graph
from lightning_memopt.logs import Once
from lightning_memopt.plan import StateParking
from lightning_memopt.plan.model import Read
from lightning_memopt.plan.resting import Rests
from lightning_memopt.plan.states import Chunk, StateOf, may_be_parked
from lightning_memopt.plan.tiers import taken
from lightning_memopt.record import parameters_of
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.runtime.parked import LEAST_NBYTES, Depot
from lightning_memopt.runtime.parked_gradients import ParkedGradients
from lightning_memopt.runtime.parked_states import ParkedStates
from lightning_memopt.runtime.parked_weights import ParkedWeights
from lightning_memopt.runtime.state_chunks import chunks_of
from lightning_memopt.runtime.state_copies import parkable
from lightning_memopt.runtime.tiers import Tier
from lightning_memopt.runtime.tiers.shelf import on_shelf
from lightning_memopt.session.measure.peak_meter import in_compiled_code
from lightning_memopt.session.observe.accumulated import Kept
from lightning_memopt.session.parking.obstacles import obstacle, obstacle_of
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.session.solve.rehearsal import rehearse
from lightning_memopt.torch_private import gradient_of, has_backward_hooks
from lightning_memopt.units import format_nbytes

Say = Callable[[str], None]
_OUTSIDE = Reason("some parameters are not in the model that was given", "Give a module that has all of them")
_BY_HAND = Reason("no optimizer of the run updates their parameters", "Give the run all optimizers")


def _parking(name: str, tier: str, sizes: Sequence[int], seconds: float) -> StateParking:
    """The parking of a parameter's state: tensors of these sizes. `seconds`: of their copies, out and back."""
    tier_nbytes = sum(taken(tier, n) for n in sizes)
    return StateParking(
        parameter=name, tier=tier, nbytes=sum(sizes), copy_seconds=seconds, seconds=seconds, tier_nbytes=tier_nbytes
    )


class StatesAtRest(Part):
    """The optimizer state of a session that its plans park.

    model, optimizers, offloading: those of the session.

    Many methods: it moves state and gradients, says what can be parked and at which price, and tells of what cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        offloading: Offloading,
        alone: Callable[[], bool],
        say: Say,
        parts: Parts,
        kept: Kept,
    ) -> None:
        """`alone`, `parts`, `kept`: see `AtRest`."""
        if offloading.tier:
            parts.add(self)
        self.model = model
        self.optimizers = optimizers
        self.offloading = offloading
        self._alone = alone
        self._kept = kept
        self._say = say
        self._say_once = Once(say)
        self._states: tuple[StateParking, ...] = ()
        self._trained = frozenset[int]()
        self._depot = Depot()
        self._room_nbytes = 0  # of a tier for what is not in one yet
        self._parked: list[ParkedStates] = []
        self._compiled = self._hooked = False
        self._moved_nbytes = 0

    # -- moments of a step -------------------------------------------------------------------------

    def put(self, states: tuple[StateParking, ...], weights: ParkedWeights | None = None) -> None:
        """These states are parked from now on, and no others. `weights`: those that are parked."""
        if self._compiled:
            states = ()
        trained = frozenset[int]() if weights is None else frozenset(weights.trained)
        changed = (states, trained) != (self._states, self._trained)
        if changed:
            self._change(states, weights, trained)
        beside = any(state.leaves_before for state in states)
        hooked, self._hooked = self._hooked, beside and any(map(has_backward_hooks, self.model.modules()))
        if changed or hooked != self._hooked:
            self._copy_beside_backward()
        for each in self._parked:
            each.park()

    def _change(self, states: tuple[StateParking, ...], weights: ParkedWeights | None, trained: frozenset[int]) -> None:
        """As `put`. What is parked and stays so stays away. `trained`: see `ParkedWeights`."""
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        of_state, of_gradient = (_of(states, what, named) for what in get_args(Read))

        def own(optimizer: optim.Optimizer) -> tuple[dict[torch.Tensor, int], dict[torch.Tensor, int]]:
            params = parameters_of(optimizer)
            state = {p: of_state[p] for p in params if p in of_state}
            return state, {p: of_gradient.pop(p) for p in params if p in of_gradient}  # another optimizer may have it, too

        now, wanted = _nbytes_of(self._states), _nbytes_of(states)
        in_chunks = {id(p) for each in self._parked for p in parameters_of(each.optimizer)}
        fewer = bool(wanted) and wanted.items() <= now.items()  # a plan follows steps that parked everything
        more = bool(now) and now.items() < wanted.items()
        goes_on = (fewer or more) and in_chunks >= trained.union(map(id, (*of_state, *of_gradient)))
        if not goes_on:
            self.close()
        if more or not goes_on:
            self._room_nbytes = _tier_nbytes_of(states) - _tier_nbytes_of(self._states)
        self._states, self._trained = states, trained
        for each in self._parked:
            each.weights = weights
            if more:
                each.add(*own(each.optimizer), self._gradients)
            elif len(wanted) < len(now):
                each.park_only(of_state.keys(), of_gradient.keys())
        if goes_on or not (states or trained):
            return

        def new_tier(name: str) -> Tier:
            return self.offloading.depots.tier(name, self._room_nbytes)

        self._depot = Depot(more=new_tier)  # what it refuses stays on the device
        tier = self.offloading.tier
        for optimizer in self.optimizers:
            state, gradient = own(optimizer)
            if state or gradient or not trained.isdisjoint(map(id, parameters_of(optimizer))):
                gradients = self._gradients(optimizer, gradient)
                self._parked.append(ParkedStates(optimizer, state, self._depot, tier, self._say, gradients, weights))

    def update_begins(self, optimizer: optim.Optimizer, own: bool, closure: bool) -> None:
        if own and in_compiled_code():  # its step reads state where we do not see it
            self._compiled = True
            self.close()
        for each in self._parked:
            if each.optimizer is optimizer:
                each.step_begins()

    def updating(self, p: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Around the update of a parameter in backward."""
        each = next((each for each in self._parked if each.has(p)), None)
        return contextlib.nullcontext() if each is None else each.updating(p)

    def step_ended(self, planned: Sequence[object]) -> None:
        for each in self._parked:
            each.step_ended()

    @property
    def tier_nbytes(self) -> int:
        """Bytes of the tiers for what is parked."""
        return sum(tier.capacity_nbytes for tier in self._depot) + sum(each.gradients_nbytes for each in self._parked)

    @property
    def moved_nbytes(self) -> int:
        """Bytes that updates have moved, out and back."""
        return self._moved_nbytes + sum(each.moved_nbytes for each in self._parked)

    def close(self) -> None:
        self._moved_nbytes = self.moved_nbytes
        all_there = True
        while self._parked:
            all_there &= self._parked[-1].close()  # what cannot be fetched stays, with its tier
            self._parked.pop()
        if all_there:
            self._depot.close()
        self._depot = Depot()
        self._states = ()
        self._trained = frozenset()

    def _copy_beside_backward(self) -> None:
        """Copies run beside backward where the states say so, unless a module has hooks there, which may write what is being
        copied.
        """
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        states = () if self._hooked else self._states
        pairs = [(state, named[state.parameter]) for state in states if state.parameter in named]
        following = {named[state.comes_after]: p for state, p in pairs if state.comes_after in named}
        until = {p: named[state.leaves_before] for state, p in pairs if state.leaves_before in named}
        for each in self._parked:
            each.copy_beside_backward(following, until)

    def _gradients(self, optimizer: optim.Optimizer, nbytes: Mapping[torch.Tensor, int]) -> ParkedGradients | None:
        """Gradients of parameters of this optimizer are parked from now on."""
        if not nbytes:
            return None
        depots = self.offloading.depots
        depots.make_room(self.offloading.tier, on_shelf(nbytes.values()))
        try:
            return ParkedGradients(optimizer, nbytes, depots.directory, self._say, depots.limit_nbytes)
        except OffloadError as error:
            self._say_once(f"MemOpt: gradients that the plan parks stay on the device: {error}")
            return None

    # -- the plan ----------------------------------------------------------------------------------

    def found(self, graph: Graph, timed: bool = True) -> list[StateOf]:
        """All state that can be parked, as it is, or as the first update will make it. `timed`: with the seconds of copies, for
        a step whose update has run: its graph has no state that is yet to be made, and what the update left without state has
        no gradient.
        """
        tier, rounded = self.offloading.tier, kind_of(graph.device).allocated_nbytes
        rates = None
        found: dict[str, StateOf] = {}
        for name, sizes, is_there in self._each(rounded, updated=timed):
            out = back = 0.0
            if timed:
                rates = rates or self.offloading.rates  # measured only where they are needed
                out, back = (sum(each(tier, n) for n in sizes) for each in (rates.out_seconds, rates.in_seconds))
            parking = _parking(name, tier, sizes, out + back)
            state = StateOf(parking, tuple(map(rounded, sizes)) if is_there or not timed else (), back)
            other = found.get(name)  # of another optimizer
            found[name] = state if other is None else other.and_of(state)
        return may_be_parked(graph, [*found.values(), *self._gradients_of(graph, timed)])

    def _gradients_of(self, graph: Graph, timed: bool) -> Iterator[StateOf]:
        """All gradients that can be parked. `timed`: with the seconds of copies."""
        tier, rates = self.offloading.tier, None
        for name, p in self._parameters() if graph.gradients else ():
            out = back = 0.0
            if timed:
                rates = rates or self.offloading.rates
                out, back = rates.out_seconds(tier, p.nbytes), rates.in_seconds(tier, p.nbytes)
            nbytes = kind_of(graph.device).allocated_nbytes(p.nbytes)
            yield StateOf(self._gradient(name, p, out + back), (nbytes,), back)

    def _gradient(self, name: str, p: torch.Tensor, seconds: float) -> StateParking:
        """The gradient of this parameter is parked, and its copies take so many seconds."""
        tier, in_tier = self.offloading.tier, on_shelf([p.nbytes])
        return StateParking(
            parameter=name,
            what="gradient",
            tier=tier,
            nbytes=p.nbytes,
            tier_nbytes=in_tier,
            copy_seconds=seconds,
            seconds=seconds,
        )

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters whose gradients are worth parking, if the device can read them in the tier, and their names."""
        device = self.offloading.device
        if obstacle(self.offloading, self._alone()) is not None:
            return
        names = {id(p): name for name, p in self.model.named_parameters() if is_on(device, p.device)}
        for optimizer in filter(self._may, self.optimizers):
            for p in parameters_of(optimizer):
                name = names.pop(id(p), None)  # another optimizer may have it, too
                if name is not None and p.nbytes >= LEAST_NBYTES:
                    yield name, p

    def tell_of_gradients(self, graph: Graph) -> None:
        """A budget is missed, or the least is looked for: tell which gradients cannot be parked, and why."""
        if not self.offloading.tier:
            return
        device, blocked = self.offloading.device, obstacle(self.offloading, self._alone())
        early = {graph.tensors[update.parameter].name for update in graph.updates}
        unread: dict[int, Reason | None] = {}  # why no optimizer reads the gradient of a parameter a few at a time
        for optimizer in self.optimizers:
            unread |= dict.fromkeys(map(id, parameters_of(optimizer)), self._obstacle(optimizer))
        known = {id(p) for p in self.model.parameters()}
        updated = [p for each in self.optimizers for p in parameters_of(each) if gradient_of(p) is not None or p in each.state]
        stays = Counter[Reason]()
        stays[blocked or _OUTSIDE] = sum(
            p.nbytes for p in updated if id(p) not in known and is_on(device, p.device) and p.nbytes >= LEAST_NBYTES
        )
        for name, p in self.model.named_parameters():
            if name in early or not is_on(device, p.device):
                continue
            if name in graph.gradients:
                nbytes, reason = p.nbytes, blocked or unread.get(id(p), _BY_HAND)
            elif name in self._kept.why:
                nbytes, own = self._kept.why[name]
                reason = blocked or own
            else:  # autograd accumulates none
                continue
            if reason is not None and nbytes >= LEAST_NBYTES:
                stays[reason] += nbytes
        for reason, nbytes in (+stays).items():
            line = f"MemOpt: gradients stay on the device ({format_nbytes(nbytes)}): {reason.what}. {reason.fix}."
            self._say_once(line, f"gradients: {reason.what}")

    def all_of(self, rounded: Callable[[int], int]) -> tuple[StateParking, ...]:
        """All that can be parked, without seconds. `rounded`: bytes -> those that the device's allocator gives."""
        found: dict[str, list[int]] = {}
        for name, sizes, _ in self._each(rounded):
            found.setdefault(name, []).extend(sizes)
        states = [_parking(name, self.offloading.tier, sizes, 0.0) for name, sizes in found.items()]
        return *states, *(self._gradient(name, p, 0.0) for name, p in self._parameters() if p.requires_grad)

    def _each(self, rounded: Callable[[int], int], updated: bool = False) -> Iterator[tuple[str, list[int], bool]]:
        """The name of each parameter whose state can be parked, bytes of the tensors of it that one optimizer has or will make,
        and whether it has. `updated`: an optimizer that has any state has all that it makes.
        """
        if not self.offloading.tier:
            return
        device = self.offloading.device
        known = {id(p) for p in self.model.parameters()}
        names = {id(p): name for name, p in self.model.named_parameters() if is_on(device, p.device)}
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            ours = [(group, p) for group in groups for p in group["params"] if id(p) in names]
            if any(parkable(optimizer, p) for p in parameters_of(optimizer) if id(p) not in known):
                self._tell(_OUTSIDE)
            if not ours or not self._may(optimizer):
                continue
            will_make = not (updated and optimizer.state)
            for group, p in ours:
                is_there, sizes = bool(optimizer.state.get(p)), parkable(optimizer, p)
                if not is_there and will_make and p.requires_grad:
                    sizes = [n for n in rehearse(optimizer, [(group, [p])], device, rounded).state if n >= LEAST_NBYTES]
                if sizes:
                    yield names[id(p)], sizes, is_there

    def _may(self, optimizer: optim.Optimizer) -> bool:
        """Whether state of this optimizer can be parked."""
        reason = self._obstacle(optimizer)
        if reason is not None:
            self._tell(reason)
        return reason is None

    def _obstacle(self, optimizer: optim.Optimizer) -> Reason | None:
        return obstacle_of(optimizer, self._compiled, self._alone())

    def in_chunks(self) -> set[int]:
        """Identities of the parameters that updates after backward take a few at a time."""
        return {id(p) for each in self.optimizers if self._obstacle(each) is None for p in parameters_of(each)}

    def _tell(self, reason: Reason) -> None:
        """Tell why state is not parked."""
        self._say_once(f"MemOpt: optimizer state is not parked: {reason.what}. {reason.fix}.")

    def chunks(self, graph: Graph, rests: Rests) -> list[list[Chunk]]:
        """The chunks of each optimizer's step in which this is parked."""
        nbytes = Counter[str](rests.trained(graph))
        for state in rests.states:
            nbytes[state.parking.parameter] += state.parking.nbytes
        names = {id(p): name for name, p in self.model.named_parameters() if name in nbytes}
        device, rounded = self.offloading.device, kind_of(graph.device).allocated_nbytes
        chunks = []
        for optimizer in self.optimizers:
            own = []
            ours = {id(p): nbytes[names[id(p)]] for p in parameters_of(optimizer) if id(p) in names}
            for chunk in chunks_of(optimizer.param_groups, ours):
                beside = rehearse(optimizer, [(chunk.group, chunk.params)], device, rounded).beside_nbytes
                own.append(Chunk(tuple(names[id(p)] for p in chunk.params if id(p) in ours), beside, chunk.comes_ahead))
            chunks.append(own)
        return chunks


def _nbytes_of(states: Sequence[StateParking]) -> dict[tuple[str, str, str], int]:
    return {(state.tier, state.what, state.parameter): state.nbytes for state in states}


def _tier_nbytes_of(states: Sequence[StateParking]) -> int:
    """Bytes of a tier that optimizer state takes. Gradients have tiers of their own."""
    return sum(state.tier_nbytes for state in states if state.what == "state")


def _of(states: Sequence[StateParking], what: Read, named: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, int]:
    """Parameter -> bytes of its state, or of its gradient, that are parked."""
    own = (state for state in states if state.what == what and state.parameter in named)
    return {named[state.parameter]: state.nbytes for state in own}
