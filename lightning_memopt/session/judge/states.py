"""The states of an input signature, and how one state follows another. `say` tells the user a line.

    state       meaning                                               next state
    Waiting     no plan is made now: every step is observed and       Observing, when a plan may be made;
                kept within the budget by eviction (longer.py)        Running, when a plan can be borrowed
    Observing   `steps` real steps are recorded                       Running, when a plan was solved for them;
                                                                      Failed, when every step has another forward
    Running     a plan is in force, the signature's own or borrowed   Running with a smaller plan, when a step was measured
                                                                      above the budget;
                                                                      Observing, when forwards in a row deviated from the
                                                                      plan, or a step changed tensors that rebuilds read;
                                                                      Waiting, when a borrowed plan does not serve
    Failed      the model trains without a plan (failed.py)           none

With early updates, `Observing` begins with one more step: it shows which gradients are final early, and no plan is made of it.
A signature is forgotten when too many others were used after it (plan_cache.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import MemOptError, PlanMismatchError
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Plan, early, names_of
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.runtime.engine.cursor import PlanDeviation
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.session.decide.advice import advice
from lightning_memopt.session.decide.solving import Solved, budget_for
from lightning_memopt.session.judge.held import beside, with_held
from lightning_memopt.session.observe.failed import Failed
from lightning_memopt.session.observe.observing import Observing, Say, Waiting
from lightning_memopt.session.observe.recurring import Recurring
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes

Solve = Callable[[Graph], Solved]
_IN_A_ROW = 2
"""So many forwards in a row must deviate to count as drift: one that takes another branch now and then needs no other plan."""
_LITTLE = 4
"""A deviation is small where the forward left out at least so many times the bytes that it kept beside the plan (LayerDrop)."""
_AGAIN = 3
"""How often a signature is observed again because of drift."""
_VERIFYING_NBYTES = 4 << 20
"""On CUDA a checksum takes 0.5 MiB for a moment, in which the allocator may reserve a segment of 2 MiB for each of its pools: a
first step, which verifies, may be above the budget by so much.
"""
_MEASURED_NEXT = 4
"""So many steps are measured after one that deviated. Where every step is another one, more of them would tell little."""
_MEASURED = 32
"""The most steps that are measured under one plan, because measuring takes time."""
_REGROWN = 16
"""How often a plan is replaced because the program holds more outside of the step."""
_SLIGHT = 0.02
_SLIGHT_NBYTES = 1 << 14
"""A step that takes no more above its prediction is still the planned one: this share, and under budget="min" these bytes."""
_MORE = 1.1
"""A warning about the peak is repeated when the peak is so many times the one that the last warning named."""
_PROOFS = 4
"""After so many measured steps of a lender's borrowers, the others are neither measured nor verified."""


def observed(state: Observing, graph: Graph, say: Say, solve: Solve) -> State:
    """Take a recorded step of a signature. The last one leads to the state of the plan that `solve` makes; or back to that of
    the plan before, which was made smaller because steps took more than predicted, where this step does not show why they do.
    Raises what `solve` raises.
    """
    planned = state.observed(graph, say)
    if not isinstance(planned, Graph):
        return planned
    before = state.before
    if isinstance(before, Running) and before.replanned and before.shown_nbytes >= max(unmodified_levels(planned), default=0):
        say("MemOpt: that step shows no more than those before; the plan stays in force")
        before.again, before.outgrown.due = state.again, 0
        return before
    frontier, plan, above = solve(planned)
    running = Running(plan, frontier.graph, frontier)
    if above is not None:
        running.exceeds(plan.predicted.needed_nbytes, above)
    running.again, running.early_known, running.outgrown = state.again, state.early_known, state.outgrown
    running.outgrown.step_ended()
    return running


