"""Plain PyTorch: `with optimize(model, optimizer, budget=...) as run:` around an unchanged training loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import AlreadyAttachedError
from lightning_memopt.plan import Plan
from lightning_memopt.report.frontier import Row, rows
from lightning_memopt.report.table import summary
from lightning_memopt.session import Session

_attached: set[int] = set()


class Run:
    """What `optimize` gives: the plan in force, the report, and the controls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._paused = False

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while observing."""
        return self.session.plan

    def report(self) -> str:
        """The table: budget, predicted, measured and unmodified peak, extra time, what is rebuilt, why the rest is kept."""
        return summary(self.session)

    def frontier(self) -> list[Row]:
        """Every Pareto plan as a row: peak bytes, extra seconds, rebuilt bytes, extra FLOPs."""
        return rows(self.session.frontier)

    def step(self) -> None:
        """End a step by hand, where steps are not the optimizer's."""
        self.session.step_ended()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The plain model inside this block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def _keyword_arguments() -> Any:
    """The keyword arguments of the module call whose global pre-hook is running.

    Global pre-hooks are given positional arguments only, and a hook on the model itself would travel with its copies and
    pickles; so they are read from the caller's frame (`Module._call_impl`). Without them only the choice of plan suffers.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("kwargs") if frame.f_code.co_name in ("_call_impl", "inner") else None


class _Attachment:
    """Global module and optimizer hooks, filtered by identity: nothing is left on the model or the optimizer."""

    def __init__(self, run: Run, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.run, self.model, self.optimizers = run, model, optimizers
        self._rounds: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> _Attachment:
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        return self

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()
        while self._rounds:
            self._rounds.pop().__exit__(*exc)
        self.run.session.close()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module is not self.model or self.run._paused:
            return
        batch = (args, _keyword_arguments())
        while self._rounds:  # a forward that ended in an exception our hook was not told of
            self._rounds.pop().__exit__(None, None, None)
        context = self.run.session.round(batch)
        context.__enter__()
        self._rounds.append(context)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.model and self._rounds:
            self._rounds.pop().__exit__(None, None, None)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is o for o in self.optimizers):
            self.run.session.update_begins()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is o for o in self.optimizers):
            self.run.session.step_ended()


@contextlib.contextmanager
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    config: MemOptConfig | None = None,
    **options: Any,
) -> Iterator[Run]:
    """Keep the training loop in this block within a budget. The loop is unchanged; options are those of `MemOptConfig`.

    Steps are delimited by the optimizer's own steps: the first `profile_steps` are observed, then the plan is in force.
    Raises InfeasibleError (naming the smallest budget) at the end of the observed steps where nothing fits.
    """
    config = config or MemOptConfig(**options)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if id(model) in _attached:
        raise AlreadyAttachedError("This model is inside another optimize() block. Leave that one first.")
    run = Run(Session(model, optimizers, config))
    _attached.add(id(model))
    try:
        with _Attachment(run, model, optimizers):
            yield run
    finally:
        _attached.discard(id(model))
