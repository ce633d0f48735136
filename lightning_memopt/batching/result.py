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

    If several ranks searched, all of them return the same result.

    size: samples of a batch; a real step of this size ran and fitted, on every rank.
    before: samples of a batch before the search.
    mode: what was searched for: "largest", "throughput" or "energy".
    budget_nbytes: bytes of the device that a step may use: the smallest budget of all ranks.
    predicted_peak_nbytes: predicted peak of a step, on the first rank.
    confirmed_peak_nbytes: peak that was measured in a real step, the largest of the ranks with that budget; None if another
        profiler was running.
    samples_per_second: predicted throughput.
    before_samples_per_second: predicted throughput at the size `before`, without a plan.
    joules_per_sample: predicted energy; None too if the energy of a step is not known.
    planned: whether the step fits only with a plan that rebuilds or parks tensors.
    trials: all steps that ran; `profile_steps`, `trial_steps` and `energy_steps` count them.
    measured_joules_per_sample: energy that was measured in real steps; None if the device's energy is not read.
    energy_source: where the joules come from, for messages.
    why: why the first prediction is not the result; empty if it is.
    ranks: number of ranks, each of which trains on batches of this size.
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
    ranks: int = 1

    @property
    def trial_steps(self) -> int:
        """Number of real steps that confirmed, or refuted, a size."""
        return self._steps("trial")

    @property
    def profile_steps(self) -> int:
        """Number of real steps that the predictions are made from, warm-up steps included."""
        return self._steps("warm-up", "profile")

    @property
    def rehearsal_steps(self) -> int:
        """Number of steps that the ranks ran without collectives, to see whether memory runs out on one of them."""
        return self._steps("rehearsal")

    @property
    def energy_steps(self) -> int:
        """Number of real steps that ran only to measure energy."""
        return self._steps("energy")

    def _steps(self, *kinds: str) -> int:
        return sum(t.steps for t in self.trials if t.kind in kinds)

    def __str__(self) -> str:
        plan = ", with a plan" if self.planned else ""
        each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        parts = [
            f"MemOpt: batch {self.before} -> {self.size}{each} ({self.mode}{plan}): peak {_text(self.predicted_peak_nbytes)} "
            f"predicted, {_text(self.confirmed_peak_nbytes)} confirmed of {format_nbytes(self.budget_nbytes)}"
        ]
        if self.samples_per_second is not None:
            before = self.before_samples_per_second
            instead = "" if before is None else f" instead of {before:.1f}"
            parts.append(f"{self.samples_per_second:.1f} samples/s predicted{instead}")
        if self.joules_per_sample is not None:
            parts.append(f"{self.joules_per_sample:.3g} J/sample predicted {self.energy_source}")
        if self.measured_joules_per_sample is not None:
            parts.append(f"{self.measured_joules_per_sample:.3g} J/sample measured (the whole device, other programs included)")
        how = f"{self.trial_steps} trial steps after {self.profile_steps} profiled"
        how += f" and {self.energy_steps} for energy" if self.energy_steps else ""
        how += f" and {self.rehearsal_steps} rehearsed" if self.rehearsal_steps else ""
        return ", ".join(parts) + f"; {how}" + (f", because {self.why}" if self.why else "")


def _text(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_nbytes(nbytes)
