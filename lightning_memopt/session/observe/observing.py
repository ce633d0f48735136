"""The states of an input signature without a plan in force; states.py says how one state follows another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from lightning_memopt.graph import Graph
from lightning_memopt.logs import Say
from lightning_memopt.session.observe.covering import covering
from lightning_memopt.session.observe.failed import Failed
from lightning_memopt.session.observe.graphs import common, difference, smoothed


class Recurring:
    """When a step that took more than its plan predicted was measured, and when the next one is due.

    since: how many steps ago the last one was measured; None where none was.
    due: in how many steps the next one is to be observed; 0 where that is not known.
    """

    def __init__(self) -> None:
        self.since: int | None = None
        self.due = 0

    def step_ended(self) -> bool:
        """A step is over. Returns whether the next step is one to observe."""
        if self.since is not None:
            self.since += 1
        if not self.due:
            return False
        self.due -= 1
        return self.due == 0

    def again(self, ahead: int) -> bool | None:
        """The step that has just ended is one. Returns whether the next step is one to observe; None for the first of them. The
        next one is taken to come as many steps later as this one came after the last. `ahead`: how many steps before it
        observing begins.
        """
        before, self.since = self.since, 0
        if before is None:
            return None
        self.due = max(0, before - ahead)
        return self.due == 0


@dataclass(eq=False)
class Waiting:
    """No plan is made now: every step is kept within the budget by eviction, until a plan may be made.

    alone: the signature borrowed a plan that did not serve it, and borrows no more.
    """

    alone: bool = False


@dataclass(eq=False)
class Observing:
    """Steps are recorded, and a plan is made of them.

    steps: how many real steps are to be recorded.
    graphs: the graphs of the steps recorded so far.
    restarts: how often recording began anew because the step changed.
    again: how often drift led to this state.
    for_early: the step being observed only shows when gradients are final (early_updates.py); no plan is made of it.
    early_known: it is known which parameters are updated early.
    fixed: ids of the forward ops that no rebuild may run.
    kept: the graph of the plan before, which the next plan must serve, too: steps may take more only now and then.
    outgrown: steps that took clearly more than that plan predicted.
    before: the state, with a plan, of which a step took more than predicted; None where none did.
    announced: it was said that these steps are observed. Observing may begin many times before a step comes to its end.
    """

    steps: int
    graphs: list[Graph] = field(default_factory=list)
    restarts: int = 0
    again: int = 0
    for_early: bool = False
    early_known: bool = False
    fixed: frozenset[int] = frozenset()
    kept: tuple[Graph, ...] = ()
    outgrown: Recurring = field(default_factory=Recurring)
    before: object = None
    announced: bool = False

    @property
    def plans_next(self) -> bool:
        """Whether a plan is made of the step that is being observed, unless it only shows when gradients are final."""
        return len(self.graphs) + 1 == self.steps

    def early_observed(self, graph: Graph) -> None:
        """The step that shows when gradients are final is over."""
        self.for_early, self.early_known = False, True
        self.fixed = frozenset(op.id for op in graph.forward if not op.recomputable)
        self.steps = max(1, self.steps - 1)

    def afresh(self) -> Observing:
        """The state in which a step is observed again: code of the model was compiled, or is to be compiled again."""
        again = Observing(1, again=self.again, early_known=self.early_known)
        again.kept = self.kept
        again.outgrown = self.outgrown
        again.before = self.before
        return again

    def add(self, graph: Graph, say: Say) -> Graph | Observing | Failed:
        """Take a recorded step. The last one leads to the graph that a plan is made for, or to no plan at all."""
        self.graphs.append(graph)
        if len(self.graphs) < self.steps:
            return self
        observed = [*self.kept, *self.graphs]
        if self.kept and not common(observed):  # the forward has changed since
            observed = self.graphs
        graphs = common(observed)
        if graphs:
            return covering(smoothed(graphs), [g for g in observed if g is not graphs[-1]])
        say(f"MemOpt: the step changed while observing ({difference(self.graphs)})")
        del self.graphs[:-1]
        self.restarts += 1
        if self.restarts <= 3:
            return self
        reason = "its forward is another one every step, so no plan would match"
        warnings.warn(f"MemOpt: this model trains without a plan: {reason}.", stacklevel=2)
        return Failed(reason)
