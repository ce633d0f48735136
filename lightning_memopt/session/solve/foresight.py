"""Predict the bytes of later steps before the first update, and refuse a budget that no plan keeps while nothing is updated.

An observed step shows its forward and backward, and its update is rehearsed (rehearsal.py). Later steps may hold more than the
first one. A loop may keep a loss, outputs or gradients of a step until the forward of the next is over. Optimizers whose turn
has not come (the second one of a GAN, those of other sessions) make gradients and state. These bytes depend on lines of the
loop that have not run yet: no budget is refused because of them, but the budget that a refusal names has room for them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from lightning_memopt.clocks import thread_time
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor, resident_text, unmodified_levels
from lightning_memopt.graph.model import Kind
from lightning_memopt.live_objects import live_objects
from lightning_memopt.logs import Say
from lightning_memopt.native import counter_of
from lightning_memopt.native.engine import maker
from lightning_memopt.plan import Machine
from lightning_memopt.plan.side_streams import with_pools
from lightning_memopt.plan.simulate import fixed_levels
from lightning_memopt.plan.states import PARKED_STATE
from lightning_memopt.plan.tiers import tier_budgets_text
from lightning_memopt.record import parameters_of
from lightning_memopt.session import times
from lightning_memopt.session.observe.final_gradients import Final
from lightning_memopt.session.observe.graphs import MADE, pieces, requests_for, smoothed, with_state
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.observe.resident import state_made
from lightning_memopt.session.parking.joint_frontier import JointFrontier
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.session.solve.machine import machine_of
from lightning_memopt.session.solve.rehearsal import SCALARS_NBYTES, Rounded, Update, rehearse, still_to_make, with_gradients
from lightning_memopt.session.worth import worth
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.torch_private import local_tensor
from lightning_memopt.units import format_nbytes

_IF = " (if the loop holds nothing more from one step to the next)"
Parked = Callable[..., tuple[Graph, int]]
"""`AtRest.all_parked`."""


class Foresight:
    """The bytes that the updates of these optimizers take.

    update: all updates, one after the other; None before they were rehearsed.
    keeps_gradients: the loop keeps the gradients of a step until the next forward is over. A front that knows this says so;
        otherwise the first observed step that begins with gradients shows it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], plan: Foreseen | None = None) -> None:
        """`plan`: one that was made before its step ran, and that may be of another model."""
        self.optimizers = optimizers
        self._plan = plan
        self.update: Update | None = None
        self.keeps_gradients = False

    def look(
        self,
        observation: Observation | None,
        budget_nbytes: int | None,
        offloading: Offloading,
        say: Say,
        others: Sequence[torch.optim.Optimizer],
        savable: Callable[[Graph, bool], int],
        parked: Parked,
    ) -> None:
        """Before the first update of an observed step: rehearse it. Does nothing before later ones. `others`: optimizers of
        other sessions. `savable`, `parked`: as for `refuse_infeasible`.

        Raises InfeasibleError where no plan of the steps that come keeps the budget, and PlanMismatchError where the plan that
        was given is of another model.
        """
        if observation is None or self.update is not None or not observation.has_backward:
            return
        if self._plan is not None:
            self._plan.check(observation.so_far())
        self.update = self._rehearsed(observation.device)
        if budget_nbytes is not None:
            if observation.metered:
                observation.stop_metering()  # the profiler gives the workspaces of ops only when it has stopped
            to_come, limit_nbytes = self.to_come(observation), budget_nbytes - offloading.config.headroom
            if self._plan is not None and self._plan.fits(to_come, limit_nbytes, machine_of(observation.device)):
                return
            later = Later(self.optimizers, others, observation.device)
            parked = partial(parked, early={final.name for final in observation.finals_seen()})
            refuse_infeasible(to_come, budget_nbytes, offloading, say, self.update.known, later, savable, parked)

    def to_come(self, observation: Observation) -> Graph:
        """The graph of the steps that come, made of the part of this step that was observed before its update."""
        assert self.update is not None
        (graph, gone), finals = observation.to_come(), observation.finals_seen()
        if not finals:  # optimizers that stepped earlier in this step (a GAN) have their state when the next step begins
            graph = self._with_gradients(graph)
            return with_update(with_state(graph, *state_made(graph, self.optimizers, observation.device)), self.update, gone)
        graph = with_early_updates(with_state(graph, self.update.state), self._early(observation, finals))
        return with_earlier_rounds(graph)

    def complete(self, graph: Graph, device: torch.device, early: bool) -> Graph:
        """The graph of an observed step, with the state that its update made, and with the bytes of later updates, which may
        differ from the first one. `early`: parameters are updated early, so the step has shown the updates already.
        """
        graph = self._complete(graph, device, early)
        if not kind_of(graph.device).has_segments:
            return graph
        trained = (p for o in self.optimizers for p in parameters_of(o) if p.requires_grad)
        return with_pools(graph, sum(local_tensor(p).nbytes for p in trained))

    def _complete(self, graph: Graph, device: torch.device, early: bool) -> Graph:
        made = state_made(graph, self.optimizers, device)
        graph = self._with_updates(with_earlier_rounds(graph)) if early else self._with_gradients(graph)
        if self.update is None or early:
            return with_state(graph, *made)
        growing = [o for o in self.optimizers if type(o) is torch.optim.LBFGS]
        growth = tuple(nbytes for o in growing for nbytes in rehearse(o, [], device, _rounded(device)).state)
        counted = counter_of(device) is not None  # then the graph already has the bytes that the update held
        throughout = 0 if counted else self.update.throughout_nbytes
        later_update = self.update._replace(state=growth, throughout_nbytes=throughout)
        return with_update(with_state(graph, *made), later_update)

    def _with_updates(self, graph: Graph) -> Graph:
        """The graph with what one update after backward takes, and with what the next step has of gradients it leaves."""
        self.keeps_gradients = self.keeps_gradients or any(update.until > BEFORE for update in graph.updates)
        until = _backward_begins(graph) - 1 if self.keeps_gradients else BEFORE
        updates = tuple(dataclasses.replace(update, until=until if update.nbytes else BEFORE) for update in graph.updates)
        at_most = sum(update.beside_nbytes for update in updates)
        usual = self.update.beside_nbytes if self.update is not None and self.update.known else at_most
        return dataclasses.replace(graph, updates=updates, usual_nbytes=min(usual, at_most))

    def _with_gradients(self, graph: Graph) -> Graph:
        """The graph of a later step, which begins with gradients where the loop keeps them. The observed step may have begun
        without: the first one does, and Lightning frees them before it validates.
        """
        begins_with = begins_with_gradients(graph)
        self.keeps_gradients = self.keeps_gradients or begins_with
        if begins_with or not self.keeps_gradients:
            return graph
        return with_step_before(graph, lambda t: t.kind == "gradient")

    def _rehearsed(self, device: torch.device) -> Update:
        updates = Update()
        for optimizer in self.optimizers:
            updates = updates.then(rehearse(optimizer, with_gradients(optimizer), device, _rounded(device)))
        return updates

    def _early(self, observation: Observation, finals: Sequence[Final]) -> list[tuple[int, tuple[int, ...]]]:
        """(point, sizes): where each parameter is updated early, and what its update allocates beside its state."""
        (optimizer,) = self.optimizers
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(observation.model.named_parameters())
        updates = []
        for final in finals:
            p = parameters[final.name]
            if id(p) in groups and p.grad is not None:
                update = rehearse(optimizer, [(groups[id(p)], [p])], observation.device, _rounded(observation.device))
                updates.append((final.point, update.beside))
        return updates


