"""Choose a batch size by predictions from a fitted step.

Input: a `StepFit`, a memory limit, the permitted sizes and the mode. Output: the best size as a `SizeEstimate`, with its peak
bytes, samples a second and joules a sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_memopt.batching.energy import EnergyModel
from lightning_memopt.batching.fit import StepFit
from lightning_memopt.batching.plans import EitherPlans, Plans, largest
from lightning_memopt.plan import Machine
from lightning_memopt.session.solve.foresight import unmodified_peak

Mode = Literal["largest", "throughput", "energy"]
MODES = ("largest", "throughput", "energy")
_GRID = 8
"""Number of sizes that are priced among those that need a plan, and again among those that need none."""
_RETRY_SHARE = 0.97
"""If no considered size has a plan, the next attempt is limited to this share of the largest one."""


@dataclass(frozen=True)
class SizeEstimate:
    """Predictions for one batch size.

    size: samples of a batch.
    peak_nbytes: peak bytes of a step; with a plan, the smallest budget that the plan needs.
    samples_per_second: throughput.
    planned: whether the step fits only with a plan that rebuilds or parks tensors.
    joules_per_sample: energy; None if the energy of a step is not known.
    """

    size: int
    peak_nbytes: int
    samples_per_second: float
    planned: bool
    joules_per_sample: float | None = None


@dataclass(eq=False)
class Chooser:
    """Predicts steps of any size from one fitted step, and chooses the best size.

    fit: the step at any batch size.
    budget_nbytes: bytes that a step may use.
    plans: makes plans for a size; None if steps run without a plan.
    effective: samples between two updates if gradients are accumulated over several batches; None if every batch has its
        update. If it is given, the fitted step accumulates.
    spare_nbytes: maximum bytes of gradients that a step saves if one batch has all `effective` samples.
    energy: joules of a step; None if they are not known.
    machine: the machine that runs it.
    """

    fit: StepFit
    budget_nbytes: int
    plans: Plans | EitherPlans | None = None
    effective: int | None = None
    spare_nbytes: int = 0
    energy: EnergyModel | None = None
    machine: Machine = field(default_factory=Machine)

    def peak(self, size: int) -> int:
        """Peak bytes of a step of this size without a plan."""
        return unmodified_peak(self.fit.at(size), self.machine)

    def largest_unmodified(self, cap: int) -> int:
        """The largest size, at most `cap`, whose step fits without a plan; 0 if none does."""
        size = largest(self.peak, self.budget_nbytes, 1, cap)
        if self.effective is not None and size < self.effective <= cap and self._fits(self.effective):
            return self.effective
        return size

    def _fits(self, size: int) -> bool:
        """Whether a step of this size fits without a plan."""
        spare_nbytes = self.spare_nbytes if size == self.effective else 0
        return self.peak(size) <= self.budget_nbytes + spare_nbytes

    def choose(self, mode: Mode, permitted: Callable[[int], Sequence[int]], cap: int) -> SizeEstimate | None:
        """The best permitted size; None if none fits. `permitted(limit)` gives the permitted sizes up to `limit`, ascending."""
        plain = self.largest_unmodified(cap)
        sizes = permitted(plain if self.plans is None else self.plans.largest(plain, cap, self.budget_nbytes))
        while sizes:
            if mode == "largest":
                candidates = sizes[-1:]
            else:
                planned_from = bisect_right(sizes, plain)
                candidates = [*_thinned(sizes[:planned_from]), *_thinned(sizes[planned_from:])]
            estimates = [estimate for estimate in map(self.predicted, candidates) if estimate is not None]
            if estimates:
                return max(estimates, key=lambda estimate: _merit(estimate, mode))
            sizes = permitted(int(_RETRY_SHARE * sizes[-1]))
        return None

    def predicted(self, size: int) -> SizeEstimate | None:
        """Predictions without a plan if that fits or there are no plans, else with the fastest plan; None if no plan fits."""
        if self.plans is None or self._fits(size):
            return self.unmodified(size)
        fastest = self.plans.fastest(size, self.budget_nbytes)
        if fastest is None:
            return None
        extra_seconds, needed_nbytes = fastest
        return self._priced(size, needed_nbytes, extra_seconds, True)

    def unmodified(self, size: int) -> SizeEstimate:
        """Predictions without a plan, even if the step does not fit."""
        return self._priced(size, self.peak(size), 0.0, False)

    def _priced(self, size: int, peak_nbytes: int, extra_seconds: float, planned: bool) -> SizeEstimate:
        """The estimate for a step that takes `extra_seconds` more than the fitted one.

        The batches that are accumulated for one update share the update's seconds.
        """
        ops = self.fit.at(size).ops
        step_seconds = sum(op.seconds for op in ops)
        update_seconds = sum(op.seconds for op in ops if op.phase == "update")
        update_share = size / (self.effective or size)
        beyond = extra_seconds - update_seconds * (1 - update_share)
        seconds = step_seconds + beyond
        joules_per_sample = None if self.energy is None else self.energy.joules(size, step_seconds, beyond) / size
        return SizeEstimate(size, peak_nbytes, size / seconds if seconds > 0 else 0.0, planned, joules_per_sample)


def _merit(estimate: SizeEstimate, mode: Mode) -> tuple[float, int]:
    """A sort key: the best estimate has the largest one. Of two equally good sizes the smaller one is better."""
    if mode == "energy" and estimate.joules_per_sample is not None:
        return -estimate.joules_per_sample, -estimate.size
    return estimate.samples_per_second, -estimate.size


def _thinned(sizes: Sequence[int]) -> Iterable[int]:
    """At most about `_GRID` of the sizes, evenly spaced by ratio; the first and the last are always among them."""
    if len(sizes) <= _GRID:
        return sizes
    ratio = (sizes[-1] / sizes[0]) ** (1 / (_GRID - 1))
    targets = [sizes[0] * ratio**i for i in range(_GRID)]
    closest = {min(sizes, key=lambda size: abs(size - target)) for target in targets}
    return sorted({*closest, sizes[-1]})
