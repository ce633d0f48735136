"""What the steps that come will take, as it is known before the first update; and what is refused then, with nothing updated.

An observed step shows its forward and backward. What its update takes is rehearsed (rehearsal.py). What later steps have on top
of the first one is what the loop holds from one to the next: a loss, outputs, gradients that are let go after the forward
only; and what optimizers make whose turn has not come (a GAN's second one, those of other sessions). That depends on lines of
the loop that have not run yet, so no budget is refused for it, but the budget that a refusal names has room for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor, resident_nbytes, unmodified_levels
from lightning_memopt.native import counter
from lightning_memopt.plan import reserved_nbytes_of
from lightning_memopt.session import times
from lightning_memopt.session.final_gradients import Final
from lightning_memopt.session.graphs import smoothed, with_state
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.offloading import Offloading
from lightning_memopt.session.rehearsal import Rounded, Update, rehearse, still_to_make, with_gradients
from lightning_memopt.session.resident import state_made
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.units import format_nbytes

Say = Callable[[str], None]
_CUDA_ROUND = 512


class Foresight:
    """What the updates of these optimizers take. `update`: of all of them, one after the other, once it is known."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.update: Update | None = None

    def look(
        self,
        observation: Observation,
        budget_nbytes: int | None,
        offloading: Offloading,
        say: Say,
        others: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Before an update: find out what it takes, if it is the first one. Raises InfeasibleError where no plan of the steps
        that come keeps the budget. `others`: optimizers of other sessions.
        """
        if self.update is not None or not observation.has_backward:
            return
        self.update = self._rehearsed(observation.device)
        if budget_nbytes is not None:
            if observation.metered:
                observation.stop_metering()  # only then the profiler says what ops had for a moment
            waiting = [o for o in self.optimizers if not any(params for _, params in with_gradients(o))]
            device = observation.device
            later = sum(still_to_make(o, device, _rounded(device)) for o in (*waiting, *others))
            refuse_infeasible(self.to_come(observation), budget_nbytes, offloading, say, self.update.known, later)

    def to_come(self, observation: Observation) -> Graph:
        """The graph of the steps that come, by what was observed of this one until its update."""
        assert self.update is not None
        graph, finals = observation.to_come(), observation.finals_seen()
        if not finals:  # what others have updated already in this step (a GAN) has its state from the start of the next
            return with_update(with_state(graph, state_made(graph, self.optimizers, observation.device)), self.update)
        return with_early_updates(with_state(graph, self.update.state_nbytes), self._early(observation, finals))

    def complete(self, graph: Graph, device: torch.device, early: bool) -> Graph:
        """The graph of an observed step, with the state that its update made, and with what later updates take: they may do
        something else than the first one. `early`: parameters are updated in backward, where the step showed it.
        """
        made = state_made(graph, self.optimizers, device)
        if self.update is None or early:
            return with_state(graph, made)
        grows = [o for o in self.optimizers if type(o) is torch.optim.LBFGS]
        more = sum(rehearse(o, [], device, _rounded(device)).state_nbytes for o in grows)
        counted = device.type == "cpu" and counter() is not None  # then what the update held is in the graph already
        throughout = 0 if counted else self.update.throughout_nbytes
        return with_update(with_state(graph, made), self.update._replace(state_nbytes=more, throughout_nbytes=throughout), made)

    def _rehearsed(self, device: torch.device) -> Update:
        found = Update()
        for optimizer in self.optimizers:
            found = found.then(rehearse(optimizer, with_gradients(optimizer), device, _rounded(device)))
        return found

    def _early(self, observation: Observation, finals: Sequence[Final]) -> list[tuple[int, int]]:
        """(point, bytes) of what the update of each parameter has beside its state, where it is updated in backward."""
        (optimizer,) = self.optimizers
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(observation.model.named_parameters())
        each = []
        for final in finals:
            p = parameters[final.name]
            if id(p) in groups and p.grad is not None:
                update = rehearse(optimizer, [(groups[id(p)], [p])], observation.device, _rounded(observation.device))
                each.append((final.point, update.beside_nbytes))
        return each


def _rounded(device: torch.device) -> Rounded:
    return (lambda nbytes: nbytes) if device.type != "cuda" else lambda nbytes: -(-nbytes // _CUDA_ROUND) * _CUDA_ROUND


def with_update(graph: Graph, update: Update, made_nbytes: int = 0) -> Graph:
    """The graph of the same step with an update at its end, as one op that reads nothing, and with its state from the start.
    `made_nbytes`: of state that ops of the step's own update made.
    """
    end = len(graph.points)
    last = end - 1
    own = list(itertools.takewhile(lambda op: op.phase == "update", reversed(graph.ops)))
    begins = own[-1].at if own else end
    # what the update that ended the step made was for a moment, or it is state
    left = [t for t in graph.tensors if t.freed_at == last and t.born_at >= begins]
    made_nbytes = min(made_nbytes, sum(t.nbytes for t in left))
    tensors = [dataclasses.replace(t, freed_at=end) if t.freed_at == last and t.born_at < begins else t for t in graph.tensors]
    for name, nbytes, born_at in (
        ("made by update", update.state_nbytes, BEFORE),
        ("made by update", made_nbytes, end),
        ("held by update", update.throughout_nbytes, BEFORE),
    ):
        if nbytes:
            id = len(tensors)
            tensors.append(
                Tensor(id=id, name=name, nbytes=nbytes, kind="optimizer_state", storage=id, born_at=born_at, freed_at=end)
            )
    op = Op(
        id=len(graph.ops),
        name="optimizer update",
        phase="update",
        inputs=(),
        outputs=tuple(t.id for t in tensors if t.born_at == end),
        workspace_nbytes=update.beside_nbytes,
        at=end,
    )
    saves = tuple(dataclasses.replace(s, released_at=end) if s.released_at == last else s for s in graph.saves)
    points = (*graph.points, Point("op", op.id))
    return dataclasses.replace(graph, ops=(*graph.ops, op), tensors=tuple(tensors), saves=saves, points=points)


def with_early_updates(graph: Graph, each: Sequence[tuple[int, int]]) -> Graph:
    """The graph with what updates in backward have for a moment. `each`: (point, bytes)."""
    tensors = list(graph.tensors)
    for point, nbytes in each:
        id = len(tensors)
        tensors.append(
            Tensor(id=id, name="in update", nbytes=nbytes, kind="temporary", storage=id, born_at=point, freed_at=point)
        )
    return dataclasses.replace(graph, tensors=tuple(tensors))


def at_worst(graph: Graph) -> Graph:
    """The graph of a later step whose loop lets go of what the step before left only when backward begins."""
    last = len(graph.points) - 1
    forward_ends = max((op.at for op in graph.forward), default=BEFORE)
    until = min((at - 1 for save in graph.saves for at in save.unpacked_at), default=forward_ends)
    updates = {op.at for op in graph.ops if op.phase == "update"}  # the state that they made is there from the start
    tensors = list(graph.tensors)
    for t in graph.tensors:
        if t.born_at > BEFORE and t.born_at not in updates and t.freed_at == last and t.nbytes:
            id = len(tensors)
            tensors.append(
                dataclasses.replace(t, id=id, name=f"{t.name}, of the step before", storage=id, born_at=BEFORE, freed_at=until)
            )
    return dataclasses.replace(graph, tensors=tuple(tensors))


def unmodified_peak(graph: Graph) -> int:
    """What a budget is compared with, without a plan."""
    reserve = reserved_nbytes_of(graph)
    return reserve(keep_all(graph)) if reserve is not None else max(unmodified_levels(graph), default=0)


def refuse_infeasible(
    graph: Graph, budget_nbytes: int, offloading: Offloading, say: Say, known: bool, later_nbytes: int
) -> None:
    """Before the first update: raise InfeasibleError where no plan of the steps that come keeps the budget.

    Solves only where the unmodified step does not fit, and for the smallest plan alone. `known`: what updates take is all in
    the graph. `later_nbytes`: of gradients and state that other optimizers may still make.
    """
    headroom = offloading.config.headroom
    if unmodified_peak(graph) <= budget_nbytes - headroom:
        return
    say("MemOpt: the step does not fit as it is; looking for a plan before anything is updated")
    needed = _smallest_nbytes(graph, offloading) + headroom
    if needed <= budget_nbytes:
        return
    enough = max(needed, _smallest_nbytes(at_worst(graph), offloading) + headroom) + later_nbytes + planner.UNSEEN_NBYTES
    unknown = "" if known else " What the update takes is not known before one has run, and comes on top."
    raise InfeasibleError(
        f"No plan of this model fits {budget_nbytes} bytes ({format_nbytes(budget_nbytes)}): the smallest one needs "
        f"{needed} bytes ({format_nbytes(needed)}), of which {format_nbytes(resident_nbytes(graph))} are parameters, optimizer "
        f"state and the batch, and {format_nbytes(headroom)} are headroom. Nothing was updated.{unknown} Set budget={enough} "
        f"or more ({enough - needed} of them for what a loop may hold from one step to the next"
        f"{', and other optimizers make' if later_nbytes else ''}), or make the batch smaller.",
        smallest_nbytes=enough,
        budget_nbytes=budget_nbytes,
    )


def _smallest_nbytes(graph: Graph, offloading: Offloading) -> int:
    if not offloading.wanted:
        return planner.smallest_nbytes(graph)
    clock = times.current.solver_clock(time.thread_time)
    solved = planner.solve(smoothed([graph]), limit_seconds=offloading.config.solver_seconds, clock=clock)
    return offloading.frontier(solved).smallest_nbytes
