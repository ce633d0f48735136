"""The states of an input signature, and how one state follows another. `say` tells the user a line.

    state      next state   when                                                        decided in

    Waiting: no plan is made now; eviction keeps every step within the budget (cache/longer.py)
               Observing    a plan may be made                                          PlanCache, as a forward begins
               Running      another signature's plan can be borrowed                    PlanCache, as a forward begins

    Observing: `steps` real steps are recorded
               Observing    the forward differs from the steps before                   Observing.add
               Observing    compiled regions, or tiles, are to run in another way       CompiledRegions, Tiling
               Running      a plan was solved for the steps                             after_observing
               Running      a signature like it had a plan first; its plan is borrowed  PlanCache, as a forward begins
               Running      it was a step larger than planned, and shows nothing new:   after_observing
                            the plan before it comes back
               Failed       every step has another forward                              Observing.add

    Running: a plan is in force, the signature's own or a borrowed one
               Running      a step was measured above the budget, and there is a        Running.measured
                            smaller plan
               Observing    a step took more than predicted, and another may            Running.measured, step_ended
               Observing    forwards in a row deviated from the plan                    Running.step_ended
               Observing    a step changed tensors that rebuilds read                   Running.step_ended, PlanCache
               Observing    the borrowed plan is for much larger batches                PlanCache, as a forward begins
               Waiting      a borrowed plan does not serve                              Running.step_ended, measured

    Failed: the model trains without a plan (failed.py)

    A move of the model to another device, and optimizers that replace those of the run, drop the states of all signatures
    (`Session._has_changed`, `trained_by`).

With early updates, `Observing` begins with one more step: it shows which gradients are final early, and no plan is made of it.
A signature is forgotten when too many others were used after it (plan_cache.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import MemOptError
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.logs import Say
from lightning_memopt.plan import Plan, early, names_of
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.session.judge.drift import Drift
from lightning_memopt.session.judge.held import beside, with_held
from lightning_memopt.session.judge.patience import PATIENCE
from lightning_memopt.session.judge.peaks import Peaks
from lightning_memopt.session.observe.failed import Failed
from lightning_memopt.session.observe.observing import Observing, Recurring, Waiting
from lightning_memopt.session.solve.advice import advice
from lightning_memopt.session.solve.solving import Solved, budget_for
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes

Solve = Callable[[Graph], Solved]


def after_observing(state: Observing, graph: Graph, say: Say, solve: Solve) -> State:
    """The state of a signature after one of its steps was recorded. The last one leads to the state of the plan that `solve`
    makes. Where an earlier plan was made smaller because steps took more than predicted, and this step takes no more than those
    before, that plan's state comes back. Raises what `solve` raises.
    """
    planned = state.add(graph, say)
    if not isinstance(planned, Graph):
        return planned
    before = state.before
    if (
        isinstance(before, Running)
        and before.past.replanned
        and before.shown_nbytes >= max(unmodified_levels(planned), default=0)
    ):
        say("MemOpt: that step shows no more than those before; the plan stays in force")
        before.past.again, before.past.outgrown.due = state.again, 0
        return before
    frontier, plan, above, _ = solve(planned)
    past = Past(again=state.again, early_known=state.early_known, outgrown=state.outgrown)
    running = Running(plan, frontier.graph, frontier, past)
    if above is not None:
        running.exceeds(plan.predicted.needed_nbytes, above)
    past.outgrown.step_ended()
    return running


@dataclass
class Past:
    """What led to a plan. The states that follow it inherit this.

    again: how often drift led to observing again.
    replanned: how often the plan was replaced because a step took more than predicted.
    regrown: how often it was replaced because the program holds more outside of the step.
    held_nbytes: bytes held outside of the step that the frontier does not count.
    early_known: it is known which parameters are updated early.
    outgrown: measured steps that took clearly more than predicted.
    """

    again: int = 0
    replanned: int = 0
    regrown: int = 0
    held_nbytes: int = 0
    early_known: bool = False
    outgrown: Recurring = field(default_factory=Recurring)


class Running:
    """A plan is in force.

    plan: the plan.
    waiting: names of the parameters that the plan does not update early, although it might.
    program: the plan as the engine executes it.
    learned: the templates of the ops that ran under it.
    frontier: the plans from which it was chosen; None where the user gave the plan.
    is_given: the user gave the plan.
    lender: the state of the other batch whose plan this is; None where the plan is the signature's own.
    refused: of a lender, how many borrowers it did not serve.
    wasted: of a lender, how often much smaller batches used its plan.
    past: what led to the plan.
    drift: how forwards differ from the plan.
    peaks: which steps are measured, and what they took.
    depot: holds the parked tensors of the plan; None where it parks nothing.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        frontier: planner.Frontier | None,
        past: Past | None = None,
        lender: Running | None = None,
    ) -> None:
        self.plan, self.waiting = plan, names_of(graph, set(early(graph)).difference(plan.updates))
        self.program: Program = Program(graph, plan.lives) if lender is None else lender.program
        self.learned = Learned(self.program, sized=lender is None)
        self.frontier = frontier
        self.is_given = frontier is None and lender is None
        self.lender, self.refused, self.wasted = lender, 0, 0
        self.past = Past() if past is None else past
        self.drift = Drift(self.program)
        # on CUDA a meter empties the cache, where the first step, which verifies, leaves segments that no later one needs
        self.peaks = Peaks(first=2 if kind_of(graph.device).has_segments else 1)
        self.depot: Depot | None = None

    def lend(self, more_nbytes: int = 0) -> Running:
        """The state of a batch that borrows this plan. `more_nbytes`: bytes more that a larger batch is expected to need."""
        past = Past(replanned=self.past.replanned, early_known=self.past.early_known)
        plan = self.plan if self.plan.addresses is None else replace(self.plan, addresses=None)  # it makes other requests
        return Running(beside(plan, more_nbytes), self.program.graph, self.frontier, past, lender=self)

    def has_room(self, times_larger: float) -> bool:
        """Whether a batch that is `times_larger` as large may borrow this plan: it is no larger, or its step fits the budget
        even if all bytes but the resident ones grow with the square of the size of the batch.
        """
        if times_larger <= 1.0:
            return True
        resident = self.program.resident_nbytes
        return resident + times_larger**2 * (self.plan.predicted.needed_nbytes - resident) <= self.plan.budget_nbytes

    @property
    def unproven(self) -> bool:
        """Whether the user gave the plan, and no forward has matched it yet."""
        return self.is_given and not self.drift.matched

    @property
    def _trusted(self) -> bool:
        """Whether enough other borrowers were measured to trust this one: sizes do not change the decisions of a plan."""
        return self.lender is not None and self.lender.peaks.proofs >= PATIENCE.proofs and not self.drift.deviated

    @property
    def verifies(self) -> bool:
        """Whether the tensors that the next step rebuilds are compared with the originals."""
        return self.peaks.steps < 1 and not self._trusted

    @property
    def measures(self) -> bool:
        """Whether the next step's peak is to be measured."""
        return self.peaks.wanted > 0 and not self._trusted

    def compare(self, engine: PlannedEngine, path: str | os.PathLike[str] | None) -> None:
        """After a forward: see `Drift.compare`. `path`: the file of a given plan."""
        if self.drift.compare(engine, path if path is not None and self.unproven else None, lent=self.lender is not None):
            self.peaks.measure_next()

    def was_metered(self) -> None:
        """A step in which this plan was in force has been measured."""
        self.peaks.was_metered()
        if self.lender is not None:
            self.lender.peaks.proofs += 1

    def step_ended(self, say: Say, measured_nbytes: int | None) -> State:
        """A step is over. Returns this state, or its successor where the plan no longer serves. `measured_nbytes`: the peak of
        the step; None where it was not measured.
        """
        self.peaks.steps += 1
        past, drift = self.past, self.drift
        if drift.inputs_changed:
            return self.observed_again()
        if drift.step_ended():
            self.peaks.measure_next()
        again = f"({past.again + 1} of {PATIENCE.observed_again})"
        if past.outgrown.step_ended() and not drift.deviated:
            say(f"MemOpt: a step that takes more than predicted is due; observing it {again}")
            return self._outgrown()
        if self.lender is not None:
            return self if self._is_served(measured_nbytes) else self._alone("a batch cannot borrow another one's plan", say)
        if drift.in_a_row < PATIENCE.drifting_forwards or past.again >= PATIENCE.observed_again:
            return self
        say(f"MemOpt: {drift.in_a_row} forwards in a row left the plan; observing again {again}")
        return Observing(1, again=past.again + 1)

    def _is_served(self, measured_nbytes: int | None) -> bool:
        """Whether a borrower keeps its plan: its step was measured within the budget, whatever ops it ran (a recurrent net runs
        fewer ops for fewer words), or it ran the planned ops and its larger tensors fit the budget, too.
        """
        if measured_nbytes is not None and measured_nbytes <= self.plan.budget_nbytes:
            return True
        if self.lender is not None and self.plan.budget_nbytes != self.lender.plan.budget_nbytes:  # this batch is larger
            return not self.drift.in_a_row
        # twice: the gradient of a tensor may be larger, too
        at_most = self.plan.predicted_peak_nbytes + 2 * self.drift.excess_nbytes
        return not self.drift.in_a_row and at_most <= self.plan.budget_nbytes

    def _alone(self, why: str, say: Say) -> Waiting:
        """The state of a borrower that the borrowed plan does not serve: it waits for a plan of its own."""
        assert self.lender is not None
        self.lender.refused += 1
        larger = f" (its tensors are {format_nbytes(self.drift.excess_nbytes)} larger)" if self.drift.excess_nbytes else ""
        say(f"MemOpt: {why}{larger if not self.drift.in_a_row else ' (it runs other ops)'}")
        return Waiting(alone=True)

    def observed_again(self) -> Observing:
        """The state after a step that changed starts of rebuilds: the next plan keeps the results of the ops that read them."""
        return Observing(1, again=self.past.again, fixed=self.drift.inputs_changed)

    def measured(
        self, peak_nbytes: int, base_nbytes: int | None, budget_nbytes: int | None, config: MemOptConfig, say: Say
    ) -> State:
        """A step was measured. Where its peak is above the budget, `on_exceed` decides which state comes next. `base_nbytes`:
        bytes in memory when the step began; None where that is not known.
        """
        self.was_metered()
        over = peak_nbytes - (self.plan.budget_nbytes if budget_nbytes is None else budget_nbytes)
        if self.peaks.verified(over):
            return self  # the next step says what the plan takes
        self.peaks.took(peak_nbytes)
        step = self._compared(peak_nbytes, base_nbytes)
        if budget_nbytes is None:
            return self._no_longer_smallest(step, say)
        observe = over > 0 and config.on_exceed == "replan" and step.takes_more and self._outgrows()
        if over <= 0 and not observe:
            return self
        above = f"{over} above the budget" if over > 0 else f"within the budget of {budget_nbytes}"
        text = f"a planned step was measured at {peak_nbytes} bytes ({format_nbytes(peak_nbytes)}), {above}; {step}"
        if config.on_exceed == "raise":
            raise MemOptError(f"{text}. Raise the budget, or set on_exceed='replan'.")
        if config.on_exceed == "warn" or self.frontier is None:
            return self.exceeds(peak_nbytes, f"{text}.")
        if self.lender is not None:
            return self._alone(f"{text}, of a larger batch", say)
        if observe:
            say(f"MemOpt: {text}; observing again ({self.past.again + 1} of {PATIENCE.observed_again})")
            return self._outgrown()
        return self._smaller(step, over, budget_nbytes, config, text, say)

    def _compared(self, peak_nbytes: int, base_nbytes: int | None) -> _Measured:
        """A measured step, beside what was predicted for it."""
        predicted = self.plan.predicted.needed_nbytes
        grown = 0 if base_nbytes is None else max(0, base_nbytes - self.program.resident_nbytes)
        grown = min(grown, max(0, peak_nbytes - predicted))  # the rest is freed before the peak: a graph of the step before
        return _Measured(peak_nbytes, predicted, grown)

    def _smaller(self, step: _Measured, over: int, budget_nbytes: int, config: MemOptConfig, text: str, say: Say) -> State:
        """A step was `over` the budget: the state with a smaller plan of the same frontier, or this state; where nothing was
        searched, the one that observes a step. `text` says what was measured.
        """
        assert self.frontier is not None
        if not self.frontier.searched and self.past.again < PATIENCE.observed_again:
            say(f"MemOpt: {text}; observing a step, to solve for it")
            return Observing(1, again=self.past.again + 1)
        by_growth = step.grown_nbytes > 0 and self.past.regrown < PATIENCE.regrown
        if self.past.replanned >= PATIENCE.replanned and not by_growth:
            return self.exceeds(step.peak_nbytes, f"{text}.")
        held = self.past.held_nbytes + (step.grown_nbytes if by_growth else 0)
        least = self.frontier.smallest_nbytes + held
        if by_growth:  # bytes that neither the prediction nor the growth explains need room, too
            target = budget_nbytes - config.headroom - max(0, step.unexplained_nbytes)
        else:
            target = min(step.predicted_nbytes, budget_nbytes) - max(over, 1 << 12)
        target = max(target, least)
        plan = beside(self.frontier.plan(target - held), held)
        if not by_growth and plan.predicted.needed_nbytes >= step.predicted_nbytes:
            why = advice(self.program.graph, self.plan.lives, config)
            needed = max(least, step.peak_nbytes)  # it has been measured
            smallest = f"and no smaller plan exists. Set {budget_for(needed, config)}"
            return self.exceeds(step.peak_nbytes, f"{text}, {smallest}. {why}")
        say(f"MemOpt: {text}; replanned with {format_nbytes(target)}")
        return self._replaced(plan, held, by_growth)

    def _no_longer_smallest(self, step: _Measured, say: Say) -> State:
        """Under budget="min", a step was measured: where it took more than predicted, the program holds more outside of it, or
        the step changed.
        """
        slight = max(PATIENCE.slight_nbytes, int(PATIENCE.slight_share * self.plan.budget_nbytes))
        above = step.peak_nbytes - self.plan.budget_nbytes > slight
        recurs = self.past.outgrown.since is not None
        observe = (above or recurs) and step.takes_more and self._outgrows()
        if self.lender is not None or self.frontier is None or not (above or observe):
            return self
        if step.grown_nbytes > slight and self.past.regrown < PATIENCE.regrown:
            held = self.past.held_nbytes + step.grown_nbytes
            return self._replaced(beside(self.plan, step.grown_nbytes), held, by_growth=True)
        if observe:
            again = f"({self.past.again + 1} of {PATIENCE.observed_again})"
            say(f"MemOpt: a step took more than the smallest plan needs; observing again {again}")
            return self._outgrown()
        took = f"{step.peak_nbytes} bytes ({format_nbytes(step.peak_nbytes)})"
        took += f", and the smallest plan was to take {step.predicted_nbytes}"
        if self.past.again >= PATIENCE.observed_again and not self.drift.deviated:
            return self.exceeds(step.peak_nbytes, f"a step took {took}: some steps do more than those that were observed.")
        if not self.past.outgrown.due and not self.drift.deviated and self.peaks.is_news(step.peak_nbytes):
            say(f"MemOpt: a step took {took}; where that happens again, such a step is observed")
        return self

    def _outgrows(self) -> bool:
        """A step took clearly more than predicted: all steps have changed, or some do now and then. Returns whether the next
        one is observed.
        """
        past = self.past
        observe = past.outgrown.again(ahead=2 if past.early_known else 1)  # with early updates, one more is observed first
        own = self.lender is None and self.frontier is not None
        if not own or self.drift.deviated or past.again >= PATIENCE.observed_again:
            past.outgrown.due = 0
            return False
        return self.program.empty if observe is None else observe  # an empty program compares no ops: it sees no other change

    def _outgrown(self) -> Observing:
        """The state that observes a step which takes more than predicted: the next plan is to serve it, too."""
        assert self.frontier is not None
        kept = (self.frontier.whole or self.frontier.graph,)  # steps are observed with nothing parked
        return Observing(1, again=self.past.again + 1, kept=kept, outgrown=self.past.outgrown, before=self)

    @property
    def shown_nbytes(self) -> int:
        """The unmodified peak of the steps that the plan was made of."""
        return 0 if self.frontier is None else self.frontier.unmodified_peak_nbytes

    def _replaced(self, plan: Plan, held_nbytes: int, by_growth: bool) -> Running:
        """The state with another plan of the same frontier, while `held_nbytes` are held outside of the step."""
        past = self.past
        graph = with_held(self.program.graph, held_nbytes - past.held_nbytes)
        regrown, replanned = past.regrown + by_growth, past.replanned + (not by_growth)
        return Running(plan, graph, self.frontier, replace(past, held_nbytes=held_nbytes, regrown=regrown, replanned=replanned))

    def exceeds(self, peak_nbytes: int, text: str) -> Running:
        """No plan lowers the peak: see `Peaks.warn`."""
        self.peaks.warn(peak_nbytes, text)
        return self


class _Measured(NamedTuple):
    """A measured step.

    peak_nbytes: its peak.
    predicted_nbytes: the peak that its plan predicted.
    grown_nbytes: bytes of the difference that the program holds more outside of the step than when the plan was made.
    """

    peak_nbytes: int
    predicted_nbytes: int
    grown_nbytes: int

    @property
    def unexplained_nbytes(self) -> int:
        """Bytes above the prediction that nothing outside of the step explains."""
        return self.peak_nbytes - self.grown_nbytes - self.predicted_nbytes

    @property
    def takes_more(self) -> bool:
        """Whether the step itself took clearly more than predicted."""
        return self.unexplained_nbytes > PATIENCE.slight_share * self.predicted_nbytes

    def __str__(self) -> str:
        text = f"the plan predicted {self.predicted_nbytes}"
        if not self.grown_nbytes:
            return text
        return f"{text}, and the program holds {self.grown_nbytes} bytes more outside of the step than when the plan was made"


State = Waiting | Observing | Running | Failed
