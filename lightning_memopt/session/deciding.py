"""From an observed step to its plan: everything that is decided, and in which order.

    what                                                              where it is decided
    how compiled regions run; in another way, a step is observed      regions
    whether the loss head runs in tiles; first, a step is observed    tiling
    in each way
    which state, gradients and weights are parked while they rest     at_rest, by solvers.parking
    whether all ranks make one plan together                          ranks
    which saved tensors are rebuilt or parked, and which parameters   solve.solving, by solvers.planner, and by
    are updated in backward                                           session.parking where tensors may be parked

Each row solves by the rows below it: it asks them for the best plan of a step, or of several, and puts what it has decided into
the plan. Addresses come later, after a step has run by the plan (pooling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_memopt.graph import Graph
from lightning_memopt.logs import Say
from lightning_memopt.plan import Machine
from lightning_memopt.session.at_rest import AtRest
from lightning_memopt.session.early_updates import EarlyUpdating
from lightning_memopt.session.observe.observing import Observing
from lightning_memopt.session.observe.resident import resident_tensors
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.ranks.agreement import Agreement
from lightning_memopt.session.regions.compiled_regions import CompiledRegions
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.session.solve.machine import machine_of
from lightning_memopt.session.solve.solving import Solved, tell
from lightning_memopt.session.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Deciding:
    """Decides for the steps of a session.

    optimizers: those of the session; the list may change.
    foreseen: the plan that the user made without a machine; None without one.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    regions: CompiledRegions
    tiling: Tiling
    at_rest: AtRest
    agreement: Agreement
    offloading: Offloading
    foreseen: Foreseen | None

    def machine(self, graph: Graph, device: torch.device, early: EarlyUpdating | None) -> Machine:
        """The machine that a plan for the step of this graph is made for. `early`: what updates parameters in backward."""
        own = bool(graph.updates) and self.agreement.alone  # ranks update the same parameters early
        seconds = early.seconds(device) if early is not None and own else 0.0
        return machine_of(device, resident_tensors(self.model, self.optimizers, ()), seconds)

    def observes_again(self, state: Observing, graph: Graph, machine: Machine, limit_nbytes: int | None, say: Say) -> bool:
        """Whether the step is to be observed in another way before a plan is made of it. `say` tells the user a line."""
        if self.regions.compiled_again(graph, limit_nbytes, say, machine):
            return True
        compiled_nbytes = max((stage.region.logits_nbytes for stage in self.regions.stages_of_step()), default=0)
        return self.tiling.observes_again(state, graph, limit_nbytes, machine, compiled_nbytes)

    def solved(self, graph: Graph, machine: Machine, limit_nbytes: int | None, say: Say) -> Solved:
        """The plan for the step of this graph. `limit_nbytes`: the bytes that it may take; None: as few as possible. `say`
        tells the user a line.

        Raises InfeasibleError where no plan keeps the limit, and that is not allowed.
        """

        def lives(step: Graph) -> Solved:
            return self.agreement.plan_for(step, limit_nbytes, self.offloading, say, machine, self.foreseen)

        def with_regions(step: Graph) -> Solved:
            return self.regions.in_plans(lives(step))

        def with_rests(step: Graph) -> Solved:
            return self.at_rest.solved(with_regions, limit_nbytes, step)

        solved = self.tiling.solved(with_rests, machine, limit_nbytes, graph)
        tell(solved, limit_nbytes, self.offloading, say)
        return solved