class Later:
    """The gradients and the state that optimizers have not made yet when the first update begins: those of a run whose turn has
    not come, and all others in the process (a GAN's discriminator, which the run need not know).

    own: the optimizers of the run. others: those of other runs.
    """

    def __init__(
        self, own: Sequence[torch.optim.Optimizer], others: Sequence[torch.optim.Optimizer], device: torch.device
    ) -> None:
        self._own = own
        self._others = others
        self._device = device

    def strangers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that no run knows. Looks at all objects of the process."""
        known = {id(p) for o in (*self._own, *self._others) for p in parameters_of(o)}
        strangers = []
        for optimizer in live_objects(lambda kind: torch.optim.Optimizer in kind.__mro__):
            parameters = set(map(id, parameters_of(optimizer))) if hasattr(optimizer, "param_groups") else set()
            if parameters - known:  # else it wraps another one
                strangers.append(optimizer)
                known |= parameters
        return strangers

    def nbytes(self, strangers: Sequence[torch.optim.Optimizer]) -> int:
        """Bytes that they may still make."""
        waiting = [o for o in self._own if not any(params for _, params in with_gradients(o))]
        rounded = _rounded(self._device)
        return sum(still_to_make(o, self._device, rounded) for o in (*waiting, *self._others, *strangers))

    def follow(self, strangers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether others than the optimizer that is about to step may have forwards and backwards of their own."""
        return len(self._own) > 1 or bool(self._others) or bool(strangers)


