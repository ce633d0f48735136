"""`MemOptMonitor`: samples and joules per second and per sample, peak memory and the plan, under ThroughputMonitor's names.

Every `log_every_n_steps` optimizer steps, at which alone the device is synchronised, the loggers get, per device:

    train/time, train/batches, train/samples       since training began; evaluation is left out
    train/device/samples_per_sec, .../batches_per_sec, .../step_seconds     since the values before
    train/device/peak_memory_bytes                 reserved on CUDA; on the CPU what was measured of planned steps
    train/device/energy_joules                     since training began
    train/device/power_watts, .../energy_joules_per_sample      of whole stretches of a second or more
    train/device/energy_approximate                1 where joules are integrated from samples of power

with several ranks also train/samples_per_sec and train/energy_joules of all of them, what ranks share counted once, and with
`cpu=True` train/cpu/energy_joules and so on of the processors. What is not measured has no key. Within MemOptStrategy, once
there is a plan, and whenever there is another one: memopt/budget_bytes, memopt/predicted_peak_bytes, ... (`_plan_metrics`).
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_memopt.callbacks.reduction import Reduction
from lightning_memopt.plan import Plan
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.telemetry import Meter, Rates, read_rates

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the same hooks under the other name: each Trainer takes either's callbacks
    from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]


class MemOptMonitor(Callback):
    """Log and sum up what training takes: time, energy, memory. Works with any strategy; never raises into training.

    Args:
        batch_size_fn: the number of samples in a batch; as Lightning infers it for `self.log` where left out.
        cpu: also measure the energy of the processors' packages (RAPL; mostly readable for root alone).
        before: rates of the same training without a plan, to show beside: what `save` wrote, or its path.
        save: path for the rates of this run, as JSON. With `MEMOPT_DISABLE=1` they are those of the plain run.
        verbose: say the rates at the end of training.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        cpu: bool = False,
        before: Rates | str | os.PathLike[str] | None = None,
        save: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        self.batch_size_fn, self.cpu, self.save, self.verbose = batch_size_fn, cpu, save, verbose
        self.before = before if before is None or isinstance(before, Rates) else read_rates(before)
        self.meter: Meter | None = None
        self._reduction: Reduction | None = None
        self._plan: Plan | None = None
        self._profile_seconds: float | None = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle is a monitor that has measured nothing: counters of devices belong to their process."""
        return vars(self) | {"meter": None, "_reduction": None}

    # -- Lightning's hooks -------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._close()
        session, device = _session_of(trainer), trainer.strategy.root_device
        self._plan = self._profile_seconds = None
        self.meter = Meter(
            device,
            cpu=self.cpu,
            every=0,
            steady=(lambda: session.steady) if session is not None else (lambda: True),
            before=self.before,
        )
        self._reduction = Reduction(trainer.world_size, device, self.meter.energies)
        if session is not None:
            trainer.strategy.telemetry = self.meter

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.meter is None:
            return
        samples = self._samples(trainer, batch)
        if trainer.fit_loop._should_accumulate():
            self.meter.batch(samples)
            return
        self.meter.step(samples)
        plan = _status(trainer).plan
        if plan is not None and self._profile_seconds is None:
            self._profile_seconds = max(0.0, self.meter.total.seconds - plan.solve_seconds)
        every, step = trainer.log_every_n_steps, trainer.fit_loop.epoch_loop._batches_that_stepped
        if every and (step + 1) % every == 0:  # all ranks in the same step, whatever one was told of stopping
            self._log(trainer, step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.meter is not None and not trainer.sanity_checking:
            self.meter.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.meter is not None and not trainer.sanity_checking:
            self.meter.resume()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.meter is None:
            return
        self.meter.stop()
        if trainer.log_every_n_steps:
            self._log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)
        if not trainer.is_global_zero:
            return
        rates = self.meter.rates()
        if rates is not None and self.save is not None:
            self._try("the file of rates", partial(rates.write, self.save))
        if self.verbose:
            text = "no step was measured that was as all others are" if rates is None else rates.text()
            self._try("the summary", partial(_say, trainer, f"MemOpt: {text}"))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self.meter is not None:
            self.meter.abandon()  # a second time does nothing

    # -- what there is to log ----------------------------------------------------------------------

    def _samples(self, trainer: Any, batch: Any) -> int:
        """0 where nobody knows: then there are no rates per sample."""
        try:
            with torch.inference_mode():
                if self.batch_size_fn is not None:
                    return int(self.batch_size_fn(batch))
                return int(_lightning(trainer, "utilities.data").extract_batch_size(batch))
        except Exception as error:
            self._warn("the size of a batch", error, " Give MemOptMonitor(batch_size_fn=...).")
            return 0

    def _log(self, trainer: Any, step: int) -> None:
        """Called by all ranks."""
        assert self.meter is not None and self._reduction is not None
        status, peak = _status(trainer), self.meter.peak_nbytes()
        if peak is None:
            peak = status.measured_peak_nbytes
        metrics = {f"train/{key}": value for key, value in self._reduction(self.meter.lap(), peak).items()}
        if status.plan is not None and status.plan is not self._plan:
            self._plan = status.plan
            metrics |= self._plan_metrics(status, status.plan)
        if metrics and trainer.is_global_zero:
            for logger in trainer.loggers:
                name = f"{type(logger).__name__}.log_metrics"
                self._try(name, partial(logger.log_metrics, metrics=dict(metrics), step=step))

    def _plan_metrics(self, status: RunStatus, plan: Plan) -> dict[str, float]:
        """What was planned. Seconds only of what this run did: a plan that was given took none."""
        away = {life.tensor: life.form for life in plan.lives if life.how == "fetch"}
        found: dict[str, float] = {
            "predicted_peak_bytes": plan.predicted_peak_nbytes,
            "unmodified_peak_bytes": plan.unmodified_peak_nbytes,
            "plan/recompute_count": len({life.tensor for life in plan.lives if life.how == "rebuild"}),
            "plan/offload_count": sum(bool(tier_of(form)) for form in away.values()),
            "plan/compress_count": sum(bool(codec_of(form)) for form in away.values()),
        }
        if status.budget_nbytes is not None:
            found["budget_bytes"] = status.budget_nbytes
        if plan.predicted.reserved_nbytes:
            found["predicted_reserved_bytes"] = plan.predicted.reserved_nbytes
        if status.frontier is not None:
            found["solve_seconds"] = plan.solve_seconds
            if self._profile_seconds is not None:
                found["profile_seconds"] = self._profile_seconds
        return {f"memopt/{key}": value for key, value in found.items()}

    # -- nothing of this ends training -------------------------------------------------------------

    def _try(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._warn(what, error)

    def _warn(self, what: str, error: Exception, remedy: str = "") -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"MemOpt: {what} failed ({type(error).__name__}: {error}); training goes on without.{remedy}", stacklevel=3
            )


def _session_of(trainer: Any) -> Session | None:
    session = getattr(trainer.strategy, "session", None)
    return session if isinstance(session, Session) else None


def _status(trainer: Any) -> RunStatus:
    session = _session_of(trainer)
    return session.status() if session is not None else RunStatus(phase="off")


def _lightning(trainer: Any, name: str) -> Any:
    """A module of the Lightning that the trainer is of: `lightning.pytorch` or `pytorch_lightning`."""
    names = [base.__module__ for base in type(trainer).__mro__ if base.__module__.endswith(".trainer.trainer")]
    return importlib.import_module(f"{names[-1].removesuffix('.trainer.trainer')}.{name}")


def _say(trainer: Any, text: str) -> None:
    """In the progress bar where one is shown, without breaking it; else as a line of the log."""
    bar = trainer.progress_bar_callback
    enabled = bar is not None and getattr(bar, "is_enabled", False)
    # tqdm's prints through its bar, and says nothing once that is closed (`disable`)
    if enabled and not getattr(getattr(bar, "train_progress_bar", None), "disable", False):
        bar.print(text)
    else:
        _lightning(trainer, "utilities.rank_zero").rank_zero_info(text)
