"""Plain PyTorch: `with optimize(model, optimizer, budget=...) as run:` around an unchanged training loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memopt.config import MemOptConfig, Options, config_of
from lightning_memopt.plan import Plan
from lightning_memopt.record import instead_of_calls, uncompiled, uncompiled_itself, unwatched_call
from lightning_memopt.report.frontier import Row, rows
from lightning_memopt.report.table import summary
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.telemetry import Meter
from lightning_memopt.telemetry.meter import MeterOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Run:
    """What `optimize` gives: the plan in force, the report, and the controls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._paused = False
        self._meter: Meter | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while observing."""
        return self.session.plan

    def status(self) -> RunStatus:
        """What became of the run so far: its phase, the plan, peaks as predicted and measured."""
        return self.session.status()

    def save_plan(self, path: str) -> None:
        """Write the plan in force, with its graph, as JSON: `plan=path` uses it. Raises ConfigError where there is none yet."""
        self.session.save_plan(path)

    def report(self) -> str:
        """The table: budget, predicted, measured and unmodified peak, extra time, what is rebuilt, why the rest is kept."""
        return summary(self.status(), self._meter, self.session.transfers())

    def monitor(self, **options: Unpack[MeterOptions]) -> Meter:
        """A meter for this loop, options as of `Meter`: call its `step(samples=...)` after every optimizer step, and the report
        gains samples and joules."""
        self._meter = Meter(self.session.device, steady=lambda: self.session.steady, **options)
        return self._meter

    def frontier(self) -> list[Row]:
        """Every Pareto plan as a row: peak bytes, extra seconds, rebuilt bytes, extra FLOPs."""
        return rows(self.status().frontier)

    def step(self) -> None:
        """End a step by hand, where steps are not the optimizer's."""
        self.session.step_ended()

    def _measured(self, *raised: Any) -> None:
        if self._meter is not None:
            self._meter.__exit__(*raised)

    def last_backward(self) -> contextlib.AbstractContextManager[None]:
        """Around the last `backward()` before `optimizer.step()`: with `optimizer_in_backward` parameters are updated in it, as
        soon as their gradients are final, and `step()` finds nothing left to do. It must follow. Without, this does nothing.
        """
        return contextlib.nullcontext() if self._paused else self.session.last_backward()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The plain model inside this block."""
        before, self._paused = self._paused, True
        self.session.silence.paused = True
        try:
            yield
        finally:
            self._paused = self.session.silence.paused = before


class _Call:
    """Around one call of the model: its round, of which a compiled step that calls the model eagerly sees nothing."""

    __slots__ = ("_round",)

    @uncompiled
    def __init__(self, run: Run, batch: Any) -> None:
        self._round = contextlib.nullcontext() if run._paused else run.session.round(batch)

    @uncompiled
    def __enter__(self) -> None:
        self._round.__enter__()

    @uncompiled
    def __exit__(self, *error: Any) -> bool | None:
        return self._round.__exit__(*error)


def _attach(stack: contextlib.ExitStack, run: Run, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Watch the model's calls and the optimizers' updates until the stack is closed.

    Calls go through torch's own seam for replacing them (record/calls.py): it is left on every kind of exit (a forward hook is
    not told of KeyboardInterrupt), and no copy or pickle of the model sees it.
    """
    session = run.session

    @uncompiled_itself
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _Call(run, (args, kwargs)):
            return unwatched_call(model)(*args, **kwargs)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not any(optimizer is o for o in optimizers):
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

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is o for o in optimizers):
            session.update_ended(optimizer)

    # a step that is compiled runs them as they are: dynamo would trace what they enter and leave
    stack.callback(register_optimizer_step_pre_hook(torch.compiler.disable(before)).remove)
    stack.callback(register_optimizer_step_post_hook(torch.compiler.disable(after)).remove)
    stack.enter_context(instead_of_calls(model, watched))


def _readers(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Reason]:
    """What about the model and its optimizers forbids updates in backward."""
    found = []
    for module in model.modules():
        if type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
            found.append(Reason(f"{type(module).__name__} reduces gradients after they are final here", "Train without it"))
    if any(o._optimizer_step_pre_hooks for o in optimizers):
        found.append(Reason("a step pre-hook of the optimizer would see no gradients", "Remove it"))
    return found


def _wrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose hooks torch calls: Accelerate's and Lightning's wrappers are none of their own."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@overload
def optimize(
    model: nn.Module, optimizer: Optimizers, *, config: MemOptConfig
) -> contextlib.AbstractContextManager[Run]: ...


@overload
def optimize(
    model: nn.Module, optimizer: Optimizers, *, config: None = None, **options: Unpack[Options]
) -> contextlib.AbstractContextManager[Run]: ...


@contextlib.contextmanager
def optimize(
    model: nn.Module, optimizer: Optimizers, *, config: MemOptConfig | None = None, **options: Any
) -> Iterator[Run]:
    """Keep the training loop in this block within a budget. The loop is unchanged; options are those of `MemOptConfig`, or one
    `config` that has them all: both together raise ConfigError.

    Steps are delimited by the optimizer's own steps: the first `profile_steps` are observed, then the plan is in force.
    Raises InfeasibleError where no plan can keep the budget, as early as that is known:

    - in the first forward, before it runs, where parameters, buffers, optimizer state and the batch alone are above it;
    - in the first `optimizer.step()`, before it updates, where no plan of the first forward and backward keeps it, with what
      the update takes: torch's own optimizers are rehearsed on tensors without memory. The budget that it names works.

    What only later steps show (a larger batch, what the update of another optimizer takes) ends no training: the smallest plan
    is in force, and one line names a budget that works. With `on_exceed="raise"`, it is InfeasibleError.

    The observed steps are kept within the budget by eviction as well as can be; that is no promise.
    """
    config = config_of(config, options)
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    optimizers = [_wrapped(o) for o in given]
    session = Session(model, optimizers, config)
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # the second does nothing, unless the first was interrupted
            stack.callback(_close, session)
        run = Run(session)
        stack.push(run._measured)
        if session.enabled:  # else nothing is touched
            session.update_in_backward(lambda: _readers(model, optimizers))
            _attach(stack, run, model, optimizers)
        yield run


def _close(session: Session) -> None:
    """Close it, unless Python ends: torch 2.15 imports a module to leave a mode, and then it cannot."""
    if not sys.is_finalizing():
        session.close()
