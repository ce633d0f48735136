"""The result of a search for a batch size."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.batching.choose import Mode
from lightning_memopt.batching.trials import Trial
from lightning_memopt.units import format_nbytes


@dataclass(frozen=True, kw_only=True)
class BatchSizeResult:
    """A batch size that fits, with what was predicted and measured for it.

    Predictions are None if no step could be fitted.

    size: samples of a batch; a real step of this size ran and fitted.
    before: samples of a batch before the search.
    mode: what was searched for: "largest", "throughput" or "energy".
    budget_nbytes: bytes of the device that a step may use.
    predicted_peak_nbytes: predicted peak of a step.
    confirmed_peak_nbytes: peak that was measured in a real step; None if another profiler was running.
    samples_per_second: predicted throughput.
    before_samples_per_second: predicted throughput at the size `before`, without a plan.
    joules_per_sample: predicted energy; None too if the energy of a step is not known.
    planned: whether the step fits only with a plan that rebuilds or parks tensors.
    trials: all steps that ran; `profile_steps`, `trial_steps` and `energy_steps` count them.
    measured_joules_per_sample: energy that was measured in real steps; None if the device's energy is not read.
    energy_source: where the joules come from, for messages.
    why: why the first prediction is not the result; empty if it is.
    """

    size: int
    before: int
    mode: Mode
    budget_nbytes: int
    predicted_peak_nbytes: int | None
    confirmed_peak_nbytes: int | None
    samples_per_second: float | None
    before_samples_per_second: float | None
    joules_per_sample: float | None
    planned: bool
    trials: tuple[Trial, ...]
    measured_joules_per_sample: float | None = None
    energy_source: str = ""
    why: str = ""

    @property
    def trial_steps(self) -> int:
        """Number of real steps that confirmed, or refuted, a size."""
        return self._steps("trial")

    @property
    def profile_steps(self) -> int:
        """Number of real steps that the predictions are made from, warm-up steps included."""
        return self._steps("warm-up", "profile")

    @property
    def energy_steps(self) -> int:
        """Number of real steps that ran only to measure energy."""
        return self._steps("energy")

    def _steps(self, *kinds: str) -> int:
        return sum(t.steps for t in self.trials if t.kind in kinds)

    def __str__(self) -> str:
        plan = ", with a plan" if self.planned else ""
        parts = [
            f"MemOpt: batch {self.before} -> {self.size} ({self.mode}{plan}): peak {_text(self.predicted_peak_nbytes)} "
            f"predicted, {_text(self.confirmed_peak_nbytes)} confirmed of {format_nbytes(self.budget_nbytes)}"
        ]
        if self.samples_per_second is not None:
            before = self.before_samples_per_second
            instead = "" if before is None else f" instead of {before:.1f}"
            parts.append(f"{self.samples_per_second:.1f} samples/s predicted{instead}")
        if self.joules_per_sample is not None:
            parts.append(f"{self.joules_per_sample:.3g} J/sample predicted {self.energy_source}")
        if self.measured_joules_per_sample is not None:
            parts.append(f"{self.measured_joules_per_sample:.3g} J/sample measured (the whole device, whoever uses it)")
        how = f"{self.trial_steps} trial steps beyond {self.profile_steps} profiled"
        how += f" and {self.energy_steps} for energy" if self.energy_steps else ""
        return ", ".join(parts) + f"; {how}" + (f", because {self.why}" if self.why else "")


def _text(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_nbytes(nbytes)
