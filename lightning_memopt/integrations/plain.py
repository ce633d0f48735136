"""Plain PyTorch: `with optimize(model, optimizer, budget=...) as run:` around an unchanged training loop.

A session is told of every call of the model (its forwards) and of every `optimizer.step()`. If a step passes without a call of
the model, it is told of calls of single modules (entries.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memopt.config import MemOptConfig, Options, config_of
from lightning_memopt.integrations.checkpointing import LayerCheckpointing
from lightning_memopt.integrations.entries import Entries, trains
from lightning_memopt.integrations.strangers import Strangers
from lightning_memopt.plan import Plan
from lightning_memopt.record import instead_of_calls, uncompiled, uncompiled_itself
from lightning_memopt.report.frontier import Row, rows
from lightning_memopt.report.run import RunReport
from lightning_memopt.report.table import summary
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.session.given_plan import write_snapshot, write_status
from lightning_memopt.session.naming import naming
from lightning_memopt.telemetry import Meter
from lightning_memopt.telemetry.meter import MeterOptions
from lightning_memopt.torch_private import fsdp_units

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Run:
    """The handle that `optimize` returns: the plan in force, the report and controls.

    session: the session that observes and plans the training steps.
    checkpointing: the gradient checkpointing of the model's layers, which the plan replaces; None where the run is disabled.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.checkpointing: LayerCheckpointing | None = None
        self._paused = False
        self._within = set[int]()  # threads in which a call of the model, or of a module of it, runs
        self._meter: Meter | None = None
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """End the run: from now on the model trains plainly. The report stays. May be called again."""
        self._stack.close()

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while observing."""
        return self.session.plan

    def status(self) -> RunStatus:
        """The status of the run: its phase, the plan, the predicted and measured peaks."""
        layers = self.checkpointing.layers if self.checkpointing is not None else ()
        return dataclasses.replace(self.session.status(), checkpointed=layers)

    def save_plan(self, path: str) -> None:
        """Write the plan in force and its graph as JSON, for the option `plan=path`. Raises ConfigError if there is no plan."""
        write_status(path, self.session.status())

    def dump_snapshot(self, path: str) -> None:
        """Write a planned step as a memory snapshot in the format of `torch.cuda.memory._dump_snapshot`, for torch's own viewer
        (pytorch.org/memory_viz, or the module `torch.cuda._memory_viz`).

        The events are simulated from the plan in force and the step that it was made for, not recorded: plan/snapshot.py.
        Raises ConfigError if there is no plan, or the file cannot be written.
        """
        write_snapshot(path, self.status())

    def report(self) -> str:
        """A table: budget, peaks (predicted, measured, unmodified), extra time, rebuilt tensors, and why the rest is kept."""
        return summary(self.status(), self._meter, self.session.transfers())

    def monitor(self, **options: Unpack[MeterOptions]) -> Meter:
        """A meter for this loop; options are those of `Meter`.

        Call its `step(samples=...)` after every optimizer step; the report then shows samples a second and joules a sample.
        """
        self._meter = Meter(self.session.device, steady=lambda: self.session.steady, **options)
        return self._meter

    def frontier(self) -> list[Row]:
        """One row for each plan of the frontier: peak bytes, extra seconds, rebuilt bytes, extra FLOPs."""
        return rows(self.status().frontier)

    def step(self) -> None:
        """End a step by hand, for loops in which no torch optimizer ends it."""
        self.session.step_ended()

    def _end_meter(self, *raised: Any) -> None:
        """End the meter when the block ends. `raised`: the exception of the block, as `__exit__` gets it."""
        if self._meter is not None:
            self._meter.__exit__(*raised)

    def last_backward(self) -> contextlib.AbstractContextManager[None]:
        """A context for the last `backward()` before `optimizer.step()`.

        With `optimizer_in_backward`, each parameter is updated in this backward as soon as its gradient is final, and `step()`,
        which must follow, has nothing left to do. Without that option, this context does nothing.
        """
        return contextlib.nullcontext() if self._paused else self.session.last_backward()

    def naming(self, collectives: bool = False) -> contextlib.AbstractContextManager[None]:
        """See `session.naming`, for this run."""
        return naming(lambda: [self.session], collectives)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run the plain model inside this block: its forwards are neither observed nor planned."""
        before = self._paused
        self._paused = True
        self.session.silence.paused = True
        self.session.rounds.shut()
        self.session.pool.rests()
        try:
            yield
        finally:
            self._paused = before
            self.session.silence.paused = before


