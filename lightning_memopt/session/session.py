"""A session: one model, its optimizers, one budget. Per input signature: Observing -> Running, or Failed with a reason.

    Observing   `profile_steps` real steps are recorded; nothing is run twice; near the budget, packed tensors are evicted
    Running     a plan is in force; the first planned step is measured against the prediction
    Failed      the reason is said once; the model trains as it is

An adapter (strategy, `optimize`) delimits steps: `round(batch)` around every forward, `update_begins` and `update_ended`
around every optimizer's update. A step ends when all optimizers have updated, or when the next forward begins.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from lightning_memopt.config import MemOptConfig, disabled, free_nbytes
from lightning_memopt.errors import ConfigError, InfeasibleError, MemOptError, PlanMismatchError
from lightning_memopt.graph import Graph, first_difference
from lightning_memopt.plan import Plan, read_plan, write_plan
from lightning_memopt.record import interrupts
from lightning_memopt.runtime import PlannedEngine
from lightning_memopt.runtime.replay import Engine
from lightning_memopt.session.buckets import Failed, Observing, Running, State
from lightning_memopt.session.observation import Observation, common, resident_nbytes, resident_tensors, smoothed
from lightning_memopt.session.round import PlannedRecording, Recording, hooks_allowed
from lightning_memopt.session.step import StepMeter
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes

Signature = tuple[Any, ...]
_BUCKETS = 16
"""Input signatures with a plan of their own; beyond, batches are only kept within the budget by eviction."""
_IDLE = 3
"""Forward passes in evaluation after which a step that began to be observed is given up."""


class Session:
    """See the module. `say` prints a line of progress."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        config: MemOptConfig,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.config = config
        self.device = _device_of(model)
        self.enabled = not disabled() and config.recompute
        self.say: Callable[[str], None] = (say or print) if config.verbose else (lambda _: None)
        self.budget_nbytes = self._budget() if self.enabled else None
        self.buckets: dict[Signature, State] = {}
        self.current: State | None = None
        self.given: tuple[Plan, Graph] | None = None
        self._observation: Observation | None = None
        self._meter: StepMeter | None = None
        self._metered = False
        self._depth = 0
        self._batch: Any = None
        self._part = 0
        self._reopens: Any = None
        self._recording: Recording | None = None
        self._updated: set[int] = set()
        self._idle = 0
        if config.plan is not None and self.enabled:
            self.given = read_plan(config.plan)
            self._check_given()
        self._watches = self.enabled
        if self._watches:
            interrupts.watch()

    # -- what adapters call ------------------------------------------------------------------------

    @contextlib.contextmanager
    def round(self, batch: Any) -> Iterator[None]:
        """Around one forward pass. Does nothing in evaluation, without gradients, nested, or where hooks are forbidden."""
        if self._depth == 0:
            self._settle()
        if not self._applies():
            yield
            return
        self._depth += 1
        self._batch, self._part, self._idle = batch, 0, 0
        try:
            self._open()
            yield
            self._shut()
        except BaseException:
            self._drop()
            raise
        finally:
            self._batch = None
            self._depth -= 1

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward that runs inside a round (manual optimization): what follows it is a forward of its own."""
        if self._depth == 0:
            yield
            return
        self._shut()
        yield
        self._part += 1
        if self._reopens is None:
            self._reopens = register_module_forward_pre_hook(self._reopen)

    def update_begins(self) -> None:
        """An optimizer's update is about to run."""
        if self._observation is not None:
            self._observation.update_begins()

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has updated its parameters; with the last one the step is over."""
        self._updated.add(id(optimizer))
        if all(id(o) in self._updated for o in self.optimizers):
            self.step_ended()

    def step_ended(self) -> None:
        """The step is over. May solve a plan and put it in force."""
        self._updated.clear()
        state = self.current
        self._metered = self._meter is not None or (self._observation is not None and self._observation.meter)
        if self._observation is not None and isinstance(state, Observing):
            self._observed(state)
        elif isinstance(state, Running):
            state.steps += 1
            if self._meter is not None:
                self._measured(state)
        self._meter_closed()

    def evaluating(self) -> None:
        """Evaluation begins: nothing of it is observed."""
        self._settle()
        self._abandon()

    def close(self) -> None:
        """Leave everything that may still be entered."""
        self._drop()
        self._updated.clear()
        self._meter_closed()
        if self._watches:
            self._watches = False
            interrupts.unwatch()

    # -- results -----------------------------------------------------------------------------------

    @property
    def main(self) -> State | None:
        """The state of the signature with the largest unmodified peak that has a plan, else of any."""
        running = [s for s in self.buckets.values() if isinstance(s, Running)]
        if running:
            return max(running, key=lambda s: s.plan.unmodified_peak_bytes)
        return next(iter(self.buckets.values()), None)

    @property
    def plan(self) -> Plan | None:
        state = self.main
        return state.plan if isinstance(state, Running) else None

    @property
    def frontier(self) -> planner.Frontier | None:
        state = self.main
        return state.frontier if isinstance(state, Running) else None

    def save_plan(self, path: str) -> None:
        """Write the plan in force, with its graph, as JSON."""
        state = self.main
        if not isinstance(state, Running):
            raise ConfigError("There is no plan yet: it is made after the observed steps.")
        write_plan(path, state.plan, state.program.graph)

    # -- rounds ------------------------------------------------------------------------------------

    def _applies(self) -> bool:
        return (
            self.enabled
            and self._depth == 0
            and self.model.training
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and hooks_allowed()
        )

    def _settle(self) -> None:
        """End the step whose last update was awaited; leave one that is observed while only evaluation goes on."""
        if self._updated:
            self.step_ended()
        if self._observation is not None and not self.model.training:
            self._idle += 1
            if self._idle > _IDLE:
                self._abandon()

    def _abandon(self) -> None:
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.abandon()

    def _open(self) -> None:
        recording = self._begin_round(self._batch)
        if recording is not None:
            recording.__enter__()
            self._recording = recording

    def _shut(self) -> None:
        """The forward is over: leave its contexts."""
        recording, self._recording = self._recording, None
        self._stay_shut()
        if recording is not None:
            recording.__exit__()
            self._round_ended(recording.engine)

    def _drop(self) -> None:
        """Leave everything, whatever state the forward is in."""
        recording, self._recording = self._recording, None
        self._stay_shut()
        try:
            if recording is not None:
                recording.__exit__()
        finally:
            self._abandon()

    def _reopen(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._stay_shut()
            if self._updated:
                self.step_ended()
            self._open()

    def _stay_shut(self) -> None:
        handle, self._reopens = self._reopens, None
        if handle is not None:
            handle.remove()

    def _begin_round(self, batch: Any) -> Recording | None:
        self._same_device()
        trained = tuple(p.requires_grad for p in self.model.parameters())  # unfrozen layers save more: another plan
        signature = (self._part, trained, *signature_of(batch))
        state = self.buckets.get(signature)
        if state is None:
            state = self.buckets[signature] = self._new_state()
        before = self.current
        if state is not before and self._observation is not None:
            if isinstance(before, Observing) and self._observation.has_backward:
                self._observed(before)  # the step goes on with another signature
            else:
                self._abandon()
            state = self.buckets[signature]
        self.current = state
        if isinstance(state, Observing):
            if self._observation is None:
                self._observation = self._observe(state)
            return self._observation.begin_round(batch)
        if isinstance(state, Running):
            if state.measured_bytes is None and self._meter is None:
                resident = resident_nbytes(resident_tensors(self.model, self.optimizers, batch), self.device)
                # the profiler reports the end of what it saw being allocated, so of gradients made in a metered step
                gradients = [] if self._metered else [p.grad for p in self.model.parameters() if p.grad is not None]
                self._meter = StepMeter(self.device, resident, gradients)
            if state.program.empty and not self._unproven(state):
                return None
            engine = PlannedEngine(state.program, verify=self.config.verify and state.steps < 1)
            return PlannedRecording(engine, self.model)
        return None

    def _round_ended(self, engine: Engine) -> None:
        if self._observation is not None:
            self._observation.forward_ended()
        if isinstance(engine, PlannedEngine) and isinstance(self.current, Running):
            self._deviates(self.current, engine)

    def _unproven(self, state: Running) -> bool:
        """A plan that was given, before the forward it is to be compared with."""
        return self.given is not None and state.frontier is None and not state.matched

    def _deviates(self, state: Running, engine: PlannedEngine) -> None:
        """Refuse a given plan whose forward this is not; say once when a forward leaves the plan made for it.

        Planned saves of ops that did not run, or saves that the plan does not know, are a difference; ops that save nothing
        (a metric, a log) are none. Ops after the model's own forward were not recorded: they are not missed.
        """
        graph, at = state.program.graph, engine.position
        missing = any(t in graph.saves_of for op in graph.forward[at:] if op.recomputable for t in op.outputs)
        if not missing and not engine.unplanned:
            state.matched = True
            return
        at, name = engine.first_unmatched or (at, "nothing more")
        planned = state.program.names[at] if at < len(state.program.names) else "nothing more"
        if self._unproven(state):
            op = graph.forward[at] if at < len(graph.forward) else None
            where = f" in {op.scope}" if op is not None and op.scope else ""
            raise PlanMismatchError(
                f"The plan {self.config.plan} was made for another model (its fingerprint is {state.plan.fingerprint}): at op "
                f"{at} it expects {planned}{where}, the model ran {name}. Nothing was updated. Remove plan=, or give the plan "
                "of this model and batch size."
            )
        if not state.deviated:
            state.deviated = True
            warnings.warn(
                f"MemOpt: the forward left the plan at op {at} ({name} instead of {planned}). What does not match is kept: "
                "memory may rise, results do not change.",
                stacklevel=2,
            )

    def _new_state(self) -> State:
        if self.given is not None and not self.buckets:
            plan, graph = self.given
            return Running(plan, graph, None)
        steps = self.config.profile_steps if not self.buckets else 1
        return Observing(steps if len(self.buckets) < _BUCKETS else 1 << 62)

    def _observe(self, state: Observing) -> Observation:
        first, last = not state.graphs, len(state.graphs) + 1 == state.steps
        if first:
            self.say(
                f"MemOpt: observing {state.steps} step{'s' * (state.steps > 1)} on {self.device}"
                + (f" within {format_nbytes(self.budget_nbytes)}" if self.budget_nbytes else "")
            )
        limit = None if self.budget_nbytes is None else self.budget_nbytes - self.config.headroom
        return Observation(
            self.model, self.optimizers, self.device, limit, verify=self.config.verify and first, meter=last or first
        )

    # -- steps -------------------------------------------------------------------------------------

    def _observed(self, state: Observing) -> None:
        assert self._observation is not None
        observation, self._observation = self._observation, None
        graph = observation.finish()
        if graph is None or not any(op.phase == "backward" for op in graph.ops):
            return  # no forward, or one that nothing came of (`training_step` returned None)
        state.evictions += observation.evictions
        state.opaque_ops |= observation.opaque_ops
        state.graphs.append(graph)
        if len(state.graphs) < state.steps:
            return
        graphs = common(state.graphs)
        if graphs:
            self._solve(state, graphs)
            return
        self.say(f"MemOpt: the step changed while observing ({first_difference(state.graphs[-2], graph)})")
        del state.graphs[:-1]
        state.restarts += 1
        if state.restarts > 3:
            self._fail(state, "its forward is another one every step, so no plan would match")

    def _solve(self, state: Observing, graphs: list[Graph]) -> None:
        graph = smoothed(graphs)
        self.say(f"MemOpt: solving for {len(graph.ops)} ops, {len(graph.saves)} saved tensors")
        frontier = planner.solve(graph, limit_seconds=self.config.solver_seconds, say=lambda s: self.say(f"MemOpt:   {s}"))
        budget = frontier.smallest_bytes if self.budget_nbytes is None else self.budget_nbytes - self.config.headroom
        plan = frontier.plan(budget)  # InfeasibleError goes to the user
        self._replace(state, Running(plan, graph, frontier))
        bound = plan.lower_bound_seconds
        self.say(
            f"MemOpt: plan in force ({plan.solver}): predicted peak {format_nbytes(plan.predicted_peak_bytes)} of "
            f"{format_nbytes(budget)}, unmodified {format_nbytes(plan.unmodified_peak_bytes)}; extra "
            f"{1e3 * plan.predicted.extra_seconds:.1f} ms a step, no plan below {1e3 * bound:.1f} ms; "
            f"solved in {frontier.seconds:.1f} s"
        )

    def _measured(self, state: Running) -> None:
        assert self._meter is not None
        peak = self._meter.close()
        self._meter = None
        if peak is None:
            return
        state.measured_bytes = peak
        if self.budget_nbytes is None or peak <= self.budget_nbytes:
            return
        over = peak - self.budget_nbytes
        text = (
            f"a planned step was measured at {peak} bytes ({format_nbytes(peak)}), {over} above the budget; predicted were "
            f"{state.plan.predicted_peak_bytes}"
        )
        if self.config.on_exceed == "raise":
            raise MemOptError(f"{text}. Raise the budget, or set on_exceed='replan'.")
        if self.config.on_exceed == "warn" or state.frontier is None or state.replanned >= 3:
            warnings.warn(f"MemOpt: {text}.", stacklevel=2)
            return
        target = min(state.plan.predicted_peak_bytes, self.budget_nbytes) - max(over, 1 << 12)
        try:
            plan = state.frontier.plan(target)
        except InfeasibleError as error:
            warnings.warn(f"MemOpt: {text}, and no smaller plan exists ({error}).", stacklevel=2)
            return
        self.say(f"MemOpt: {text}; replanned with {format_nbytes(target)}")
        new = Running(plan, state.program.graph, state.frontier)
        new.replanned = state.replanned + 1
        self._replace(state, new)

    def _meter_closed(self) -> None:
        if self._meter is not None:
            self._meter.close()
            self._meter = None

    def _replace(self, old: State, new: State) -> None:
        for signature, state in self.buckets.items():
            if state is old:
                self.buckets[signature] = new
        self.current = new

    def _fail(self, state: State, reason: str) -> None:
        warnings.warn(f"MemOpt: left this model as it is: {reason}.", stacklevel=2)
        self._replace(state, Failed(reason))

    # -- checks ------------------------------------------------------------------------------------

    def _check_given(self) -> None:
        assert self.given is not None
        plan, graph = self.given
        if graph.device != self.device.type:
            raise PlanMismatchError(
                f"The plan {self.config.plan} was made for {graph.device}, the model is on {self.device.type}. Make a plan "
                "there."
            )
        if self.budget_nbytes is not None and self.config.budget != "auto" and plan.predicted_peak_bytes > self.budget_nbytes:
            raise InfeasibleError(
                f"The plan {self.config.plan} peaks at {plan.predicted_peak_bytes} bytes, above the budget of "
                f"{self.budget_nbytes}. Give it that budget, or leave plan= out.",
                smallest_nbytes=plan.predicted_peak_bytes,
                budget_nbytes=self.budget_nbytes,
            )

    def _budget(self) -> int | None:
        """The budget on this device, lowered to what other programs leave of it."""
        budget = self.config.budget_nbytes(self.device)
        free = free_nbytes(self.device)
        if budget is None or free is None or budget <= free:
            return budget
        warnings.warn(
            f"MemOpt: the budget is {budget} bytes ({format_nbytes(budget)}), but other programs leave {free} bytes "
            f"({format_nbytes(free)}) of {self.device}; planning for those.",
            stacklevel=2,
        )
        return free

    def _same_device(self) -> None:
        device = _device_of(self.model)
        if device != self.device:
            self.device = device
            self.budget_nbytes = self._budget()
            self.buckets.clear()


def signature_of(batch: Any) -> Signature:
    """Shapes, dtypes and devices of a batch's tensors: batches with the same signature share a plan."""
    return tuple((tuple(t.shape), t.dtype, t.device.type) for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


def _device_of(model: nn.Module) -> torch.device:
    for t in [*model.parameters(), *model.buffers()]:
        return t.device
    return torch.device("cpu")
