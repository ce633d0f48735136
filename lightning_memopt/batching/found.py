"""What a search for a batch size comes to."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.batching.choose import Mode
from lightning_memopt.batching.trials import Trial
from lightning_memopt.units import format_nbytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """The batch size that was found, and how.

    `predicted_peak_nbytes`, `samples_per_second`, `before_samples_per_second` (of the size before, as it is) and
    `joules_per_sample` are predictions, None where nothing could be fitted;
    `confirmed_peak_nbytes` was measured, in a real step at this size, None where another profiler was running;
    `measured_joules_per_sample` in steps like it, where the device's energy is read. `energy_source` says where joules come
    from. `planned`: whether tensors are rebuilt, or away. `trials` are all steps that ran: `profile_steps`, `trial_steps` and
    `energy_steps`. `why` says why the first prediction was not the answer; empty where it was.
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
        return self._steps("trial")

    @property
    def profile_steps(self) -> int:
        return self._steps("warm-up", "profile")

    @property
    def energy_steps(self) -> int:
        """Run only so that there is time to read energy."""
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
