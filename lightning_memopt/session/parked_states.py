"""Optimizer state that a session parks between updates: which of it, whether that is worth its copies, and when it moves.

A step is solved for as it is, and with all state parked that can be. If only the second keeps the budget, or keeps it in less
time, as much state is parked as makes the step fastest. Observed steps have all state on the device.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import nn, optim

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.device.places import is_on
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import StateParking, states_text
from lightning_memopt.plan.states import Chunk, StateOf, parked
from lightning_memopt.record import parameters_of
from lightning_memopt.runtime.early_updates import ALLOWED, EarlyUpdates, Reason, of_step
from lightning_memopt.runtime.parked import LEAST_NBYTES, Depot
from lightning_memopt.runtime.parked_states import ParkedStates, chunks_of, parkable
from lightning_memopt.runtime.tiers import Tier
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.measure.peak_meter import in_compiled_code
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.session.ranks.agreement import Agreement
from lightning_memopt.session.solve.rehearsal import rehearse
from lightning_memopt.session.solve.solving import NONE_SMALLER, Solved
from lightning_memopt.session.worth import most_extra_seconds
from lightning_memopt.solvers.frontier import Frontier, with_states
from lightning_memopt.units import round_up

Say = Callable[[str], None]
Solve = Callable[[Graph, Say], Solved]
_CHUNKED = (*ALLOWED, optim.Adamax, optim.RMSprop, optim.ASGD, optim.Rprop, optim.Adadelta)
"""Optimizers of torch that update each parameter by itself, and write to its own state alone."""
_SHARES = 4
"""Number of shares of the state that are tried: one of them, two, and so on."""
_ALIGN_NBYTES = 4096
"""Tiers give each tensor a multiple of this."""


@dataclass(frozen=True)
class _Try:
    """What was solved for a step in which these states are parked.

    solved: None where it was refused.
    refusal: what was raised then, made anew: an error's frames would hold the batch.
    lines: what was to be said.
    """

    states: tuple[StateParking, ...]
    solved: Solved | None
    refusal: InfeasibleError | None
    lines: tuple[str, ...]

    @classmethod
    def of(cls, solve: Solve, graph: Graph, states: Sequence[StateOf] = (), whole: _Try | None = None) -> _Try:
        """`whole`: that of the step with all state on the device."""
        lines: list[str] = []
        parkings = tuple(state.parking for state in states)
        try:
            solved = solve(graph, lines.append)
        except InfeasibleError as error:
            smallest, budget = error.smallest_nbytes, error.budget_nbytes
            return cls(
                parkings, None, InfeasibleError(str(error), smallest_nbytes=smallest, budget_nbytes=budget), tuple(lines)
            )
        if parkings:
            unmodified = (solved if whole is None or whole.solved is None else whole.solved).plan.unmodified_peak_nbytes
            plan = replace(with_states(solved.plan, parkings), unmodified_peak_nbytes=unmodified)
            frontier = replace(solved.frontier, states=parkings, unmodified_peak_nbytes=unmodified)
            solved = solved._replace(plan=plan, frontier=frontier)
        return cls(parkings, solved, None, tuple(lines))

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

    def bounded(self, seconds: float) -> _Try:
        """The same, with a bound on the seconds of all plans that park any of the state."""
        if self.solved is None:
            return self
        plan = self.solved.plan
        plan = replace(plan, lower_bound_seconds=min(seconds, plan.lower_bound_seconds))
        return replace(self, solved=self.solved._replace(plan=plan))


class StatesAtRest(Part):
    """The optimizer state of a session that its plans park.

    model, optimizers, offloading: those of the session.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        offloading: Offloading,
        meetings: Agreement,
        say: Say,
        parts: Parts,
    ) -> None:
        """`parts`: those of the session; it is one if a plan may park."""
        if offloading.tier:
            parts.add(self)
        self.model = model
        self.optimizers = optimizers
        self.offloading = offloading
        self._meetings = meetings
        self._say = say
        self._said: set[str] = set()
        self._states: tuple[StateParking, ...] = ()
        self._depot = Depot()
        self._parked: list[ParkedStates] = []
        self._compiled = False
        self._moved_nbytes = 0

    # -- moments of a step -------------------------------------------------------------------------

    def step_begins(self, state: object, limit_nbytes: int | None) -> None:
        self._put(state.plan.states if isinstance(state, Running) else ())

    def between_steps(self, state: object) -> None:
        if isinstance(state, Running):
            self._put(state.plan.states)

    def _put(self, states: tuple[StateParking, ...]) -> None:
        """These states are parked from now on, and no others."""
        if self._compiled:
            states = ()
        if states != self._states:
            self.close()
            self._begin(states)
        for each in self._parked:
            each.park()

    def update_begins(self, optimizer: optim.Optimizer, own: bool, closure: bool) -> None:
        if own and in_compiled_code():  # its step reads state where we do not see it
            self._compiled = True
            self.close()
        for each in self._parked:
            if each.optimizer is optimizer:
                each.step_begins()

    def also_in_backward(self, updates: EarlyUpdates | None) -> None:
        """These updates read state, too."""
        if updates is not None and self.offloading.tier:
            updates.around = self._updating

    def _updating(self, p: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Around the update of a parameter in backward."""
        each = next((each for each in self._parked if each.has(p)), None)
        return contextlib.nullcontext() if each is None else each.updating(p)

    def step_ended(self, planned: bool) -> None:
        for each in self._parked:
            each.step_ended()

    @property
    def moved_nbytes(self) -> int:
        """Bytes that updates have moved, out and back."""
        return self._moved_nbytes + sum(each.moved_nbytes for each in self._parked)

    def close(self) -> None:
        self._moved_nbytes = self.moved_nbytes
        while self._parked:
            self._parked[-1].close()  # what cannot be fetched stays, with its tier
            self._parked.pop()
        self._depot.close()
        self._depot, self._states = Depot(), ()

    def _begin(self, states: tuple[StateParking, ...]) -> None:
        """Park these states from now on, also those that the next update will make."""
        nbytes_of = {state.parameter: state.nbytes for state in states}
        nbytes = {id(p): nbytes_of[name] for name, p in self.model.named_parameters() if name in nbytes_of}
        self._states = states
        if not nbytes:
            return
        tier, room = states[0].tier, sum(round_up(n, _ALIGN_NBYTES) for n in nbytes.values())

        def new_tier(name: str) -> Tier:
            return self.offloading.depots.tier(name, room)

        self._depot = Depot({tier: new_tier(tier)}, more=new_tier)
        for optimizer in self.optimizers:
            of_it = {p: nbytes[id(p)] for p in parameters_of(optimizer) if id(p) in nbytes}
            if of_it:
                self._parked.append(ParkedStates(optimizer, of_it, self._depot, tier, self._say))

    # -- the plan ----------------------------------------------------------------------------------

    def solved(self, solve: Solve, limit_nbytes: int | None, say: Say, graph: Graph) -> Solved:
        """Solve for the step of this graph, and park state where that is better (see the module). `say` tells the user a line.
        Raises InfeasibleError as `solve` does.
        """
        states = self._all(graph)
        if not states:
            return solve(graph, say)
        whole = _Try.of(solve, graph)
        if whole.fits and whole.seconds == 0 and limit_nbytes is not None:
            return self._chosen(say, whole)
        tries = [whole, _Try.of(solve, self._in_step(graph, states), states, whole)]
        if limit_nbytes is None:
            most = most_extra_seconds(graph, self.offloading.config)
            return self._chosen(say, min(tries, key=lambda each: (each.seconds > most, each.nbytes)))
        if tries[-1].fits:
            assert tries[-1].solved is not None
            some, bound = self._fastest(tries[-1].solved.frontier, states, limit_nbytes)
            if len(some) < len(states):
                tries.append(_Try.of(solve, self._in_step(graph, some), some, whole))
            tries = [each.bounded(bound) for each in tries]
        return self._chosen(say, min(tries, key=lambda each: (0, each.seconds) if each.fits else (1, each.nbytes)))

    def _chosen(self, say: Say, chosen: _Try) -> Solved:
        for line in chosen.lines:
            if not (chosen.states and line.startswith(NONE_SMALLER)):  # but the plan that parks is
                say(line)
        if chosen.refusal is not None:
            raise chosen.refusal
        assert chosen.solved is not None
        if chosen.states:
            seconds = sum(state.seconds for state in chosen.states)
            what = states_text(chosen.states)
            say(f"MemOpt: parked between updates: {what}; its copies take {1e3 * seconds:.1f} ms of a step")
        return chosen.solved

    def _fastest(self, frontier: Frontier, states: Sequence[StateOf], limit_nbytes: int) -> tuple[list[StateOf], float]:
        """The states to park for the fastest step within the limit, and a bound on the extra seconds of all such steps.
        `frontier`: of the step in which all are parked.

        State that stays takes its bytes at every point of a step. So the plans of a step that parks less are those of the step
        that parks all, for a budget that is smaller by what stays.
        """
        largest = sorted(states, key=lambda state: -state.parking.nbytes)
        nbytes = [0, *accumulate(state.parking.nbytes for state in largest)]
        seconds = [0.0, *accumulate(state.parking.seconds for state in largest)]
        counts = sorted({bisect_left(nbytes, k * nbytes[-1] / _SHARES) for k in range(_SHARES + 1)}, reverse=True)
        best = math.inf, len(states)
        least = 0.0
        bound = math.inf
        for count, fewer in pairwise(counts):
            with contextlib.suppress(InfeasibleError):
                plan = frontier.plan(limit_nbytes - (nbytes[-1] - nbytes[count]))
                copies = seconds[-1]  # those that the frontier adds
                best = min(best, (plan.predicted.seconds - copies + seconds[count], count))
                least = plan.lower_bound_seconds - copies
            bound = min(bound, least + seconds[fewer])  # of a smaller budget, the bound is no less
        return largest[: best[1]], bound

    def _all(self, graph: Graph, timed: bool = True) -> list[StateOf]:
        """All state that can be parked, as it is, or as the first update will make it. `timed`: with the seconds of copies, for
        a step whose update has run: its graph has no state that is yet to be made.
        """
        if not self.offloading.tier:
            return []
        tier = self.offloading.tier
        device = self.offloading.device
        rates = None
        known = {id(p) for p in self.model.parameters()}
        names = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad and is_on(device, p.device)}
        rounded = kind_of(graph.device).allocated_nbytes
        found: dict[str, StateOf] = {}
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            ours = [(group, p) for group in groups for p in group["params"] if id(p) in names]
            if any(parkable(optimizer, p) for p in parameters_of(optimizer) if id(p) not in known):
                self._tell(Reason("some parameters are not in the model that was given", "Give a module that has all of them"))
            if not ours or not self._may(optimizer):
                continue
            for group, p in ours:
                sizes = parkable(optimizer, p)
                is_there = not timed or bool(optimizer.state.get(p))
                if not optimizer.state.get(p):
                    sizes = [n for n in rehearse(optimizer, [(group, [p])], device, rounded).state if n >= LEAST_NBYTES]
                if not sizes:
                    continue
                seconds = 0.0
                if timed:
                    rates = rates or self.offloading.rates  # measured only where they are needed
                    seconds = sum(rates.out_seconds(tier, n) + rates.in_seconds(tier, n) for n in sizes)
                parking = StateParking(parameter=names[id(p)], tier=tier, nbytes=sum(sizes), seconds=seconds)
                state = StateOf(parking, tuple(map(rounded, sizes)) if is_there else ())
                other = found.get(parking.parameter)  # of another optimizer
                found[parking.parameter] = state if other is None else other.and_of(state)
        return list(found.values())

    def smallest(self, graph: Graph) -> Graph:
        """The step of this graph with all state parked that can be, as the first update will make it."""
        states = self._all(graph, timed=False)
        return self._in_step(graph, states) if states else graph

    def _may(self, optimizer: optim.Optimizer) -> bool:
        """Whether state of this optimizer can be parked."""
        reasons = of_step(optimizer, _CHUNKED)
        if any(group.get("capturable") for group in optimizer.param_groups):
            reasons.append(Reason("a capturable optimizer has its state at fixed addresses", "Set capturable=False"))
        if self._compiled:
            reasons.append(Reason("the optimizer's step is compiled", "Step without torch.compile"))
        if not self._meetings.alone:
            reasons.append(
                Reason("several processes train, and plans of ranks do not park it yet", "Shard it with FSDP2 or ZeRO")
            )
        for reason in reasons[:1]:
            self._tell(reason)
        return not reasons

    def _tell(self, reason: Reason) -> None:
        """Say once why state is not parked."""
        if reason.what not in self._said:
            self._said.add(reason.what)
            self._say(f"MemOpt: optimizer state is not parked: {reason.what}. {reason.fix}.")

    def _in_step(self, graph: Graph, states: Sequence[StateOf]) -> Graph:
        """The step of this graph with these states parked."""
        nbytes = {state.parking.parameter: sum(state.sizes) for state in states}
        parked_nbytes = {id(p): nbytes[name] for name, p in self.model.named_parameters() if name in nbytes}
        device, rounded = self.offloading.device, kind_of(graph.device).allocated_nbytes
        chunks = []
        for optimizer in self.optimizers:
            ours = {id(p): parked_nbytes[id(p)] for p in parameters_of(optimizer) if id(p) in parked_nbytes}
            for group in optimizer.param_groups:
                for params in chunks_of(group["params"], ours):
                    beside = rehearse(optimizer, [(group, params)], device, rounded).beside_nbytes
                    chunks.append(Chunk(sum(ours.get(id(p), 0) for p in params), beside))
        return parked(graph, states, chunks)