class _Call:
    """The context of one call of the model, or of one of its modules from outside of the model: a round of the session.

    It is hidden from dynamo, so that a compiled step that calls the model eagerly does not trace it.
    """

    __slots__ = ("_outermost", "_round", "_run")

    @uncompiled
    def __init__(self, run: Run, batch: Any, entered: str = "", applies: bool = True) -> None:
        self._run = run
        self._round = run.session.round(batch, entered) if applies and not run._paused else contextlib.nullcontext()

    @uncompiled
    def __enter__(self) -> None:
        thread, within = threading.get_ident(), self._run._within
        self._outermost = thread not in within
        within.add(thread)
        try:
            self._round.__enter__()
        except BaseException:
            self._leave()
            raise

    @uncompiled
    def __exit__(self, *error: Any) -> bool | None:
        self._leave()
        return self._round.__exit__(*error)

    def _leave(self) -> None:
        if self._outermost:
            self._run._within.discard(threading.get_ident())


def in_rounds(run: Run, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `forward`, which does not call the run's model itself, as a forward pass of that model."""

    @uncompiled_itself
    def in_round(*args: Any, **kwargs: Any) -> Any:
        with _Call(run, (args, kwargs)):
            return forward(*args, **kwargs)

    return in_round


def attach(stack: contextlib.ExitStack, run: Run, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Tell the run's session of the model's calls and the optimizers' updates, until the stack is closed.

    The calls are replaced through an attribute that torch provides for that (record/calls.py). Unlike a forward hook, the
    replacement also ends its round on KeyboardInterrupt; and copies and pickles of the model do not contain it.
    """
    session = run.session
    strangers = Strangers(session, model, optimizers)

    @uncompiled_itself
    def call_in_round(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strangers.called()
        with _Call(run, (args, kwargs)):
            return original(*args, **kwargs)

    @uncompiled_itself
    def enter(original: Callable[..., Any], module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in run._within or session.rounds.is_unrecorded:
            return original(*args, **kwargs)
        strangers.called()
        with _Call(run, (args, kwargs), name, applies=session.rounds.is_open or trains(module)):
            return module(*args, **kwargs)  # once more, because now there may be other listeners to the module

    entries = Entries(model, enter)

    def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not strangers.is_ours(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        session.update_begins(optimizer, closure is not None)
        if closure is None:
            return None

        def forward_and_backward() -> Any:
            result = closure()
            session.closure_ran()
            return result

        return (optimizer, forward_and_backward, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in map(id, optimizers):
            return
        session.update_ended(optimizer)
        entries.watch(session.rounds.watches_entries)
        if run.checkpointing is not None:
            run.checkpointing.look(session.status)

    # hidden from dynamo, which would trace the session's contexts in a compiled step
    stack.callback(register_optimizer_step_pre_hook(torch.compiler.disable(before_update)).remove)
    stack.callback(register_optimizer_step_post_hook(torch.compiler.disable(after_update)).remove)
    stack.enter_context(instead_of_calls(model, call_in_round))
    stack.callback(entries.close)
    entries.watch(True)


def _reasons_against_early_updates(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Reason]:
    """Reasons why the parameters of this model must not be updated in backward; an empty list if there are none."""
    reasons = []
    for module in model.modules():
        own = isinstance(module, DistributedDataParallel) or fsdp_units(module)  # session/ranks/processes.py has their reasons
        if not own and type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
            what = f"{type(module).__name__} reduces gradients only after parameters would have been updated"
            reasons.append(Reason(what, "Train without this wrapper"))
    if any(o._optimizer_step_pre_hooks for o in optimizers):
        reasons.append(Reason("a step pre-hook of the optimizer would see no gradients", "Remove it"))
    return reasons


def unwrapped(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers as a list, without the wrappers of Accelerate and Lightning, whose hooks torch does not call."""
    if isinstance(optimizers, torch.optim.Optimizer):
        return [_unwrapped(optimizers)]
    return [_unwrapped(optimizer) for optimizer in optimizers]


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@overload
def optimize(model: nn.Module, optimizer: Optimizers, *, config: MemOptConfig) -> contextlib.AbstractContextManager[Run]: ...


@overload
def optimize(
    model: nn.Module, optimizer: Optimizers, *, config: None = None, **options: Unpack[Options]
) -> contextlib.AbstractContextManager[Run]: ...


@contextlib.contextmanager
def optimize(model: nn.Module, optimizer: Optimizers, *, config: MemOptConfig | None = None, **options: Any) -> Iterator[Run]:
    """Keep the training loop in this block within a memory budget. The loop itself is unchanged.

    `options` are those of `MemOptConfig`; `config` has all of them in one object. Both together raise ConfigError.

    A step ends with `optimizer.step()`. The first `profile_steps` steps are observed, then the plan is in force. If no plan can
    keep the budget, InfeasibleError is raised as soon as this is known:

    - in the first forward, before it runs, if parameters, buffers, optimizer state and the batch alone are above the budget;
    - in the first `optimizer.step()`, before it updates, if no plan for the first forward and backward, together with the
      update, keeps the budget. For this, the update of torch's own optimizers is rehearsed on tensors without memory. The
      budget that the error names is large enough.

    Training does not end if only a later step shows that the budget is too small (a larger batch, or the update of another
    optimizer). The smallest plan is then in force, and one line names a budget that is large enough. With `on_exceed="raise"`,
    InfeasibleError is raised instead.

    Observed steps are kept within the budget by evicting tensors as far as possible, without a guarantee.
    """
    with contextlib.ExitStack() as stack:
        run = _opened(stack, model, optimizer, config_of(config, options))
        with run.naming():
            yield run


def open_run(
    model: nn.Module,
    optimizer: Optimizers,
    config: MemOptConfig,
    say: Callable[[str], None] | None = None,
    reasons: Callable[[], list[Reason]] = list,
) -> Run:
    """`optimize` for fronts that have no block to put the loop into: `run.close()` ends the run.

    Args:
        say: tells the user a line; None: `logs.say`.
        reasons: the front's reasons against updates in backward, in addition to those of the model and its optimizers.
    """
    with contextlib.ExitStack() as stack:
        run = _opened(stack, model, optimizer, config, say, reasons)
        run._stack = stack.pop_all()
    return run


def _opened(
    stack: contextlib.ExitStack,
    model: nn.Module,
    optimizer: Optimizers,
    config: MemOptConfig,
    say: Callable[[str], None] | None = None,
    reasons: Callable[[], list[Reason]] = list,
) -> Run:
    """A run that ends when the stack is closed."""
    optimizers = unwrapped(optimizer)
    report = RunReport(config, model)
    stack.push(report)  # first, so that the report is written after the session was closed
    session = Session(model, optimizers, config, say)
    for _ in range(2):  # the second call does nothing, unless the first one was interrupted
        stack.callback(_close, session)
    run = Run(session)
    report.begins(session, run.status, lambda: run._meter)
    stack.push(run._end_meter)
    if session.enabled:  # otherwise the loop runs exactly as without a run
        session.update_in_backward(lambda: [*reasons(), *_reasons_against_early_updates(model, optimizers)])
        run.checkpointing = LayerCheckpointing(model, session.say)
        stack.callback(run.checkpointing.restore)
        attach(stack, run, model, optimizers)
    return run


def _close(session: Session) -> None:
    """Close the session, unless Python is shutting down. (To leave a mode, torch 2.15 imports a module, which then fails.)"""
    if not sys.is_finalizing():
        session.close()
