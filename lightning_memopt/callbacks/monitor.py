"""`MemOptMonitor`: log throughput, energy, peak memory and the plan, under the names of Lightning's ThroughputMonitor.

Every `log_every_n_steps` optimizer steps the device is synchronised, and the loggers get, per device:

    train/time, train/batches, train/samples       since training began, without evaluation
    train/device/samples_per_sec, .../batches_per_sec, .../step_seconds     since the values logged before
    train/device/peak_memory_bytes                 CUDA: reserved bytes; CPU: measured peak of planned steps
    train/device/energy_joules                     since training began
    train/device/power_watts, .../energy_joules_per_sample      of whole stretches of a second or more
    train/device/energy_approximate                1 if joules are integrated from power samples

With several ranks, train/samples_per_sec and train/energy_joules are totals of all ranks; a device that ranks share counts
once. With `cpu=True`, train/cpu/energy_joules and so on are those of the processors. Values that were not measured have no
key. With MemOptStrategy, every new plan adds memopt/budget_bytes, memopt/predicted_peak_bytes, ... (`_plan_metrics`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_memopt.callbacks.reduction import Reduction
from lightning_memopt.callbacks.timeline import EVERY, Timeline
from lightning_memopt.errors import ConfigError
from lightning_memopt.fabric.rank_zero import rank_zero_say
from lightning_memopt.integrations.lightnings import Callback, part
from lightning_memopt.plan import Plan
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.strategies import lightning_private
from lightning_memopt.telemetry import Meter, Throughput, read_throughput


class MemOptMonitor(Callback):
    """Log time, energy and memory of training, and a summary. Works with any strategy; its errors never end training.

    Args:
        batch_size_fn: batch -> number of samples. Default: as Lightning infers it for `self.log`.
        cpu: also measure the energy of the processors' packages (RAPL, which most systems let only root read).
        before: throughput of the same training without a plan, shown for comparison; or the path that `save` wrote it to.
        save: path to write the throughput of this run to, as JSON. With `MEMOPT_DISABLE=1` it is that of the plain run.
        verbose: log the throughput at the end of training.
        timeline: write the memory of a step over time to every logger, in the first planned step and then in every 200th, or in
            every one of this number (timeline.py says how each logger gets it).

    Attributes:
        meter: the meter of the current or last fit; None before the first.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        cpu: bool = False,
        before: Throughput | str | os.PathLike[str] | None = None,
        save: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        timeline: bool | int = False,
    ) -> None:
        super().__init__()
        self.batch_size_fn, self.cpu, self.save, self.verbose = batch_size_fn, cpu, save, verbose
        self.before = before if before is None or isinstance(before, Throughput) else read_throughput(before)
        self.meter: Meter | None = None
        self._reduction: Reduction | None = None
        self._plan: Plan | None = None
        self._profile_seconds: float | None = None
        self._warned: set[str] = set()
        if not isinstance(timeline, int) or timeline < 0:
            raise ConfigError(f"timeline is {timeline!r}; give True, False or a number of steps.")
        self.timeline = EVERY if timeline is True else int(timeline)
        self._timeline: Timeline | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle has measured nothing, because the counters of devices belong to their process."""
        return vars(self) | {"meter": None, "_reduction": None, "_timeline": None}

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
        if self.timeline and trainer.is_global_zero:
            self._timeline = Timeline(self.timeline, self._try)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._timeline is not None:
            step = lightning_private.batches_that_stepped(trainer)
            self._timeline.begins(trainer.strategy.root_device, step, _status(trainer).plan is not None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.meter is None:
            return
        samples = self._samples(trainer, batch)
        if lightning_private.accumulates(trainer):
            self.meter.batch(samples)
            return
        self.meter.step(samples)
        plan = _status(trainer).plan
        if plan is not None and self._profile_seconds is None:
            self._profile_seconds = max(0.0, self.meter.total.seconds - plan.solve_seconds)
        every, step = trainer.log_every_n_steps, lightning_private.batches_that_stepped(trainer)
        if self._timeline is not None:
            self._timeline.ended(trainer.loggers, step, _status(trainer))
        if every and (step + 1) % every == 0:  # depends only on the step, so that all ranks log in the same step
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
            self._log(trainer, lightning_private.batches_that_stepped(trainer) - 1)
        if not trainer.is_global_zero:
            return
        throughput = self.meter.rates()
        if throughput is not None and self.save is not None:
            self._try("the file of rates", partial(throughput.write, self.save))
        if self.verbose:
            text = "no steady step was measured" if throughput is None else throughput.text()
            self._try("the summary", partial(rank_zero_say, f"MemOpt: {text}"))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self.meter is not None:
            self.meter.abandon()  # a second call does nothing
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.stop()

    # -- the logged values -------------------------------------------------------------------------

    def _samples(self, trainer: Any, batch: Any) -> int:
        """Samples of a batch; 0 if unknown: then nothing is logged per sample."""
        try:
            with torch.inference_mode():
                if self.batch_size_fn is not None:
                    return int(self.batch_size_fn(batch))
                return int(part(trainer, "utilities.data").extract_batch_size(batch))
        except Exception as error:
            self._warn("the size of a batch", error, " Give MemOptMonitor(batch_size_fn=...).")
            return 0

    def _log(self, trainer: Any, step: int) -> None:
        """Log the values of this lap under the step number `step`. All ranks must call it, because values are reduced."""
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
        """The numbers of the plan. Without `solve_seconds` and `profile_seconds` if the plan was read from a file."""
        parked = {life.tensor: life.form for life in plan.lives if life.how == "fetch"}
        metrics: dict[str, float] = {
            "predicted_peak_bytes": plan.predicted_peak_nbytes,
            "unmodified_peak_bytes": plan.unmodified_peak_nbytes,
            "plan/recompute_count": len({life.tensor for life in plan.lives if life.how == "rebuild"}),
            "plan/offload_count": sum(bool(tier_of(form)) for form in parked.values()),
            "plan/compress_count": sum(bool(codec_of(form)) for form in parked.values()),
        }
        if status.budget_nbytes is not None:
            metrics["budget_bytes"] = status.budget_nbytes
        if plan.predicted.reserved_nbytes:
            metrics["predicted_reserved_bytes"] = plan.predicted.reserved_nbytes
        if status.frontier is not None:
            metrics["solve_seconds"] = plan.solve_seconds
            if self._profile_seconds is not None:
                metrics["profile_seconds"] = self._profile_seconds
        return {f"memopt/{key}": value for key, value in metrics.items()}

    # -- errors become warnings --------------------------------------------------------------------

    def _try(self, what: str, call: Callable[[], object]) -> None:
        """Call, and warn if it raises. `what`: the subject of the warning."""
        try:
            call()
        except Exception as error:
            self._warn(what, error)

    def _warn(self, what: str, error: Exception, remedy: str = "") -> None:
        """Warn once for each `what`."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"MemOpt: {what} failed ({type(error).__name__}: {error}); training continues without it.{remedy}", stacklevel=3
            )


def _session_of(trainer: Any) -> Session | None:
    session = getattr(trainer.strategy, "session", None)
    return session if isinstance(session, Session) else None


def _status(trainer: Any) -> RunStatus:
    session = _session_of(trainer)
    return session.status() if session is not None else RunStatus(phase="off")