def _rounded(device: torch.device) -> Rounded:
    """How the allocator of a device rounds a request. CUDA's gives whole blocks."""
    return kind_of(device.type).allocated_nbytes


def with_update(graph: Graph, update: Update, gone: Collection[int] = ()) -> Graph:
    """The graph of the step (of `with_state`) with `update` at its end, as one op that reads nothing. The state of `update` is
    there from the start. `gone`: ids of tensors that are freed before it, however late.
    """
    end = len(graph.points)
    last = end - 1
    begins = end
    for op in reversed(graph.ops):
        if op.phase != "update":
            break
        begins = op.at
    # tensors that the step's own update made are state or temporary; only the others live until the new update ends
    left = [t for t in graph.tensors if t.freed_at == last and t.born_at >= begins]
    counted_until = sum(t.nbytes for t in graph.tensors if t.name == MADE and t.freed_at < last)
    made_nbytes = min(counted_until, sum([t.nbytes for t in left]))
    tensors, make = list(graph.tensors), maker(Tensor)
    for t in graph.tensors:
        if t.freed_at == last and t.born_at < begins and t.id not in gone:
            # without `replace`, which calls four functions of Python
            values = list(_values_of(t))
            values[_FREED_AT] = end
            tensors[t.id] = make(*values)
    requests = requests_for(graph.device, update.beside)
    added: tuple[tuple[str, Kind, Sequence[int], int], ...] = (
        (MADE, "optimizer_state", update.state, BEFORE),
        (MADE, "optimizer_state", pieces(made_nbytes, (t.nbytes for t in left)), end),
        ("held by update", "optimizer_state", (update.throughout_nbytes,), BEFORE),
        ("in update", "temporary", requests[1:], end),  # one is the op's workspace
    )
    for name, kind, sizes, born_at in added:
        for nbytes in requests_for(graph.device, sizes):
            id = len(tensors)
            tensors.append(Tensor(id=id, name=name, nbytes=nbytes, kind=kind, storage=id, born_at=born_at, freed_at=end))
    op = Op(
        id=len(graph.ops),
        name="optimizer update",
        phase="update",
        inputs=(),
        outputs=tuple(t.id for t in tensors if t.born_at == end),
        workspace_nbytes=sum(requests[:1]),
        at=end,
    )
    saves = tuple(dataclasses.replace(s, released_at=end) if s.released_at == last else s for s in graph.saves)
    points = (*graph.points, Point("op", op.id))
    return dataclasses.replace(graph, ops=(*graph.ops, op), tensors=tuple(tensors), saves=saves, points=points)


_FIELDS = [field.name for field in dataclasses.fields(Tensor)]
_values_of, _FREED_AT = operator.attrgetter(*_FIELDS), _FIELDS.index("freed_at")


def with_early_updates(graph: Graph, updates: Sequence[tuple[int, Sequence[int]]]) -> Graph:
    """The graph with the bytes that early updates allocate. `updates`: (point, sizes) of each."""
    tensors = list(graph.tensors)
    for point, sizes in updates:
        for nbytes in requests_for(graph.device, sizes):
            id = len(tensors)
            tensors.append(
                Tensor(id=id, name="in update", nbytes=nbytes, kind="temporary", storage=id, born_at=point, freed_at=point)
            )
    return dataclasses.replace(graph, tensors=tuple(tensors))


def with_earlier_rounds(graph: Graph) -> Graph:
    """The graph of the last of several rounds, with early updates, and with the bytes that the rounds before take beyond it:
    they free no gradient, so each gradient that this round frees early is there until the end of backward.
    """
    last = max((op.at for op in graph.ops if op.phase == "backward"), default=BEFORE)
    accumulated = {t.storage: t.nbytes for t in graph.tensors if t.kind == "gradient" and t.born_at == BEFORE}
    freed_at: dict[int, int] = {}
    for t in graph.tensors:
        freed_at[t.storage] = max(t.freed_at, freed_at.get(t.storage, BEFORE))
    tensors = list(graph.tensors)
    for storage, nbytes in accumulated.items():
        if nbytes and freed_at[storage] < last:
            id = len(tensors)
            tensors.append(
                Tensor(
                    id=id, name="gradient, of the round before", nbytes=nbytes, kind="gradient", storage=id,
                    born_at=freed_at[storage] + 1, freed_at=last,
                )
            )  # fmt: skip
    return dataclasses.replace(graph, tensors=tuple(tensors))


