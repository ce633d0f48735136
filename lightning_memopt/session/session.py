"""A session: one model, its optimizers, one budget. Per input signature: Observing -> Running, or Failed with a reason.

    Observing   `profile_steps` real steps are recorded; nothing is run twice; near the budget, packed tensors are evicted
    Running     a plan is in force; the first planned step is measured against the prediction
    Failed      the reason is said once; the model trains as it is

An adapter (strategy, `optimize`) delimits steps: `round(batch)` around every forward, `update_begins`, `step_ended`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import ConfigError, InfeasibleError, MemOptError, PlanMismatchError
from lightning_memopt.graph import Graph, first_difference, fingerprint
from lightning_memopt.plan import Plan, read_plan, write_plan
from lightning_memopt.record import Recorder
from lightning_memopt.runtime import PlannedEngine
from lightning_memopt.runtime.replay import Engine
from lightning_memopt.session.buckets import Failed, Observing, Running, State
from lightning_memopt.session.observation import Observation, resident_nbytes, resident_tensors, smoothed
from lightning_memopt.session.round import Recording, hooks_allowed
from lightning_memopt.session.step import StepMeter
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes

Signature = tuple[Any, ...]
_BUCKETS = 16
"""Input signatures with a plan of their own; beyond, batches are only kept within the budget by eviction."""


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
        self.say: Callable[[str], None] = say or (print if config.verbose else (lambda _: None))
        self.budget_nbytes = config.budget_nbytes(self.device)
        self.buckets: dict[Signature, State] = {}
        self.current: State | None = None
        self.given: tuple[Plan, Graph] | None = None
        self._observation: Observation | None = None
        self._meter: StepMeter | None = None
        self._metered = False
        self._depth = 0
        self._engines: list[PlannedEngine] = []
        if config.plan is not None:
            self.given = read_plan(config.plan)
            self._check_given()

    # -- what adapters call ------------------------------------------------------------------------

    @contextlib.contextmanager
    def round(self, batch: Any) -> Iterator[None]:
        """Around one forward pass. Does nothing in evaluation, without gradients, nested, or where hooks are forbidden."""
        if not self._applies():
            yield
            return
        self._depth += 1
        try:
            recording = self._begin_round(batch)
            if recording is None:
                yield
                return
            with recording:
                yield
            self._round_ended(recording.engine)
        except BaseException:
            if self._observation is not None:
                self._observation.abandon()
                self._observation = None
            raise
        finally:
            self._depth -= 1

    def update_begins(self) -> None:
        """The optimizer's update is about to run."""
        if self._observation is not None:
            self._observation.update_begins()

    def step_ended(self) -> None:
        """The step is over. May solve a plan and put it in force."""
        state = self.current
        self._metered = self._meter is not None or (self._observation is not None and self._observation.meter)
        if self._observation is not None and isinstance(state, Observing):
            self._observed(state)
        elif isinstance(state, Running):
            state.steps += 1
            if self._meter is not None:
                self._measured(state)
        self._meter_closed()

    def close(self) -> None:
        """Leave everything that may still be entered."""
        if self._observation is not None:
            self._observation.abandon()
            self._observation = None
        self._meter_closed()

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

    def _begin_round(self, batch: Any) -> Recording | None:
        self._same_device()
        signature = signature_of(batch)
        state = self.buckets.get(signature)
        if state is None:
            state = self.buckets[signature] = self._new_state()
        if state is not self.current and self._observation is not None:
            self._observation.abandon()  # the step mixes signatures: start over with the new one
            self._observation = None
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
            if state.program.empty:
                return None
            engine = PlannedEngine(state.program, verify=self.config.verify and state.steps < 1)
            return Recording(engine, Recorder(engine.tape, engine), own_mode=True)
        return None

    def _round_ended(self, engine: Engine) -> None:
        if self._observation is not None:
            self._observation.forward_ended()
        if isinstance(engine, PlannedEngine) and isinstance(self.current, Running):
            self._deviates(self.current, engine)

    def _deviates(self, state: Running, engine: PlannedEngine) -> None:
        if engine.unmatched and not state.deviated:
            state.deviated = True
            at, name = engine.first_unmatched or (0, "?")
            planned = state.program.names[at] if at < len(state.program.names) else "the end of the forward"
            if self.given is not None and state.steps == 0 and engine.position < len(state.program.names) // 2:
                raise PlanMismatchError(
                    f"The plan {self.config.plan} was made for another model: at op {at} it expects {planned}, the model ran "
                    f"{name}. Nothing was updated. Remove plan=, or give the plan of this model and batch size."
                )
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
        if graph is None:
            return
        state.evictions += observation.evictions
        state.opaque_ops |= observation.opaque_ops
        if state.graphs and fingerprint(graph) != fingerprint(state.graphs[-1]):
            self.say(f"MemOpt: the step changed while observing ({first_difference(state.graphs[-1], graph)})")
            state.graphs.clear()
            state.restarts += 1
            if state.restarts > 3:
                self._fail(state, "its forward is another one every step, so no plan would match")
                return
        state.graphs.append(graph)
        if len(state.graphs) >= state.steps:
            self._solve(state)

    def _solve(self, state: Observing) -> None:
        graph = smoothed(state.graphs)
        self.say(f"MemOpt: solving for {len(graph.ops)} ops, {len(graph.saves)} saved tensors")
        frontier = planner.solve(
            graph, limit_seconds=self.config.solver_seconds, say=lambda s: self.say(f"MemOpt:   {s}")
        )
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
                f"The plan {self.config.plan} was made for {graph.device}, the model is on {self.device.type}. Make a plan there."
            )
        if (
            self.budget_nbytes is not None
            and self.config.budget != "auto"
            and plan.predicted_peak_bytes > self.budget_nbytes
        ):
            raise InfeasibleError(
                f"The plan {self.config.plan} peaks at {plan.predicted_peak_bytes} bytes, above the budget of "
                f"{self.budget_nbytes}. Give it that budget, or leave plan= out.",
                smallest_nbytes=plan.predicted_peak_bytes,
                budget_nbytes=self.budget_nbytes,
            )

    def _same_device(self) -> None:
        device = _device_of(self.model)
        if device != self.device:
            self.device = device
            self.budget_nbytes = self.config.budget_nbytes(device)
            self.buckets.clear()


def signature_of(batch: Any) -> Signature:
    """Shapes, dtypes and devices of a batch's tensors: batches with the same signature share a plan."""
    return tuple((tuple(t.shape), t.dtype, t.device.type) for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


def _device_of(model: nn.Module) -> torch.device:
    for t in [*model.parameters(), *model.buffers()]:
        return t.device
    return torch.device("cpu")
