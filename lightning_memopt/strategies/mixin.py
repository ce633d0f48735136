"""`MemOptMixin`: a cooperative mixin for Lightning's own strategies (every override calls `super()`).

Lightning tests strategies with `isinstance`, so a strategy that wraps another one and delegates to it would not work. The mixin
derives from `abc.ABC`, because Lightning's strategies do. The session is opened in `setup` when fitting, and closed in
`teardown`, which Lightning also calls after exceptions.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.asking import Answer
from lightning_memopt.integrations.checkpointing import LayerCheckpointing
from lightning_memopt.integrations.lightnings import shown
from lightning_memopt.report.run import RunReport
from lightning_memopt.report.table import summary
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.session.given_plan import write_snapshot, write_status
from lightning_memopt.session.naming import naming
from lightning_memopt.strategies import fit_only
from lightning_memopt.strategies.early_updates import of_trainer
from lightning_memopt.telemetry import Meter

CHECKPOINT_KEY = "lightning_memopt"


class MemOptMixin(abc.ABC):
    """Keeps training steps within the budget of `memopt_config`. Validation, test and predict run unchanged.

    memopt_config: the options.
    session: the session of the last fit; None before the first.
    telemetry: a meter that a callback sets; the table at the end shows its results.
    fit_only: say whether the steps of a fit are within the budget, and leave it before anything is trained.
    fit: the answer to that (`lightning_memopt.Fit`).
    """

    memopt_config: MemOptConfig
    fit_only = False
    fit: Answer | None = None
    session: Session | None = None
    telemetry: Meter | None = None
    _checkpointing: LayerCheckpointing | None = None
    """The gradient checkpointing of the model's layers, which the plan replaces."""
    _report: RunReport | None = None
    """The report that this fit will write."""
    _stepping = False
    """Whether `optimizer_step` is running the closure, whose backward is the last one before the update."""

    # -- lifecycle ---------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        if self.fit_only and trainer.state.fn == "fit" and not trainer.fast_dev_run:
            self.fit = fit_only.answered(self, trainer)
            if self.fit is not None:
                fit_only.leave(trainer)
        super().setup(trainer)  # type: ignore[misc]
        self._leave()  # the previous fit may have ended without `teardown`
        self.session = self._checkpointing = None
        if trainer.state.fn == "fit":
            self._report = report = RunReport(self.memopt_config, self.model)  # type: ignore[attr-defined]
            self.session = Session(self.model, self.optimizers, self.memopt_config, say=rank_zero_say)  # type: ignore[attr-defined]
            report.begins(self.session, self.status, lambda: self.telemetry)
            # automatic optimization frees the gradients of a step between the next forward and its backward
            self.session.foresight.keeps_gradients = trainer.lightning_module.automatic_optimization
            self.session.update_in_backward(lambda: of_trainer(trainer))
            if self.session.enabled:
                self._checkpointing = LayerCheckpointing(self.model, self.session.say)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        session = self.session
        try:
            if session is not None:
                self._leave()
                if self.memopt_config.verbose:
                    rank_zero_say(summary(self.status(), self.telemetry, session.transfers()))
        finally:
            report, self._report = self._report, None
            if report is not None:
                report.write()
            super().teardown()  # type: ignore[misc]

    def _leave(self) -> None:
        """Close the session, and restore the checkpointing of the model's layers. May be called again."""
        if self._checkpointing is not None:
            self._checkpointing.restore()
        if self.session is not None:
            self.session.close()

    def __repr__(self) -> str:
        return shown(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle of the strategy, or of its Trainer, has no session, because it has not been set up."""
        state: Any = super().__getstate__()
        own = ("session", "telemetry", "_checkpointing", "_report", "fit")
        return {name: value for name, value in state.items() if name not in own}

    # -- results -----------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """The status of the current or last fit: its phase, the plan, the predicted and measured peaks."""
        if self.session is None:
            return RunStatus(phase="waiting")
        layers = self._checkpointing.layers if self._checkpointing is not None else ()
        return dataclasses.replace(self.session.status(), checkpointed=layers)

    def save_plan(self, path: str) -> None:
        """Write the plan in force and its graph as JSON, for the option `plan=path`. Raises ConfigError if there is no plan."""
        if self.session is None:
            raise ConfigError("There is no plan yet: nothing was fitted with this strategy. Run `trainer.fit` first.")
        write_status(path, self.session.status())

    def dump_snapshot(self, path: str) -> None:
        """Write a planned step for torch's memory viewer: `Run.dump_snapshot`. Raises ConfigError if there is no plan."""
        write_snapshot(path, self.status())

    # -- a step ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        with self._naming(), session.round((args, kwargs)) if session is not None else contextlib.nullcontext():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        """A context for code that runs collectives. Raises RankFailedError if one failed because another rank failed."""
        return naming(lambda: [self.session] if self.session is not None else [], collectives=True)

    def on_exception(self, exception: BaseException) -> None:
        """The fit ends with an exception: tell the other ranks."""
        if self.session is not None:
            self.session.ended_by(exception)
        super().on_exception(exception)  # type: ignore[misc]

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        session = self.session
        with contextlib.ExitStack() as stack:
            if session is not None:
                stack.enter_context(self._naming())
                stack.enter_context(session.rounds.backward())
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
            with self._naming():  # FSDP2 clips by a norm over all ranks
                result = super().optimizer_step(optimizer, forward_and_backward, model, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._leave()
            raise
        session.update_ended(optimizer)
        if self._checkpointing is not None:
            self._checkpointing.look(session.status)
        return result

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        plan = self.session.plan if self.session is not None else None
        halfway = self.session.halfway if self.session is not None else 0
        entry: dict[str, Any] = {"mid_step": halfway} if halfway else {}
        if plan is not None:
            entry["fingerprint"] = plan.fingerprint
            entry["budget_nbytes"] = plan.budget_nbytes
            entry["predicted_peak_nbytes"] = plan.predicted_peak_nbytes
        if entry:
            # primitive types only, so that the checkpoint loads with weights_only=True and in a plain Trainer
            checkpoint = checkpoint | {CHECKPOINT_KEY: entry}
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