def begins_with_gradients(graph: Graph) -> bool:
    """Whether gradients are in memory when the step of this graph begins."""
    return bool([t for t in graph.tensors if t.kind == "gradient" and t.born_at == BEFORE and t.nbytes])


def at_worst(graph: Graph) -> Graph:
    """The graph of a later step whose loop keeps all tensors that the step before left until backward begins."""
    counted = begins_with_gradients(graph)
    return with_step_before(graph, lambda t: t.name != PARKED_STATE and not (counted and t.kind == "gradient"))


def _backward_begins(graph: Graph) -> int:
    """The point at which autograd first asks for a save; where it never does, the one after the forward."""
    after_forward = max((op.at for op in graph.forward), default=BEFORE) + 1
    return min((at for save in graph.saves for at in save.unpacked_at), default=after_forward)


def with_step_before(graph: Graph, keeps: Callable[[Tensor], bool]) -> Graph:
    """The graph of a later step whose loop keeps some tensors that the step before left until backward begins: those for which
    `keeps` is true.
    """
    last = len(graph.points) - 1
    until = _backward_begins(graph) - 1
    updates = {op.at for op in graph.ops if op.phase == "update"}  # state that they made is counted from the start already
    tensors = list(graph.tensors)
    for t in graph.tensors:
        if t.born_at > BEFORE and t.born_at not in updates and t.freed_at == last and t.nbytes and keeps(t):
            id = len(tensors)
            tensors.append(
                dataclasses.replace(t, id=id, name=f"{t.name}, of the step before", storage=id, born_at=BEFORE, freed_at=until)
            )
    return dataclasses.replace(graph, tensors=tuple(tensors))


def unmodified_peak(graph: Graph, machine: Machine | None = None) -> int:
    """The peak of the step without a plan, in bytes, as a budget counts it."""
    reserve = (machine or Machine()).reserve(graph)
    return reserve(keep_all(graph)) if reserve is not None else max(unmodified_levels(graph), default=0)