class Running:
    """A plan is in force.

    plan: the plan.
    program: the plan as the engine executes it.
    learned: the templates of the ops that ran under it.
    frontier: the plans from which it was chosen; None where the user gave the plan.
    replanned: how often the plan was replaced because a step took more than predicted.
    regrown: how often it was replaced because the program holds more outside of the step.
    held_nbytes: bytes held outside of the step that the frontier does not count.
    waiting: names of the parameters that the plan does not update early, although it might.
    lender: the state of the other batch whose plan this is; None where the plan is the signature's own.
    refused: of a lender, how many borrowers it did not serve.
    wasted: of a lender, how often much smaller batches used its plan.
    proofs: of a lender, how many steps of its borrowers were measured.
    steps: how many steps ended under the plan.
    measured_nbytes: the largest measured peak; None where no step was measured.
    said_nbytes: the peak that the last warning named.
    to_measure: how many of the next steps are measured.
    may_measure: how many steps may still be measured in all.
    outgrown: measured steps that took clearly more than predicted.
    matched: a forward matched the plan.
    deviated: a forward deviated from the plan.
    deviations: the deviations of the forwards of this step.
    deviated_in_a_row: forwards in a row that deviated by more than a little (`_LITTLE`).
    again: how often drift led to observing again.
    excess_nbytes: the most bytes by which tensors of a forward exceeded the planned sizes.
    early_known: it is known which parameters are updated early.
    depot: holds the parked tensors of the plan; None where it parks nothing.
    """

    def __init__(
        self, plan: Plan, graph: Graph, frontier: planner.Frontier | None, replanned: int = 0, lender: Running | None = None
    ) -> None:
        self.plan, self.waiting = plan, names_of(graph, set(early(graph)).difference(plan.updates))
        self.program: Program = Program(graph, plan.lives) if lender is None else lender.program
        self.learned = Learned(self.program, sized=lender is None)
        self.frontier = frontier
        self.replanned = replanned
        self.lender = lender
        self.measured_nbytes: int | None = None
        self.steps = self.deviated_in_a_row = self.again = self.wasted = self.proofs = self.refused = self.excess_nbytes = 0
        self.matched = self.deviated = False
        self.held_nbytes = self.regrown = self.said_nbytes = 0
        self.outgrown = Recurring()
        self.early_known: bool = lender is not None and lender.early_known
        # on CUDA a meter empties the cache, where the first step, which verifies, leaves segments that no later one needs
        self.to_measure, self.may_measure = 2 if kind_of(graph.device).has_segments else 1, _MEASURED
        self.deviations: list[PlanDeviation] = []
        self.depot: Depot | None = None

    def lend(self, more_nbytes: int = 0) -> Running:
        """The state of a batch that borrows this plan. `more_nbytes`: it is larger, and expected to need so many bytes more."""
        return Running(beside(self.plan, more_nbytes), self.program.graph, self.frontier, self.replanned, lender=self)

    def has_room(self, times_larger: float) -> bool:
        """Whether a batch that is `times_larger` as large may borrow this plan: it is no larger, or its step fits the budget
        even if all bytes but the resident ones grow with the square of the size of the batch.
        """
        if times_larger <= 1.0:
            return True
        resident = self.program.resident_nbytes
        return resident + times_larger**2 * (self.plan.predicted.needed_nbytes - resident) <= self.plan.budget_nbytes

    @property
    def overtaken(self) -> frozenset[int]:
        """Ops that the plan runs again although a step changed their inputs too early: the backward of that step raised."""
        changed = set[int]()
        for deviation in self.deviations:
            changed |= deviation.changed
        if not changed:  # each step asks
            return frozenset()
        return frozenset(op.id for op in self.program.graph.forward if not changed.isdisjoint(op.inputs))

    @property
    def is_given(self) -> bool:
        """Whether the user gave the plan."""
        return self.frontier is None and self.lender is None

    @property
    def unproven(self) -> bool:
        """Whether the user gave the plan, and no forward has matched it yet."""
        return self.is_given and not self.matched

    @property
    def _trusted(self) -> bool:
        """Whether enough other borrowers were measured to trust this one: sizes do not change the decisions of a plan."""
        return self.lender is not None and self.lender.proofs >= _PROOFS and not self.deviated

    @property
    def verifies(self) -> bool:
        """Whether the tensors that the next step rebuilds are compared with the originals."""
        return self.steps < 1 and not self._trusted

    @property
    def measures(self) -> bool:
        """Whether the next step's peak is to be measured."""
        return self.to_measure > 0 and not self._trusted

    def compare(self, engine: PlannedEngine, path: str | os.PathLike[str] | None) -> None:
        """After a forward: note its deviation, and warn about the first one. `path`: the file of a given plan.

        A forward deviates where a planned save is missing because its op did not run, or where autograd saved a tensor that
        the plan does not know. Ops that save nothing (a metric, a log) do not count, nor do ops after the model's own forward:
        those are not recorded. Raises PlanMismatchError where the forward deviates from a given plan that none has matched.
        """
        graph, at = self.program.graph, engine.cursor.position
        deviation = engine.cursor.deviation
        self.deviations.append(deviation)
        if deviation.excess_nbytes > self.excess_nbytes and self.lender is None:
            self._measure_next()
        self.excess_nbytes = max(self.excess_nbytes, deviation.excess_nbytes)
        left = graph.forward[at:]
        missing = bool(left) and any(t in graph.saves_of for op in left if op.recomputable for t in op.outputs)
        if not missing and not deviation.unplanned_nbytes:
            self.matched = True
            self.deviated_in_a_row = 0
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
        much = _LITTLE * deviation.unplanned_nbytes > engine.left_out_nbytes()
        self.deviated_in_a_row = self.deviated_in_a_row + 1 if much else 0
        self._measure_next()
        if self.lender is None and not self.deviated:
            other = f"{name} instead of {planned}" if name != planned else f"{name} of other sizes or values"
            warnings.warn(
                f"MemOpt: the forward left the plan at op {at} ({other}). Tensors that do not match are kept: "
                "memory may rise, results do not change.",
                stacklevel=2,
            )
        self.deviated = True

    def _measure_next(self) -> None:
        """A step deviated: it is no longer proven that the next ones are within the budget."""
        self.to_measure = min(_MEASURED_NEXT, self.may_measure)

    def was_metered(self) -> None:
        """A step in which this plan was in force has been measured."""
        self.to_measure = max(0, self.to_measure - 1)
        self.may_measure -= 1
        if self.lender is not None:
            self.lender.proofs += 1

    def step_ended(self, say: Say, measured_nbytes: int | None) -> State:
        """A step is over. Returns this state, or its successor where the plan no longer serves. `measured_nbytes`: the peak of
        the step; None where it was not measured.
        """
        self.steps += 1
        if self.overtaken:
            return self.observed_again()
        for deviation in self.deviations:
            if deviation.out_of_order:
                self._measure_next()
        self.deviations.clear()
        if self.outgrown.step_ended() and not self.deviated:
            say(f"MemOpt: a step that takes more than predicted is due; observing it ({self.again + 1} of {_AGAIN})")
            return self._outgrown()
        if self.lender is not None:
            return self if self._is_served(measured_nbytes) else self._alone("a batch cannot borrow another one's plan", say)
        if self.deviated_in_a_row < _IN_A_ROW or self.again >= _AGAIN:
            return self
        say(f"MemOpt: {self.deviated_in_a_row} forwards in a row left the plan; observing again ({self.again + 1} of {_AGAIN})")
        return Observing(1, again=self.again + 1)

    def _is_served(self, measured_nbytes: int | None) -> bool:
        """Whether a borrower keeps its plan: its step was measured within the budget, whatever ops it ran (a recurrent net runs
        fewer ops for fewer words), or it ran the planned ops and its larger tensors fit the budget, too.
        """
        if measured_nbytes is not None and measured_nbytes <= self.plan.budget_nbytes:
            return True
        if self.lender is not None and self.plan is not self.lender.plan:  # this batch is larger
            return not self.deviated_in_a_row
        # twice: the gradient of a tensor may be larger, too
        at_most = self.plan.predicted_peak_nbytes + 2 * self.excess_nbytes
        return not self.deviated_in_a_row and at_most <= self.plan.budget_nbytes

    def _alone(self, why: str, say: Say) -> Waiting:
        """The state of a borrower that the borrowed plan does not serve: it waits for a plan of its own."""
        assert self.lender is not None
        self.lender.refused += 1
        larger = f" (its tensors are {format_nbytes(self.excess_nbytes)} larger)" if self.excess_nbytes else ""
        say(f"MemOpt: {why}{larger if not self.deviated_in_a_row else ' (it runs other ops)'}")
        return Waiting(alone=True)

    def observed_again(self) -> Observing:
        """The state after a step that changed starts of rebuilds: the next plan keeps the results of the ops that read them."""
        return Observing(1, again=self.again, fixed=self.overtaken)

    def measured(
        self, peak_nbytes: int, base_nbytes: int | None, budget_nbytes: int | None, config: MemOptConfig, say: Say
    ) -> State:
        """A step was measured. Where its peak is above the budget, `on_exceed` decides which state comes next. `base_nbytes`:
        bytes in memory when the step began; None where that is not known.
        """
        self.was_metered()
        over = peak_nbytes - (self.plan.budget_nbytes if budget_nbytes is None else budget_nbytes)
        if self.steps == 1 and self.to_measure > 0 and over <= _VERIFYING_NBYTES:
            return self  # it verified; the next step says what the plan takes
        self.measured_nbytes = max(peak_nbytes, self.measured_nbytes or 0)
        predicted = self.plan.predicted.needed_nbytes
        grown = 0 if base_nbytes is None else max(0, base_nbytes - self.program.resident_nbytes)
        grown = min(grown, max(0, peak_nbytes - predicted))  # the rest is freed before the peak: a graph of the step before
        slight = max(_SLIGHT_NBYTES, int(_SLIGHT * self.plan.budget_nbytes)) if budget_nbytes is None else 0
        more = peak_nbytes - grown - predicted > _SLIGHT * predicted
        replans = budget_nbytes is None or config.on_exceed == "replan"
        # within a budget, a step may take more than predicted
        again = budget_nbytes is None and self.outgrown.since is not None
        observe = replans and more and (over > slight or again) and self._outgrows()
        if budget_nbytes is None:
            return self._no_longer_smallest(peak_nbytes, grown, over > slight, observe, say)
        if over <= 0 and not observe:
            return self
        above = f"{over} above the budget" if over > 0 else f"within the budget of {budget_nbytes}"
        text = f"a planned step was measured at {peak_nbytes} bytes ({format_nbytes(peak_nbytes)}), {above}; "
        text += f"the plan predicted {predicted}"
        if grown:
            text += f", and the program holds {grown} bytes more outside of the step than when the plan was made"
        if config.on_exceed == "raise":
            raise MemOptError(f"{text}. Raise the budget, or set on_exceed='replan'.")
        if config.on_exceed == "warn" or self.frontier is None:
            return self.exceeds(peak_nbytes, f"{text}.")
        if self.lender is not None:
            return self._alone(f"{text}, of a larger batch", say)
        if observe:
            say(f"MemOpt: {text}; observing again ({self.again + 1} of {_AGAIN})")
            return self._outgrown()
        by_growth = grown > 0 and self.regrown < _REGROWN
        if self.replanned >= 3 and not by_growth:
            return self.exceeds(peak_nbytes, f"{text}.")
        held = self.held_nbytes + (grown if by_growth else 0)
        least = self.frontier.smallest_nbytes + held
        if by_growth:  # bytes that neither the prediction nor the growth explains need room, too
            target = budget_nbytes - config.headroom - max(0, peak_nbytes - grown - predicted)
        else:
            target = min(predicted, budget_nbytes) - max(over, 1 << 12)
        target = max(target, least)
        plan = beside(self.frontier.plan(target - held), held)
        if not by_growth and plan.predicted.needed_nbytes >= predicted:
            why = advice(self.program.graph, self.plan.lives, config)
            smallest = f"and no smaller plan exists. Set {budget_for(max(least, peak_nbytes), config)}"  # it has been measured
            return self.exceeds(peak_nbytes, f"{text}, {smallest}. {why}")
        say(f"MemOpt: {text}; replanned with {format_nbytes(target)}")
        return self._replaced(plan, held, by_growth)

    def _no_longer_smallest(self, peak_nbytes: int, grown: int, above: bool, observe: bool, say: Say) -> State:
        """Under budget="min", a step took more than predicted: the program holds more outside of it, or the step changed.
        `above`: clearly more than predicted. `observe`: as `_outgrows` says.
        """
        if self.lender is not None or self.frontier is None or not (above or observe):
            return self
        slight = max(_SLIGHT_NBYTES, int(_SLIGHT * self.plan.budget_nbytes))
        if grown > slight and self.regrown < _REGROWN:
            held = self.held_nbytes + grown
            return self._replaced(beside(self.plan, grown), held, by_growth=True)
        if observe:
            say(f"MemOpt: a step took more than the smallest plan needs; observing again ({self.again + 1} of {_AGAIN})")
            return self._outgrown()
        predicted = self.plan.predicted.needed_nbytes
        took = f"{peak_nbytes} bytes ({format_nbytes(peak_nbytes)}), and the smallest plan was to take {predicted}"
        if self.again >= _AGAIN and not self.deviated:
            return self.exceeds(peak_nbytes, f"a step took {took}: some steps do more than those that were observed.")
        if peak_nbytes > _MORE * self.said_nbytes and not self.outgrown.due and not self.deviated:
            self.said_nbytes = peak_nbytes
            say(f"MemOpt: a step took {took}; where that happens again, such a step is observed")
        return self

    def _outgrows(self) -> bool:
        """A step took clearly more than predicted: it has changed, for good or now and then. Returns whether the next one is
        observed.
        """
        observe = self.outgrown.again(ahead=2 if self.early_known else 1)  # with early updates, one more is observed first
        if self.lender is not None or self.frontier is None or self.deviated or self.again >= _AGAIN:
            self.outgrown.due = 0
            return False
        return self.program.empty if observe is None else observe  # an empty program compares no ops: it sees no other change

    def _outgrown(self) -> Observing:
        """The state that observes a step which takes more than predicted: the next plan is to serve it, too."""
        assert self.frontier is not None
        kept = (self.frontier.graph,)
        return Observing(1, again=self.again + 1, kept=kept, outgrown=self.outgrown, before=self)

    @property
    def shown_nbytes(self) -> int:
        """The unmodified peak of the steps that the plan was made of."""
        return 0 if self.frontier is None else self.frontier.unmodified_peak_nbytes

    def _replaced(self, plan: Plan, held_nbytes: int, by_growth: bool) -> Running:
        """The state with another plan of the same frontier, while `held_nbytes` are held outside of the step."""
        graph = with_held(self.program.graph, held_nbytes - self.held_nbytes)
        state = Running(plan, graph, self.frontier, self.replanned if by_growth else self.replanned + 1)
        state.again, state.early_known = self.again, self.early_known
        state.outgrown = self.outgrown
        state.held_nbytes, state.regrown = held_nbytes, self.regrown + 1 if by_growth else self.regrown
        return state

    def exceeds(self, peak_nbytes: int, text: str) -> Running:
        """No plan lowers the peak: warn once, and again when the peak has become clearly higher."""
        if peak_nbytes > _MORE * self.said_nbytes:
            self.said_nbytes = peak_nbytes
            warnings.warn(f"MemOpt: {text}", stacklevel=3)
        return self


State = Waiting | Observing | Running | Failed
