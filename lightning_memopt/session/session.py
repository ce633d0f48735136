"""A session: one model, its optimizers, one budget. A front calls it; the packages below decide what follows.

    event                                 who says what follows
    `round`          a forward begins     forward: where it begins and ends, what records it; cache: the state of its signature
    `last_backward`  around a backward    early_updates: which parameters are updated in it
    `update_begins`  an update begins     solve: whether any plan will fit, before the first update
    `update_ended`   an update is over    ends: whether it ends the step
    `step_ended`     the step is over     measure: its peak. Of an observed step: observe gives the graph, solve the plan.
                                          Of a planned one: judge keeps the plan, replaces it, or has the step observed again
    `evaluating`     evaluation begins    nothing is observed or measured until the next step
    `close`          the run is over

What only some sessions need (compiled regions, ranks, a pool, parked tensors, early updates, tiles) is a part (parts.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import RankFailedError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan, names_of
from lightning_memopt.ranks import rebuild_buckets
from lightning_memopt.runtime import Engine, PlannedEngine
from lightning_memopt.runtime.early_updates import Reason, count_versions
from lightning_memopt.session.at_rest import AtRest
from lightning_memopt.session.attachment import Attachment
from lightning_memopt.session.budget import Neighbours, budget_on, device_of, limit_of
from lightning_memopt.session.cache.plan_cache import PlanCache
from lightning_memopt.session.deciding import Deciding
from lightning_memopt.session.early_updates import EarlyUpdating, wanted
from lightning_memopt.session.ends import Ends
from lightning_memopt.session.forward.recording import PlannedRecording, Recording
from lightning_memopt.session.forward.round import Rounds
from lightning_memopt.session.forward.sequence import Sequence
from lightning_memopt.session.forward.shapes import Entry, Signature, signature_of
from lightning_memopt.session.given_plan import read_given
from lightning_memopt.session.history import History
from lightning_memopt.session.judge.states import Running, State
from lightning_memopt.session.measure.peak_meter import Measured, Metering, in_compiled_code
from lightning_memopt.session.observe.effort import Effort
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.observe.observed_step import ObservedStep
from lightning_memopt.session.observe.observing import Observing, Waiting
from lightning_memopt.session.observe.resident import resident_tensors
from lightning_memopt.session.observe.silence import WAITS, Silence, gradients_are_recorded, trains
from lightning_memopt.session.parameters import Parameters
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Parts
from lightning_memopt.session.pooling import Pooling
from lightning_memopt.session.ranks.agreement import Agreement
from lightning_memopt.session.regions.compiled_regions import CompiledRegions
from lightning_memopt.session.regions.compiling import CompiledBlocks
from lightning_memopt.session.solve.foresight import Foresight
from lightning_memopt.session.solve.refusals import refuse_sharded
from lightning_memopt.session.status import RunStatus, Transfers, status_of, transfers_of
from lightning_memopt.session.step import Step
from lightning_memopt.session.tiling import Tiling
from lightning_memopt.trace import backward_runs
from lightning_memopt.versions import supported


class Session:
    """One session (see the module). `say` tells the user a line. Many methods: a front tells it of each event of a loop by a
    method of its own; the decisions are made in other files.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        config: MemOptConfig,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self._parameters = model, Parameters(model)
        self.device, self.optimizers, self.config = device_of(model), list(optimizers), config
        self.enabled = not disabled() and supported()
        self._parts = Parts()
        self._agreement = self._parts.add(Agreement(model, config, self.enabled))
        self.say = self._agreement.first_rank_says(say)
        self.budget_nbytes = budget_on(self.device, config) if self.enabled else None
        self._limit_nbytes = limit_of(self.budget_nbytes, config)
        self.rounds, self._sequence, self._ends, self._step = Rounds(), Sequence(), Ends(model, self.optimizers), Step()
        self._plan_cache, self.history = PlanCache(config), History(config.report is not None)
        self._current: State | None = None
        self.given, self._foreseen = read_given(self.device, self.budget_nbytes, config) if self.enabled else (None, None)
        self._observed_step = ObservedStep(model, self.optimizers, config, Effort(bounded=self._agreement.alone))
        self._metering, self._slowed = Metering(), False  # slowed: the last step was observed, or measured by a profiler
        self.foresight, self.silence = Foresight(self.optimizers, self._foreseen), Silence(config.profile_steps)
        self._offloading = self._parts.add(Offloading(self.device, config))
        regions = () if self.given is None else self.given[0].regions
        compiled = CompiledRegions(model, config, self.budget_nbytes, self.enabled, self._agreement, regions)
        self._compiled = self._parts.add(compiled)
        blocks = self._parts.add(CompiledBlocks(config, self.say))
        self.pool = Pooling(config, self.device, self.say, self._parts)
        self._tiling = Tiling(model, config, self._agreement, self.say, self._parts)
        written, kept = self._observed_step.overwritten, self._observed_step.kept
        alone = partial(getattr, self._agreement, "alone")
        self._at_rest = AtRest(model, self.optimizers, self._offloading, alone, self.say, self._parts, written, kept)
        in_order = compiled, self._tiling, self._at_rest, self._agreement, self._offloading
        self._deciding = Deciding(model, self.optimizers, *in_order, self._foreseen)
        self._neighbours = self._parts.add(Neighbours(self.device, self.budget_nbytes))
        self._early: EarlyUpdating | None = None
        self._attachment: Attachment | None = None
        if self.enabled:
            refuse_sharded(model, self.device, self.budget_nbytes, config, self.say)
            self._offloading.check(self.say)
            blocks.compile(model)
            self._attachment = Attachment(model, self.optimizers, self.device, self.say)  # last: only `close` ends it

    @contextlib.contextmanager
    def round(self, batch: Any, entered: str = "") -> Iterator[None]:
        """Around one forward pass. Does nothing in evaluation, without gradients, nested, where hooks are forbidden, or while a
        CUDA graph is captured. `entered`: the module that is called instead of the model, and begins a forward (round.py)."""
        was_open = self.rounds.is_open
        goes_on, busy = self.rounds.goes_on(batch), self.rounds.busy
        if not busy:
            self._settle()
        if not (goes_on or (not busy and self._applies(entered))):
            yield
            return
        entry = Entry(entered, self._ends.turn) if entered else None
        call = signature_of(entry, (), batch) if entry else None
        if call is not None and not goes_on and self.rounds.moves.skip(call):
            if was_open:  # a forward of moves alone
                self._observed_step.abandon()
            yield
            return
        self._observed_step.trains()
        begin = partial(self._begin_round, batch)
        try:
            with self._compiled.listening(), self.rounds.around(begin, self._round_ended, entry, call):
                yield
        except BaseException:
            self._observed_step.abandon(self.silence)
            self._step.interrupted()
            self._sequence.given_up()
            self._metering.close()  # an open meter keeps others from measuring until a step ends
            raise

    def update_in_backward(self, reasons: Callable[[], Iterable[Reason]] = tuple) -> None:
        """Do what `optimizer_in_backward` says (`wanted`). `reasons`: why the front forbids early updates."""
        early = wanted(self.model, self.optimizers, self.config, reasons, self.say) if self.enabled else None
        self._parts.drop(self._early)
        self._early = None if early is None else self._parts.add(early, first=True)  # it may raise, and must be ended
        self._at_rest.also_in_backward(None if early is None else early.updates)
        if early is not None and self.given is not None:
            early.adopt(names_of(self.given[1], self.given[0].updates))

    def last_backward(self) -> contextlib.AbstractContextManager[None]:
        """Around the last backward before the optimizer's step: it may update parameters early."""
        if self._early is None:
            return contextlib.nullcontext()
        state = self._current if self._step.began else None
        if isinstance(state, Observing):
            return self._early.last_backward(self._observed_step.now, self._early.early if state.early_known else ())
        if isinstance(state, Running) and not self._step.deviates:
            return self._early.last_backward(None, self._early.early - state.waiting)
        return self._early.last_backward(None, ())

    def closure_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step is about to run forward and backward inside of it."""
        self._observed_step.stop_metering()
        self._metering.span_begins(optimizer)

    def update_begins(self, optimizer: torch.optim.Optimizer, closure: bool = False) -> None:
        """An optimizer's update is about to run. `closure`: it runs forward and backward inside of it. Raises InfeasibleError
        where the first step shows that no plan will fit.
        """
        self.rounds.shut()
        observation, own = self._observed_step.now, self._ends.owns(optimizer)
        for tell in self._parts.update_begins:
            tell(optimizer, own, closure)
        self._metering.span_begins(optimizer, observation)
        if own:
            self._look_ahead(observation)
        if observation is not None:
            observation.update_begins()

    def closure_ran(self) -> None:
        """The forward and backward inside of a step are over. Raises as `update_begins` does."""
        self._look_ahead(self._observed_step.now)

    def _look_ahead(self, observation: Observation | None) -> None:
        state, early, savable = self._current, self._early, partial(self._tiling.savable_nbytes, self._compiled.savable_nbytes)
        parked = self._at_rest.all_parked
        others = [] if self._attachment is None or observation is None else self._attachment.others()
        try:
            names, refusal = early.shown(observation) if early is not None and isinstance(state, Observing) else (None, None)
            shown = names if isinstance(state, Observing) and not state.early_known else None
            plans = observation is not None and isinstance(state, Observing) and state.plans_next
            with self._agreement.update(plans, shown):
                if refusal is not None:
                    raise refusal
                if observation is not None and not backward_runs():  # one that steps in a hook does not end the backward
                    self.foresight.look(observation, self.budget_nbytes, self._offloading, self.say, others, savable, parked)
            if early is not None and isinstance(state, Observing) and shown is not None:
                state.for_early = early.agreed(self._agreement.early)
        except BaseException:
            if not in_compiled_code():  # see `update_ended`; the end of the run leaves it
                self._observed_step.abandon()
            raise

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has updated its parameters. The last optimizer ends the step, or else the next forward does."""
        if self.enabled:
            count_versions(optimizer)
        self._metering.span_ends(optimizer)
        self._observed_step.update_ended()
        # autograd and dynamo restore modes and profilers when their code ends, so none may end inside of it
        if self._ends.owns(optimizer) and self._ends.updated(optimizer) and not (backward_runs() or in_compiled_code()):
            self.step_ended()

    def step_ended(self) -> None:
        """The step is over. May solve a plan and put it in force."""
        # what belongs to the step ends: parts first, so that what they have only in a step is not measured
        self.rounds.step_ended()
        self._ends.clear()
        self._sequence.step_ended()
        step, self._step = self._step, Step()
        for tell in self._parts.step_ended:
            tell(step.plans)
        observation, before = self._observed_step.now, self._current
        self._slowed = self._metering.profiling or observation is not None
        measured = self._metering.close(observation)
        peak_nbytes = None if measured is None else measured.peak_nbytes
        if self.history.wanted:
            self.history.step_ended(*step.outcome(observation is not None), peak_nbytes)
        # what follows from it: a plan for an observed step, another state where a plan does not serve
        if isinstance(before, Observing | Waiting):
            with self._agreement.planning():
                self._end_observed(before)
        if isinstance(before, Running) and before.is_given:
            self._plan_cache.turned_out(before, self._sequence.last)
        self._judge(step, measured)
        self._observed_step.step_ended(self.say)
        self._plan_cache.step_ended(before, bool(step.plans), peak_nbytes, self.budget_nbytes)
        self.silence.step_ended()
        # until the next step, what its plan parks is away
        for tell_state in self._parts.between_steps:
            tell_state(self._current)
        self._metering.between.step_ended(bool(step.plans), self.device, self.budget_nbytes)

    def _judge(self, step: Step, measured: Measured | None) -> None:
        """For each plan that was in force in the step: keep it in force, or replace its state by a successor."""
        for state in step.plans:
            after = state.step_ended(self.say, None if measured is None else measured.peak_nbytes)
            if after is state and measured is not None:
                if state is step.largest:
                    after = state.measured(*measured, self.budget_nbytes, self.config, self.say)
                else:
                    state.was_metered()
            if after is not state:
                self._become(state, after)

    def trained_by(self, strangers: list[torch.optim.Optimizer]) -> None:
        """An optimizer that does not belong to the run steps. `strangers`: these replace those of the run."""
        if self._early is not None:
            self._early.stranger_steps()
        if strangers:
            self._observed_step.abandon()
            self.optimizers[:] = strangers
            self._parts.drop(self._early)
            self._ends, self._step, self._early = Ends(self.model, self.optimizers), Step(), None
            self._plan_cache.clear()

    def evaluating(self) -> None:
        """Evaluation begins: it is not observed, and not measured as part of a step that goes on after it (accumulation)."""
        self._settle()
        self._observed_step.abandon(self.silence)
        self._metering.evaluating(self.device)
        for tell in self._parts.evaluation_begins:
            tell()

    def close(self) -> None:
        """Leave every context that is still entered, and let go of what the session holds."""
        try:
            self.rounds.leave()
        finally:
            self._observed_step.abandon()
        self._ends.clear()
        self._step.plans.clear()
        leave = [] if self._attachment is None else [self._attachment.leave]
        with contextlib.ExitStack() as stack:  # one that raises (state on a disk that fails) leaves no other open
            for end in (*leave, self._metering.end, *reversed(self._parts.close)):
                stack.callback(end)

    def ended_by(self, error: BaseException) -> RankFailedError | None:
        """An error ends the run. Returns the error to raise instead, where another rank failed first (`Ranks.ended_by`)."""
        return self._agreement.ended_by(self.history.ended_by(error))

    def status(self) -> RunStatus:
        """The status of the run so far; where batches differ in shape, that of the batch whose step needs most bytes."""
        status = status_of(
            self._plan_cache, self.budget_nbytes, self.silence, self._compiled, self.pool, self._offloading, self._metering
        )
        return status if self.enabled else RunStatus(phase="off")

    def transfers(self) -> Transfers | None:
        """The transfers of the plan in force so far; None where it moves nothing. Waits for copies on a device to end."""
        return transfers_of(self._plan_cache.main, self._at_rest)

    @property
    def plan(self) -> Plan | None:
        return self.status().plan

    @property
    def observed_graph(self) -> Graph | None:
        """The step that was observed last, until a plan is made from it."""
        state = self._current
        return state.graphs[-1] if isinstance(state, Observing) and state.graphs else None

    @property
    def steady(self) -> bool:
        """Whether the last step and the begun part of the next ran as later ones will: neither observed nor profiled."""
        return not self._slowed and self._observed_step.now is None and not self._metering.profiling

    @property
    def halfway(self) -> int:
        """How many parameters were updated in a step that raised before it updated the others."""
        return 0 if self._early is None else self._early.updates.halfway

    def _applies(self, entered: str = "") -> bool:
        inside = bool(entered) and (self.rounds.is_called or backward_runs())  # a call beside the model's, or again
        return not inside and self.enabled and gradients_are_recorded() and self.silence.can_observe(self.model, self.device)

    def _settle(self) -> None:
        """End the step that a new forward ends. Give up an observed step where only evaluation goes on."""
        if backward_runs() and not self._step.is_nested:
            return  # a checkpoint of the user's runs modules again, and a hook has updated parameters before
        if self._ends.awaited or (self._step.began and self._ends.written_by_hand(self._observed_step.now)):
            self.step_ended()
        if not trains(self.model):
            for tell in self._parts.evaluates:
                tell(self._step.began)
            self._observed_step.evaluates(self.silence)

    def _begin_round(self, batch: Any, part: int | Entry) -> Recording | None:
        """A call of the model begins: settle what came before, decide which state serves it, and give what records it."""
        if isinstance(part, int) and part:  # else `round` has just done so
            self._settle()
        for tell in self._parts.call_begins:
            tell()
        trained = self._parameters.trained()
        self._has_changed()
        call = signature_of(part, trained, batch)
        goes_on, recording = (False, None) if part else self._goes_on(call)
        if goes_on:
            self._sequence.goes_on(call)
            return recording
        state = self._enter(call, batch)
        if not self._step.began:
            self._step.is_nested = backward_runs()
            for tell_state in self._parts.step_begins:
                tell_state(state, self._limit_nbytes)
        self._step.began = True
        if isinstance(state, Observing | Waiting):
            return self._tiling.recorded(state, self._observe(state, batch))
        self.silence.heard()
        self._metering.begin(self.model, self.optimizers, batch, self.device, isinstance(state, Running) and state.measures)
        recording = self._run(state) if isinstance(state, Running) else None
        self._ends.planned(None if recording is None else recording.engine)
        return self._tiling.recorded(state, recording)

    def _has_changed(self) -> None:
        """Drop all plans if the model has moved to another device, or DistributedDataParallel has new buckets of gradients."""
        if rebuild_buckets(self.model) and self._early is not None and self.plan is not None:
            self.say("MemOpt: DistributedDataParallel has made its buckets anew; observing again")
            self._plan_cache.clear()
        if (device := self._parameters.device or device_of(self.model)) == self.device:
            return
        self.device, self.budget_nbytes = device, budget_on(device, self.config)
        self._limit_nbytes = limit_of(self.budget_nbytes, self.config)
        self._neighbours.moved(device, self.budget_nbytes)
        self._offloading.moved(device)
        self._plan_cache.clear()

    def _enter(self, call: Signature, batch: Any) -> State:
        """A forward begins with this call: the state that serves it."""
        before, no_backward = self._current, self._sequence.is_waiting  # no_backward: the previous forward surely had none
        if isinstance(before, Observing | Waiting):
            no_backward = self._observed_step.now is not None and not self._observed_step.has_backward
        if no_backward and self._sequence.is_first:
            self._metering.begins_later()
        with self._agreement.first_forward():
            signature = self._sequence.begins(call, no_backward)
            if signature not in self._plan_cache:
                self._prepare(signature, batch)
            state = self._plan_cache.enter(signature, 1 if self._plan_cache or self._foreseen else self.config.profile_steps)
        if state is not before and self._observed_step.now is not None:
            if isinstance(before, Observing | Waiting) and self._observed_step.has_backward:
                self._end_observed(before)  # the step goes on with another signature
            else:
                self._observed_step.overtaken()
        for tell in self._parts.forward_begins:  # not before the step of the previous signature is settled
            tell(signature)
        self._current = state
        return state

    def _prepare(self, signature: Signature, batch: Any) -> None:
        """The first signature gets the user's plan, if any. Raises InfeasibleError if resident tensors exceed the budget."""
        if self.given is not None and not self._plan_cache:
            self._plan_cache[signature] = given = Running(*self.given, None)
            given.past.early_known = self._early is not None
        elif self.budget_nbytes is not None and not self._plan_cache.begins_anew:
            self._at_rest.begins(list(resident_tensors(self.model, self.optimizers, batch)), self.budget_nbytes)

    def _observe(self, state: Observing | Waiting, batch: Any) -> Recording | None:
        """The recording of an observed forward; None if the forward is not observed."""
        backward, waits = self._observed_step.has_backward, isinstance(state, Waiting)
        if self._observed_step.passes_over(self.silence):
            return None
        if self._observed_step.now is None:
            if isinstance(state, Observing) and not state.graphs:
                self._observed_step.announce(state, self.device, self.budget_nbytes, self.say)
            limit_nbytes = self._plan_cache.limit_nbytes(self._sequence.expected, self._limit_nbytes)
            self._observed_step.begin(state, self.device, limit_nbytes, self._at_rest.park_more)
        self.silence.forward(backward, WAITS if waits else None)
        self._ends.observing()
        if waits:
            self._metering.begin(self.model, self.optimizers, batch, self.device, wanted=False)
        else:
            self._metering.observing(self.device)
        assert self._observed_step.now is not None
        return self._observed_step.now.begin_round(batch, self._metering.possible)

    def _run(self, state: Running) -> Recording | None:
        """The recording of a forward under the plan of this state; None if the plan changes nothing."""
        self._step.runs(state)
        if state.program.empty and not state.unproven:
            return None
        state.depot = self._offloading.depot_of((state.lender or state).plan, self._plan_cache.in_force)
        state.learned.device = self.device
        engine = PlannedEngine(state.learned, self.config.verify and state.verifies, state.depot, state.unproven)
        if state.depot is not None:
            self._at_rest.weights.planned_forward_begins(engine.pass_fences)
        return PlannedRecording(engine, self.model)

    def _goes_on(self, call: Signature) -> tuple[bool, Recording | None]:
        """Whether this call of the model is part of the present forward, and its recording if so."""
        if isinstance(self._current, Observing | Waiting):
            recording = self._observed_step.goes_on()
            return recording is not None, recording
        is_given = isinstance(self._current, Running) and self._current.is_given  # only the ops say which calls its plan is for
        if not (self._sequence.expects(call) or (self._sequence.now and is_given)):
            return False, None
        if self._sequence.engine is None:
            return True, None
        engine = self._sequence.engine()
        goes_on = engine is not None and engine.next_call()
        return goes_on, PlannedRecording(engine, self.model) if goes_on and engine is not None else None

    def _round_ended(self, engine: Engine) -> None:
        if self._observed_step.now is not None:
            self._observed_step.now.forward_ended()
        if isinstance(engine, PlannedEngine) and isinstance(self._current, Running):
            self._step.deviates = self._step.deviates or not engine.cursor.deviation.aside
            self._sequence.ran(engine)
            if engine.is_whole:
                self._current.compare(engine, self.config.plan)

    def _end_observed(self, state: Observing | Waiting) -> None:
        if (graph := self._observed_step.finish()) is None:
            return
        if isinstance(state, Waiting):
            self._plan_cache.waited(state, graph)
            return
        if not self._plan_cache.turned_out(state, self._sequence.last):
            return
        self.silence.heard()
        if state.for_early:
            state.early_observed(graph)
            return
        self._plan_for(state, self.foresight.complete(graph, self.device, early=bool(graph.updates)))

    def _plan_for(self, state: Observing, graph: Graph) -> None:
        """A step of this state was observed. Another one must be, or the state gets a plan after its last step."""
        machine = self._deciding.machine(graph, self.device, self._early)
        cache, limit = self._plan_cache, self._limit_nbytes
        if self._deciding.observes_again(state, graph, machine, limit, self.say):
            self._become(state, cache.afresh(state, self._compiled.changed))
        else:
            solve = partial(self._deciding.solved, machine=machine, limit_nbytes=limit, say=self.say)
            self._become(state, cache.take_graph(state, graph, self.say, solve))

    def _become(self, old: State, new: State) -> None:
        if new is not old:
            self._plan_cache.replace(old, new)
            if isinstance(new, Running):
                self._compiled.plan_in_force(self.model)
            self._current = new if self._current is old else self._current
