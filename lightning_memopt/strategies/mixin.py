"""MemOptMixin: one cooperative mixin over Lightning's own strategies (every override calls `super()`).

Lightning decides by `isinstance`, so a strategy that wraps and delegates does not work; a mixin does. It must derive from
`abc.ABC`. The session is opened in `setup` when fitting and closed in `teardown`, which Lightning also calls on exceptions.
"""

from __future__ import annotations

import abc
import contextlib
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError
from lightning_memopt.report.table import summary
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.strategies.in_backward import of_trainer
from lightning_memopt.telemetry import Meter

CHECKPOINT_KEY = "lightning_memopt"


class MemOptMixin(abc.ABC):
    """Keeps training steps within the budget of `memopt_config`. Validation, test and predict are not touched."""

    memopt_config: MemOptConfig
    session: Session | None = None
    telemetry: Meter | None = None
    """Set by a callback that measures; the table at the end shows what it found."""
    _stepping = False
    """Whether an optimizer's step runs the closure: the backward in it is the last one."""

    # -- lifecycle ---------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if self.session is not None:
            self.session.close()  # of a fit that was not torn down
        self.session = None
        if trainer.state.fn == "fit":
            self.session = Session(self.model, self.optimizers, self.memopt_config, say=rank_zero_info)  # type: ignore[attr-defined]
            self.session.update_in_backward(lambda: of_trainer(trainer))

    def teardown(self) -> None:
        session = self.session
        try:
            if session is not None:
                session.close()
                if self.memopt_config.verbose:
                    rank_zero_info(summary(session.status(), self.telemetry, session.transfers()))
        finally:
            super().teardown()  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle of the strategy, or of its Trainer, has not been set up: the session stays where it is."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("session", "telemetry")}

    # -- results -----------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """What became of the last fit so far: its phase, the plan, peaks as predicted and measured. It stays after the fit."""
        return self.session.status() if self.session is not None else RunStatus(phase="waiting")

    def save_plan(self, path: str) -> None:
        """Write the plan in force, with its graph, as JSON: `plan=path` uses it. Raises ConfigError where there is none yet."""
        if self.session is None:
            raise ConfigError("There is no plan yet: nothing was fitted with this strategy. Run `trainer.fit` first.")
        self.session.save_plan(path)

    # -- a step ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        with session.round((args, kwargs)) if session is not None else contextlib.nullcontext():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        session = self.session
        with contextlib.ExitStack() as stack:
            if session is not None:
                stack.enter_context(session.backward())
                if self._stepping:
                    stack.enter_context(session.last_backward())
            return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]

    def on_validation_start(self) -> None:
        if self.session is not None:
            self.session.evaluating()
        super().on_validation_start()  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        session = self.session
        if session is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

        def forward_and_backward() -> Any:
            self._stepping = True
            try:
                result = closure()
            finally:
                self._stepping = False
            session.update_begins(optimizer)
            return result

        session.closure_begins(optimizer)
        try:
            result = super().optimizer_step(optimizer, forward_and_backward, model, **kwargs)  # type: ignore[misc]
        except BaseException:
            session.close()
            raise
        session.update_ended(optimizer)
        return result

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        plan = self.session.plan if self.session is not None else None
        halfway = self.session.halfway if self.session is not None else 0
        found: dict[str, Any] = {"mid_step": halfway} if halfway else {}
        if plan is not None:
            found["fingerprint"] = plan.fingerprint
            found["budget_nbytes"] = plan.budget_nbytes
            found["predicted_peak_nbytes"] = plan.predicted_peak_nbytes
        if found:
            # primitives only, so that the checkpoint loads with weights_only=True and in a plain Trainer
            checkpoint = checkpoint | {CHECKPOINT_KEY: found}
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        halfway = (checkpoint.get(CHECKPOINT_KEY) or {}).get("mid_step", 0)
        if halfway:
            rank_zero_warn(
                f"MemOpt: this checkpoint was saved after a step had raised in the middle: {halfway} parameters were updated "
                "in its backward, and the others were not. Go on from an earlier one."
            )
        return checkpoint
