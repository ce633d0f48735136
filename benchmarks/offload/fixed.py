"""What fixed policies would move in a step, and the fewest bytes that any plan must move. Both are computed, nothing runs.

A fixed policy parks all of some kinds of tensors, as the field's libraries do: the optimizer state (paged optimizers), the
gradients with it (ZeRO-Offload's placement), the weights of all blocks (block swapping), or saved tensors
(`torch.autograd.graph.save_on_cpu`). Updates run on the device, with the bits of the plain run, so all of it comes back. In
favour of these policies: updates take their state a chunk at a time, as the package's do; a saved tensor moves once, however
many views of it autograd saves; parameters that autograd saves do not move; and where a policy recomputes, it does so by the
best plan for the budget that the package's planner finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Machine, WeightParking, simulate
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.plan.simulate import fixed_levels
from lightning_memopt.plan.states import StateOf, parked
from lightning_memopt.plan.weights import UnitOf
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.frontier import Frontier
from lightning_memopt.solvers.offload.policies import one_stream
from lightning_memopt.solvers.offload.policy import carry_out


class Kind(NamedTuple):
    """What a policy parks of what rests, all of it."""

    name: str
    state: bool = False
    gradients: bool = False
    weights: bool = False

    def takes(self, each: StateOf | UnitOf) -> bool:
        """Whether it parks this."""
        if isinstance(each, UnitOf):
            return self.weights
        return self.state if each.parking.what == "state" else self.gradients


KINDS = (
    Kind("saved tensors alone"),
    Kind("state", state=True),
    Kind("state and gradients", state=True, gradients=True),
    Kind("weights", weights=True),
    Kind("weights and state", state=True, weights=True),
    Kind("weights, state and gradients", state=True, gradients=True, weights=True),
)
STAY, MOVE, AGAIN = "saved tensors stay", "saved tensors move", "recomputation"


@dataclass(frozen=True)
class Policy:
    """A fixed policy for one step.

    name: what it parks, and what becomes of saved tensors.
    moved_nbytes: bytes that it moves in a step, out and back.
    wait_seconds: seconds that a step waits for copies.
    smallest_nbytes: the smallest budget that it keeps.
    frontier: its plans, if it recomputes.
    """

    name: str
    moved_nbytes: int
    wait_seconds: float
    smallest_nbytes: int
    frontier: Frontier | None = None

    def seconds(self, budget_nbytes: int) -> float | None:
        """Extra seconds of a step within this budget; None if it does not keep it."""
        if self.smallest_nbytes > budget_nbytes:
            return None
        if self.frontier is None:
            return self.wait_seconds
        try:
            return self.wait_seconds + self.frontier.plan(budget_nbytes).predicted.seconds
        except InfeasibleError:
            return None


def nbytes_of(each: StateOf | UnitOf) -> int:
    """Bytes that a step moves if this is parked: state and gradients out and back, weights each time that they come or go."""
    return each.parking.moved_nbytes if isinstance(each.parking, WeightParking) else 2 * each.parking.nbytes


def policies_of(
    kind: Kind, step: Graph, rests: Sequence[StateOf | UnitOf], rates: MachineRates, tier: str, seconds: float, machine: Machine
) -> Iterator[Policy]:
    """The policies that park this kind. `step`: with `rests` parked, which is all that the kind takes. `seconds`: the time
    limit of the solver.
    """
    moved, waits = sum(map(nbytes_of, rests)), sum(each.parking.seconds for each in rests)
    if rests:
        yield Policy(f"{kind.name}; {STAY}", moved, waits, max(unmodified_levels(step)))
        frontier = planner.solve(step, machine, limit_seconds=seconds)
        yield Policy(f"{kind.name}; {AGAIN}", moved, waits, frontier.smallest_nbytes, frontier)
    lives, _ = carry_out(one_stream, step, rates, tier)
    predicted = simulate(step, lives, rates=rates).predicted
    saved = predicted.moved_nbytes
    yield Policy(f"{kind.name}; {MOVE}", moved + saved, waits + predicted.seconds, predicted.peak_nbytes)


def least_moved_nbytes(graph: Graph, once_nbytes: int, budget_nbytes: int) -> int:
    """No step of this graph within the budget moves fewer bytes, whatever is recomputed. `graph`: with nothing parked, and no
    early updates. `once_nbytes`: bytes of the frozen weights that may be parked.

    At each point of the step, no plan changes what `fixed_levels` count: weights, gradients and state, and what user code
    holds. Saved tensors that user code has let go of are not among them. Neither is, here, what updates take beside, since an
    update in chunks takes less. So at the point with the highest level, as many of these bytes are elsewhere as the level is
    above the budget. A step reads each of them, and ends as it began. So a frozen weight that is elsewhere at one point comes
    back at least once in a step. State has been written since it came, and a gradient was made on the device: both go out and
    come back.
    """
    excess = max(0, max(fixed_levels(parked(graph, (), ())), default=0) - budget_nbytes)
    return excess + max(0, excess - once_nbytes)
