"""`MemOptTrainerCallback`: transformers' Trainer within a memory budget.

The run begins in `on_train_begin`, after Accelerate has prepared model and optimizer, and ends when `Trainer.train` returns or
raises. Trainer does not tell its callbacks of exceptions, so the first callback that is made wraps `Trainer.train`. The wrapper
tells callbacks which Trainer they are in, and ends their runs when `train` ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import transformers

from lightning_memopt import logs
from lightning_memopt.config import MemOptConfig, config_of
from lightning_memopt.errors import ConfigError, UnsupportedError
from lightning_memopt.integrations.asking import Answer
from lightning_memopt.integrations.plain import Run, optimize
from lightning_memopt.integrations.transformers_fit import answered, leave, unless_left
from lightning_memopt.report.table import summary
from lightning_memopt.runtime.early_updates import Reason, refusal
from lightning_memopt.session import RunStatus
from lightning_memopt.session.given_plan import write_snapshot
from lightning_memopt.session.naming import naming

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_memopt.config import Options

_NORM = Reason(
    "Trainer reads all gradients before each update, to clip them (max_grad_norm) and to log their norm",
    "Use a plain loop with optimize()",
)


class MemOptTrainerCallback(transformers.TrainerCallback):
    """Keeps the training steps of a Trainer within a memory budget. Evaluation and prediction run unchanged.

    The options are those of `MemOptConfig`; `config` has all of them in one object. Both together raise ConfigError.

    run: the run of the current or last `train()`; None before the first.
    fit_only: `train()` says whether the steps are within the budget, and returns before anything is trained.
    fit: the answer to that (`lightning_memopt.Fit`).
    """

    def __init__(self, *, config: MemOptConfig | None = None, fit_only: bool = False, **options: Unpack[Options]) -> None:
        self.config = config_of(config, options)
        self.run: Run | None = None
        self.fit_only = fit_only
        self.fit: Answer | None = None
        self._trainer: Any = None  # while its `train` runs
        self._stack = contextlib.ExitStack()
        _watch_trainers()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle of the callback, or of its Trainer, has no run."""
        return {"config": self.config, "fit_only": self.fit_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- results -----------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """The status of the current or last `train()`: its phase, the plan, the predicted and measured peaks."""
        return self.run.status() if self.run is not None else RunStatus(phase="waiting")

    def report(self) -> str:
        """A table: budget, peaks (predicted, measured, unmodified), extra time, rebuilt tensors, and why the rest is kept."""
        return summary(self.status(), None, self.run.session.transfers() if self.run is not None else None)

    def save_plan(self, path: str) -> None:
        """Write the plan in force and its graph as JSON, for the option `plan=path`. Raises ConfigError if there is no plan."""
        if self.run is None:
            raise ConfigError("There is no plan yet: this callback's Trainer has not trained. Run trainer.train() first.")
        self.run.save_plan(path)

    def dump_snapshot(self, path: str) -> None:
        """Write a planned step for torch's memory viewer: `Run.dump_snapshot`. Raises ConfigError if there is no plan."""
        write_snapshot(path, self.status())

    def close(self) -> None:
        """Leave the model, as at the end of `train()`. May be called again."""
        self._stack.close()

    # -- the Trainer's events ----------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # auto_find_batch_size begins again after running out of memory
        _refuse(args)
        if self.fit_only and self._trainer is not None:
            self.fit = answered(self._trainer, self.config, kwargs)
            if self.fit is not None:
                if self._speaks:
                    logs.say(self.fit.table())
                leave()
        model = kwargs["model"] if self._trainer is None else self._trainer.model_wrapped  # the module that is called
        with contextlib.ExitStack() as stack:
            self.run = stack.enter_context(optimize(model, kwargs["optimizer"], config=self._config()))
            self._stack = stack.pop_all()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        if self._speaks and state.is_world_process_zero:
            logs.say(self.report())

    # -- what the Trainer allows -------------------------------------------------------------------

    @property
    def _speaks(self) -> bool:
        """Whether runs log their progress. With `log_level="error"`, a Trainer logs only errors."""
        return self.config.verbose and transformers.utils.logging.get_verbosity() <= logging.WARNING

    def _config(self) -> MemOptConfig:
        """The options without early updates, which no Trainer allows. Raises UpdatesInBackwardError if they are "always"."""
        config = dataclasses.replace(self.config, verbose=self._speaks)
        if config.optimizer_in_backward == "never":
            return config
        if config.optimizer_in_backward == "always":
            raise refusal(_NORM)
        if config.verbose:
            logs.say(f"MemOpt: parameters are updated after backward, as usual: {_NORM.what}. {_NORM.fix}.")
        return dataclasses.replace(config, optimizer_in_backward="never")


def _refuse(args: Any) -> None:
    """Raise UnsupportedError for a Trainer that distributes its model in a way that is not supported."""
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer would copy the model to {args.n_gpu} GPUs in every step (nn.DataParallel), and a plan is for one device. "
            "Set CUDA_VISIBLE_DEVICES to one of them, or start one process for each by torchrun."
        )
    if args.deepspeed or args.deepspeed_plugin:
        raise UnsupportedError("Trainer hands model and optimizer to DeepSpeed, which moves them itself. Leave DeepSpeed out.")


def _watch_trainers() -> None:
    """Wrap `Trainer.train`, once per process."""
    train = transformers.Trainer.train
    if not hasattr(train, "_memopt"):
        transformers.Trainer.train = _left_afterwards(train)  # type: ignore[method-assign]


def _left_afterwards(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Trainer.train` to tell callbacks of this package which Trainer they are in, and to close their runs at its end."""

    @functools.wraps(train)
    def train_and_leave(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, MemOptTrainerCallback)]
        for callback in callbacks:
            callback._trainer = trainer
        try:
            with naming(lambda: [callback.run.session for callback in callbacks if callback.run is not None]):
                return unless_left(trainer, lambda: train(trainer, *args, **kwargs))
        finally:
            for callback in callbacks:
                callback._trainer = None
                if callback.run is not None:
                    callback.run.session.history.ends(handled=True)
                callback.close()

    train_and_leave._memopt = True  # type: ignore[attr-defined]
    return train_and_leave
