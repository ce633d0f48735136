"""The states of an input signature, and what leads from one to the next. `say` prints a line of progress.

    state       what it is                                            becomes
    Waiting     no plan is made now: every step is observed and       Observing, when a plan may be made;
                kept within the budget by eviction                    Running, when another plan may be borrowed
    Observing   `steps` real steps are recorded                       Running, when a plan was solved of the last one;
                                                                      Failed, when the forward is another one every step
    Running     a plan is in force, the signature's own or borrowed   Running, when a step was measured above the budget: a
                                                                      smaller plan;
                                                                      Observing, when forwards in a row deviated from the
                                                                      plan, or a step changed what rebuilds start from;
                                                                      Waiting, when a borrowed plan does not serve
    Failed      the model trains as it is (failed.py)                 -

`Observing` begins with one more step where parameters are updated in backward: it shows which gradients are final early, and no
plan is made of it. A signature of which too much else is used is forgotten (plan_cache.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import MemOptError, PlanMismatchError
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Plan
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.runtime.engine.cursor import PlanDeviation
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.session import solving
from lightning_memopt.session.advice import advice
from lightning_memopt.session.failed import Failed
from lightning_memopt.session.graphs import common, difference, smoothed
from lightning_memopt.session.held import beside, with_held
from lightning_memopt.session.offloading import Offloading
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes

Say = Callable[[str], None]
_IN_A_ROW = 2
"""Forwards that leave the plan before it counts as drift: one that takes another branch now and then needs no other plan."""
_LITTLE = 4
"""What is kept beside the plan is little where as many times more was left out: no other plan is better (LayerDrop)."""
_AGAIN = 3
"""How often a signature is observed again because of drift."""
_MEASURED_NEXT = 4
"""Steps that are measured after one that was not as planned: where each step is another one, the next says little."""
_MEASURED = 32
"""Steps that are measured of one plan at most: measuring takes time."""
_REGROWN = 16
"""How often a plan is replaced because more is held outside of the step."""
_SLIGHT = 0.02
_SLIGHT_NBYTES = 1 << 14
"""A step that takes as much more than predicted is another one: this share, and so many bytes where nobody named a budget."""
_MORE = 1.1
"""A warning about the peak is repeated where it is as many times higher."""
_PROOFS = 4
"""Steps of borrowers that are measured and verified for one lender."""


@dataclass(eq=False)
class Waiting:
    """No plan is made now: every step is kept within the budget by eviction, until a plan may be made.

    alone: it tried a plan of another batch, which does not serve.
    """

    alone: bool = False


@dataclass(eq=False)
class Observing:
    """Steps are recorded, to make a plan of.

    steps: how many real steps are to be recorded.
    graphs: those recorded so far.
    restarts: how often it began anew, because the step changed.
    again: how often drift led here.
    for_early: the step being observed shows when gradients are final (early_updates.py); no plan is made of it.
    early_known: that is known.
    fixed: ops of the forward that do not run again.
    """

    steps: int
    graphs: list[Graph] = field(default_factory=list)
    restarts: int = 0
    again: int = 0
    for_early: bool = False
    early_known: bool = False
    fixed: frozenset[int] = frozenset()

    def announce(self, device: torch.device, budget_nbytes: int | None, say: Say) -> None:
        """Say what begins."""
        within = f" within {format_nbytes(budget_nbytes)}" if budget_nbytes else ""
        say(f"MemOpt: observing {self.steps} step{'s' * (self.steps > 1)} on {device}{within}")

    def observe_early(self) -> None:
        """The step being observed updates all at its end: it only shows when gradients are final."""
        self.for_early = not self.early_known

    def early_observed(self, graph: Graph) -> None:
        """The step that shows when gradients are final is over."""
        self.for_early, self.early_known = False, True
        self.fixed = frozenset(op.id for op in graph.forward if not op.recomputable)
        self.steps = max(1, self.steps - 1)

    def observed(self, graph: Graph, limit_nbytes: int | None, offloading: Offloading, say: Say) -> State:
        """One more step was recorded; with the last one, the plan for `limit_nbytes`, the smallest plan where that is None, or
        where no plan fits: parameters have been updated, so what `on_exceed` says is done. "raise": InfeasibleError.
        """
        self.graphs.append(graph)
        if len(self.graphs) < self.steps:
            return self
        graphs = common(self.graphs)
        if graphs:
            running = _solved(smoothed(graphs), limit_nbytes, offloading, say)
            running.again, running.early_known = self.again, self.early_known
            return running
        say(f"MemOpt: the step changed while observing ({difference(self.graphs)})")
        del self.graphs[:-1]
        self.restarts += 1
        if self.restarts <= 3:
            return self
        reason = "its forward is another one every step, so no plan would match"
        warnings.warn(f"MemOpt: left this model as it is: {reason}.", stacklevel=2)
        return Failed(reason)


def _solved(graph: Graph, limit_nbytes: int | None, offloading: Offloading, say: Say) -> Running:
    frontier = solving.frontier_of(graph, offloading, say)
    plan, above = solving.chosen(frontier, graph, limit_nbytes, offloading.config, say)
    running = Running(plan, graph, frontier)
    if above is not None:
        running.exceeds(plan.predicted.needed_nbytes, above)
    return running


class Running:
    """A plan is in force.

    plan: the plan; `program` is what the engine makes of it, `learned` what its steps taught.
    frontier: the plans it was chosen from; None where the plan was given.
    replanned: how often a plan was replaced because a step took more than predicted.
    regrown: how often it was replaced because more is held outside of the step.
    held_nbytes: bytes that others hold beyond those that the frontier knows.
    lender: the state whose plan this is, where it is that of a larger batch.
    refused: of a lender, how many borrowers it did not serve.
    wasted: of a lender, uses by much smaller batches.
    proofs: of a lender, measured steps of its borrowers.
    steps: how many steps ran under the plan.
    measured_nbytes: the largest measured peak.
    said_nbytes: the peak that a warning named.
    to_measure: steps whose peak is to be measured; `may_measure`: in all no more than these.
    outgrown: measured steps in a row that took clearly more than predicted.
    matched: a forward was that of the plan.
    deviated: a forward was not, and that was said.
    deviations: of the forwards of this step.
    strays: forwards in a row that deviated.
    again: how often drift was answered by observing.
    excess_nbytes: by how much tensors were larger than planned, at most.
    early_known: it is known which parameters are updated in backward.
    depot: where the plan puts parked tensors; None where it parks nothing.
    """

    def __init__(
        self, plan: Plan, graph: Graph, frontier: planner.Frontier | None, replanned: int = 0, lender: Running | None = None
    ) -> None:
        self.plan = plan
        self.program: Program = Program(graph, plan.lives) if lender is None else lender.program
        self.learned = Learned(self.program, sized=lender is None)
        self.frontier = frontier
        self.replanned = replanned
        self.lender = lender
        self.measured_nbytes: int | None = None
        self.steps = self.strays = self.again = self.wasted = self.proofs = self.refused = self.excess_nbytes = 0
        self.matched = self.deviated = False
        self.held_nbytes = self.regrown = self.said_nbytes = self.outgrown = 0
        self.early_known: bool = lender is not None and lender.early_known
        self.to_measure, self.may_measure = 1, _MEASURED
        self.deviations: list[PlanDeviation] = []
        self.depot: Depot | None = None

    def lend(self) -> Running:
        """The state of a batch that is no larger and borrows this plan."""
        return Running(self.plan, self.program.graph, self.frontier, self.replanned, lender=self)

    def has_room(self, times_larger: float) -> bool:
        """Whether a batch so many times as large may borrow this plan: it is no larger, or what it takes is within the budget
        although all of it grows with the square of a batch's size.
        """
        if times_larger <= 1.0:
            return True
        resident = resident_nbytes(self.program.graph)
        return resident + times_larger**2 * (self.plan.predicted.needed_nbytes - resident) <= self.plan.budget_nbytes

    @property
    def overtaken(self) -> frozenset[int]:
        """Ops that the plan runs again although a step has changed what they read before backward needed it (which raised)."""
        changed = {t for deviation in self.deviations for t in deviation.changed}
        return frozenset(op.id for op in self.program.graph.forward if changed and not changed.isdisjoint(op.inputs))

    @property
    def unproven(self) -> bool:
        """A plan that was given, before the forward it is to be compared with."""
        return self.frontier is None and self.lender is None and not self.matched

    @property
    def _trusted(self) -> bool:
        """A borrower, after enough others: sizes do not change what a plan does."""
        return self.lender is not None and self.lender.proofs >= _PROOFS and not self.deviated

    @property
    def verifies(self) -> bool:
        """Whether what the next step rebuilds is compared with the originals."""
        return self.steps < 1 and not self._trusted

    @property
    def measures(self) -> bool:
        """Whether the next step's peak is to be measured."""
        return self.to_measure > 0 and not self._trusted

    def compare(self, engine: PlannedEngine, path: str | os.PathLike[str] | None) -> None:
        """After a forward: refuse a given plan (of `path`) whose forward this is not; note that the plan was left, say it once.

        Planned saves of ops that did not run, or saves that the plan does not know, are a difference; ops that save nothing
        (a metric, a log) are none. Ops after the model's own forward were not recorded: they are not missed.
        """
        graph, at = self.program.graph, engine.cursor.position
        deviation = engine.cursor.deviation
        self.deviations.append(deviation)
        if deviation.excess_nbytes > self.excess_nbytes and self.lender is None:
            self._measure_next()
        self.excess_nbytes = max(self.excess_nbytes, deviation.excess_nbytes)
        missing = any(t in graph.saves_of for op in graph.forward[at:] if op.recomputable for t in op.outputs)
        if not missing and not deviation.unplanned_nbytes:
            self.matched = True
            self.strays = 0
            return
        at, name = deviation.first or (at, "nothing more")
        planned = self.program.names[at] if at < len(self.program.names) else "nothing more"
        if self.unproven:
            op = graph.forward[at] if at < len(graph.forward) else None
            where = f" in {op.scope}" if op is not None and op.scope else ""
            raise PlanMismatchError(
                f"The plan {path} was made for another model (its fingerprint is {self.plan.fingerprint}): at op {at} it "
                f"expects {planned}{where}, the model ran {name}. Nothing was updated. Remove plan=, or give the plan of this "
                "model and batch size."
            )
        strays = _LITTLE * deviation.unplanned_nbytes > engine.left_out_nbytes()
        self.strays = self.strays + 1 if strays else 0
        self._measure_next()
        if self.lender is None and not self.deviated:
            other = f"{name} instead of {planned}" if name != planned else f"{name} of other sizes or values"
            warnings.warn(
                f"MemOpt: the forward left the plan at op {at} ({other}). What does not match is kept: "
                "memory may rise, results do not change.",
                stacklevel=2,
            )
        self.deviated = True

    def _measure_next(self) -> None:
        """A step was not the planned one: those that come are not proven to be within the budget."""
        self.to_measure = min(_MEASURED_NEXT, self.may_measure)

    def was_metered(self) -> None:
        """A step in which this plan was in force has been measured."""
        self.to_measure = max(0, self.to_measure - 1)
        self.may_measure -= 1
        if self.lender is not None:
            self.lender.proofs += 1

    def step_ended(self, say: Say, measured_nbytes: int | None) -> State:
        """A step is over: where the plan is no longer that of the forward, the state that observes again. `measured_nbytes`:
        what the step took, where that is known.
        """
        self.steps += 1
        if self.overtaken:
            return self.observed_again()
        if any(deviation.out_of_order for deviation in self.deviations):
            self._measure_next()
        self.deviations.clear()
        if self.lender is not None:
            return self if self._is_served(measured_nbytes) else self._alone("a batch cannot borrow another one's plan", say)
        if self.strays < _IN_A_ROW or self.again >= _AGAIN:
            return self
        say(f"MemOpt: {self.strays} forwards in a row left the plan; observing again ({self.again + 1} of {_AGAIN})")
        return Observing(1, again=self.again + 1)

    def _is_served(self, measured_nbytes: int | None) -> bool:
        """Whether a borrower keeps its loan: its step was measured within the budget, whatever its ops were (a recurrent net
        runs fewer ops for fewer words), or it ran those of the plan, and nothing speaks against it.
        """
        if measured_nbytes is not None and measured_nbytes <= self.plan.budget_nbytes:
            return True
        # each tensor that is larger, and perhaps its gradient, on top of all that was predicted
        return not self.strays and self.plan.predicted_peak_nbytes + 2 * self.excess_nbytes <= self.plan.budget_nbytes

    def _alone(self, why: str, say: Say) -> Waiting:
        """The state of a borrower that its lender does not serve: it waits for a plan of its own."""
        assert self.lender is not None
        self.lender.refused += 1
        larger = f" (its tensors are {format_nbytes(self.excess_nbytes)} larger)" if self.excess_nbytes else ""
        say(f"MemOpt: {why}{' (it runs other ops)' if self.strays else larger}")
        return Waiting(alone=True)

    def observed_again(self) -> Observing:
        """The state after a step that changed what rebuilds start from: what is made from it is kept. Its error said so."""
        return Observing(1, again=self.again, fixed=self.overtaken)

    def measured(
        self,
        peak_nbytes: int,
        base_nbytes: int | None,
        budget_nbytes: int | None,
        config: MemOptConfig,
        say: Say,
    ) -> State:
        """A step was measured: where it is above the budget, `on_exceed` says what comes. `base_nbytes`: when it began."""
        self.measured_nbytes = max(peak_nbytes, self.measured_nbytes or 0)
        self.was_metered()
        over = peak_nbytes - (self.plan.budget_nbytes if budget_nbytes is None else budget_nbytes)
        if over <= 0:
            self.outgrown = 0
            return self
        predicted = self.plan.predicted.needed_nbytes
        grown = 0 if base_nbytes is None else max(0, base_nbytes - resident_nbytes(self.program.graph))
        self.outgrown = self.outgrown + 1 if peak_nbytes - grown - predicted > _SLIGHT * predicted else 0
        if budget_nbytes is None:
            return self._no_longer_smallest(grown, over, say)
        text = (
            f"a planned step was measured at {peak_nbytes} bytes ({format_nbytes(peak_nbytes)}), {over} above the budget; "
            f"predicted were {predicted}"
        ) + (f", and {grown} bytes more than then are held outside of the step" if grown else "")
        if config.on_exceed == "raise":
            raise MemOptError(f"{text}. Raise the budget, or set on_exceed='replan'.")
        if config.on_exceed == "warn" or self.frontier is None:
            return self.exceeds(peak_nbytes, f"{text}.")
        if self.lender is not None:
            return self._alone(f"{text}, of a larger batch", say)
        if self.outgrown >= (1 if self.program.empty else _IN_A_ROW) and not self.deviated and self.again < _AGAIN:
            # where nothing is dropped, nothing was compared; and what follows the model's own forward is compared nowhere
            say(f"MemOpt: {text}; observing again ({self.again + 1} of {_AGAIN})")
            return Observing(1, again=self.again + 1)
        by_growth = grown > 0 and self.regrown < _REGROWN
        if self.replanned >= 3 and not by_growth:
            return self.exceeds(peak_nbytes, f"{text}.")
        held = self.held_nbytes + (grown if by_growth else 0)
        least = self.frontier.smallest_nbytes + held
        if by_growth:  # and by what the prediction does not explain
            target = budget_nbytes - config.headroom - max(0, peak_nbytes - grown - predicted)
        else:
            target = min(predicted, budget_nbytes) - max(over, 1 << 12)
        target = max(target, least)
        plan = beside(self.frontier.plan(target - held), held)
        if not by_growth and plan.predicted.needed_nbytes >= predicted:
            why = advice(self.program.graph, self.plan.lives, config)
            smallest = f"and no smaller plan exists (the smallest is {format_nbytes(least)})"
            return self.exceeds(peak_nbytes, f"{text}, {smallest}. {why}")
        say(f"MemOpt: {text}; replanned with {format_nbytes(target)}")
        return self._replaced(plan, held, by_growth)

    def _no_longer_smallest(self, grown: int, over: int, say: Say) -> State:
        """A step took more than the smallest plan was predicted to: others hold more, or it was another step."""
        slight = max(_SLIGHT_NBYTES, int(_SLIGHT * self.plan.budget_nbytes))
        if self.lender is not None or self.frontier is None or over <= slight:
            return self
        if grown > slight and self.regrown < _REGROWN:
            held = self.held_nbytes + grown
            return self._replaced(beside(self.frontier.plan(self.frontier.smallest_nbytes), held), held, by_growth=True)
        if self.outgrown < _IN_A_ROW or self.deviated or self.again >= _AGAIN:
            return self
        say(f"MemOpt: a step took more than the smallest plan needs; observing again ({self.again + 1} of {_AGAIN})")
        return Observing(1, again=self.again + 1)

    def _replaced(self, plan: Plan, held_nbytes: int, by_growth: bool) -> Running:
        """The state of another plan of the same frontier, with so much held outside of the step."""
        graph = with_held(self.program.graph, held_nbytes - self.held_nbytes)
        state = Running(plan, graph, self.frontier, self.replanned + (not by_growth))
        state.again, state.early_known = self.again, self.early_known
        state.held_nbytes, state.regrown = held_nbytes, self.regrown + by_growth
        return state

    def exceeds(self, peak_nbytes: int, text: str) -> Running:
        """Nothing can be done: said once, and again where it has become clearly more."""
        if peak_nbytes > _MORE * self.said_nbytes:
            self.said_nbytes = peak_nbytes
            warnings.warn(f"MemOpt: {text}", stacklevel=3)
        return self


State = Waiting | Observing | Running | Failed