def refuse_infeasible(
    graph: Graph,
    budget_nbytes: int,
    offloading: Offloading,
    say: Say,
    known: bool,
    later: Later,
    savable: Callable[[Graph, bool], int],
    parked: Parked,
) -> None:
    """Before the first update: raise InfeasibleError where no plan of the steps that come keeps the budget.

    Solves only where the unmodified step does not fit, and only until a plan does.

    known: the graph has all bytes that updates take.
    later: what other optimizers may still make. It is asked only where the budget is refused.
    savable: `savable(graph, surely)` gives the bytes that running in another way (compiled, in tiles) would save, at most or
        surely. It is asked only where the step does not fit.
    parked: gives the step of a graph with what rests in a tier, and its bytes there; `parked(graph, True)`: with more of it
        than the tier has room for. It is asked only where no other plan fits.
    """
    headroom, machine = offloading.config.headroom, machine_of(offloading.device)
    plain_nbytes = unmodified_peak(graph, machine)
    if plain_nbytes <= budget_nbytes - headroom:
        return
    say("MemOpt: the step does not fit as it is; looking for a plan before anything is updated")
    most_nbytes = budget_nbytes + SCALARS_NBYTES  # kernels of an update may take less than its rehearsal has for scalars
    smallest_nbytes = _smallest_nbytes(graph, offloading, machine, most_nbytes - headroom) + headroom
    if smallest_nbytes <= most_nbytes:
        return
    least_nbytes = smallest_nbytes - savable(graph, False)
    if least_nbytes <= most_nbytes:
        return
    whole, (step, rests_nbytes) = graph, parked(graph, False)
    if step is not graph:
        with offloading.beside(rests_nbytes):
            parked_nbytes = _smallest_nbytes(step, offloading, machine, most_nbytes - headroom) + headroom
        if parked_nbytes <= most_nbytes:
            return
        if parked_nbytes < smallest_nbytes:
            graph, smallest_nbytes = step, parked_nbytes
        else:  # copies of what rests may take more than they make room for
            rests_nbytes = 0
    surely_nbytes = savable(graph, True)
    needed = smallest_nbytes - surely_nbytes
    strangers = later.strangers()
    later_nbytes = later.nbytes(strangers)
    with offloading.beside(rests_nbytes):
        at_worst_nbytes = _smallest_nbytes(at_worst(graph), offloading, machine) + headroom - surely_nbytes
    enough = max(needed, at_worst_nbytes) + later_nbytes + planner.UNSEEN_NBYTES
    left_nbytes = budget_nbytes - headroom - later_nbytes - planner.UNSEEN_NBYTES
    tiers, surely = dict[str, int](), True
    if offloading.limits and known:
        all_parked, taken_nbytes = parked(whole, True)
        tiers = _tiers_for(at_worst(all_parked), taken_nbytes, offloading, machine, left_nbytes)
        if not tiers:
            surely, tiers = False, _tiers_for(all_parked, taken_nbytes, offloading, machine, left_nbytes)
    unknown = "" if known else " What the update takes is not known before one has run, and comes on top."
    follows = (
        " What other optimizers do after this update has not run yet, and may need more." if later.follow(strangers) else ""
    )
    in_tier = tier_budgets_text(tiers) + (_IF if tiers and not surely else "")
    made = ", and for what other optimizers make" if later_nbytes else ""
    other = (
        f" From {least_nbytes} on ({format_nbytes(least_nbytes)}), a few steps find out whether less is enough if the step "
        "runs in another way (its loss head in tiles, or compiled)."
        if least_nbytes < needed
        else ""
    )
    none = " No plan is smaller than the unmodified step." if needed >= plain_nbytes + headroom else ""
    updated = "No optimizer of this run has stepped" if strangers else "Nothing was updated"
    spare = f" and headroom of {format_nbytes(headroom)}" if headroom else ""
    raise InfeasibleError(
        f"No plan of this model fits {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}). Set budget={enough} "
        f"or more ({format_nbytes(enough)}){in_tier}, or make the batch smaller. "
        f"{'The first' if tiers else 'This'} number has {format_nbytes(needed - headroom)} for the smallest plan of this "
        f"step{spare}, and {format_nbytes(enough - needed)} for what a loop may hold from one step "
        f"to the next{made}.{other}{none}{unknown}{follows} In memory when a step begins: {resident_text(graph)}. {updated}.",
        smallest_nbytes=enough,
        budget_nbytes=budget_nbytes,
        tiers=tiers,
    )


def _tiers_for(graph: Graph, rests_nbytes: int, offloading: Offloading, machine: Machine, limit_nbytes: int) -> dict[str, int]:
    """The budget of the tier with which a plan needs no more; nothing if none does, or if the tier is not too small.
    `rests_nbytes`: what is parked in the step of this graph, beside saved tensors.
    """
    with offloading.beside(rests_nbytes):
        frontier = _widened(graph, offloading, machine)
    if not isinstance(frontier, JointFrontier):
        return {}
    if frontier.smallest_nbytes > limit_nbytes:
        return frontier.tiers_for(limit_nbytes)
    is_short = rests_nbytes > (offloading.limit_nbytes or 0) and offloading.more_helps(rests_nbytes)
    return {offloading.tier: rests_nbytes} if is_short else {}


def _smallest_nbytes(graph: Graph, offloading: Offloading, machine: Machine, enough_nbytes: int = 0) -> int:
    """Bytes of the smallest plan, or of a plan that needs at most `enough_nbytes`."""
    if not offloading.wanted:
        return planner.smallest_nbytes(graph, machine, enough_nbytes)
    return _widened(graph, offloading, machine, enough_nbytes).smallest_nbytes


def _widened(graph: Graph, offloading: Offloading, machine: Machine, enough_nbytes: int = 0) -> planner.Frontier:
    """`enough_nbytes`: as when the step is solved for, time is up only when a plan needs no more, if any may."""
    clock, config, graph = times.current.solver_clock(thread_time), offloading.config, smoothed([graph])
    solved = planner.solve(
        graph,
        machine,
        limit_seconds=config.solver_seconds,
        search_seconds=worth(graph, config),
        keep_nbytes=enough_nbytes if max(fixed_levels(graph), default=0) <= enough_nbytes else None,
        clock=clock,
    )
    return offloading.widened(solved)
