"""A plan that was made before its step ran: `memopt fit` recorded the step without computing it, perhaps for a device that was
not there.

Such a plan lacks what only a real step shows: workspaces of kernels, times, other bytes in memory, and the names of a few
kernels that the device chooses. So the first step is observed, within the budget, and compared:

    the step                                            the plan
    other weights, or most ops are others               is refused before the first update (PlanMismatchError)
    the same sizes, and within the budget by the plan   is in force from the next step on, and nothing is searched
    other sizes, or above the budget by the plan        is the start of a search
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lightning_memopt.errors import PlanMismatchError
from lightning_memopt.graph import BEFORE, COMPILED, Graph, first_difference
from lightning_memopt.logs import Say
from lightning_memopt.plan import Machine, Plan
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.carried import Pairing, carried
from lightning_memopt.units import format_nbytes

_ALIKE = 0.75
"""Share of the ops with saved results that a step and the recorded one must have in common. Chosen: a device has other kernels
for a few ops of a layer, and another model with the same weights is rare."""


@dataclass(frozen=True)
class CarriedPlan:
    """What such a plan is for the step that was observed.

    path: its file.
    graph: the observed step.
    plans: the plan for that step; none where an op that it runs again cannot do so there.
    others: how many ops with saved results are others.
    resized: how many tensors have other sizes.
    """

    path: str
    graph: Graph
    plans: tuple[planner.Named, ...]
    others: int
    resized: int

    def frontier(self, limit_nbytes: int | None, machine: Callable[[], Machine], say: Say) -> planner.Frontier | None:
        """The frontier of the plan alone. None where more is to be searched: it takes more than the limit, the smallest plan is
        asked for, or sizes differ, so that less or more is to run again.
        """
        found = (self.others, "ops are others here"), (self.resized, "tensors have other sizes here")
        differs = [f"{n} of its {what}" for n, what in found if n]
        if not self.plans:
            differs.append("an op that it runs again cannot do so here")
        elif not self.resized and limit_nbytes is not None:
            frontier = planner.of_one(self.graph, self.plans[0], machine())
            over = frontier.smallest_nbytes - limit_nbytes
            if over <= 0:
                say(f"MemOpt: {self.path} is the plan of this step{_listed(differs)}; nothing is solved")
                return frontier
            differs.append(f"it is {format_nbytes(over)} above the budget with all that is in memory here")
        say(f"MemOpt: {self.path} is taken as the start of a search{_listed(differs)}")
        return None


def _listed(differs: list[str]) -> str:
    return f" ({', '.join(differs)})" if differs else ""


class Foreseen:
    """The plan of a file, and the step that it was made for. `take` gives it once: it is the plan of the first batch."""

    def __init__(self, path: str | os.PathLike[str], plan: Plan, graph: Graph) -> None:
        self._path = str(os.fspath(path))
        self._plan = plan
        self._graph = graph
        self._is_taken = False

    def check(self, step: Graph) -> None:
        """Before the first update. `step`: what was observed so far. Raises PlanMismatchError where it is another model's."""
        self._pairing(step, "Nothing was updated. ")

    def fits(self, step: Graph, limit_nbytes: int, machine: Machine) -> bool:
        """Whether a step is within the limit by this plan."""
        lives = carried(Pairing(self._graph, step), self._plan.lives)
        return lives is not None and planner.of_one(step, (self._plan.solver, lives), machine).smallest_nbytes <= limit_nbytes

    def take(self, graph: Graph) -> CarriedPlan | None:
        """What the plan is for this step; None where it was taken before. Raises PlanMismatchError as `check` does."""
        if self._is_taken:
            return None
        self._is_taken = True
        pairing = self._pairing(graph, "")
        lives = carried(pairing, self._plan.lives)
        plans = () if lives is None else ((self._plan.solver, lives),)
        return CarriedPlan(self._path, graph, plans, pairing.others, pairing.resized)

    def _pairing(self, step: Graph, nothing_done: str) -> Pairing:
        pairing = Pairing(self._graph, step)
        planned, here = _weights(self._graph), _weights(step)
        why = ""
        if planned != here:
            why = f"its weights are {_described(planned)}, this model's are {_described(here)}"
        elif pairing.share < _ALIKE and not any(op.name == COMPILED for op in step.ops):  # `memopt fit` runs it eagerly
            why = f"at {first_difference(self._graph, step)}"
        if why:
            raise PlanMismatchError(
                f"The plan {self._path} was made for another model: {why}. {nothing_done}Remove plan=, or ask `memopt fit` "
                "about this model."
            )
        return pairing


def _weights(graph: Graph) -> Counter[int]:
    """Bytes of a parameter of the step -> how many there are."""
    return Counter(t.nbytes for t in graph.tensors if t.kind == "parameter" and t.born_at == BEFORE)


def _described(weights: Counter[int]) -> str:
    return f"{weights.total()} tensors of {format_nbytes(sum(weights.elements()))}"
