"""Which batch size: peak, samples a second and joules a sample of any size, predicted from a fitted step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_memopt.batching.energy import Joules
from lightning_memopt.batching.fit import StepFit
from lightning_memopt.batching.plans import Plans, largest
from lightning_memopt.session.foresight import unmodified_peak

Mode = Literal["largest", "throughput", "energy"]
MODES = ("largest", "throughput", "energy")
_GRID = 8
"""Sizes that are priced between the smallest and the largest that need a plan, and as many that need none."""
_LESS = 0.97
"""Where there is no plan after all for the largest size, this share of it is asked for."""


@dataclass(frozen=True)
class Choice:
    """A batch size, and what is predicted of it. `planned`: whether it needs tensors to be rebuilt, or away."""

    size: int
    peak_nbytes: int
    samples_per_second: float
    planned: bool
    joules_per_sample: float | None = None


@dataclass(eq=False)
class Chooser:
    """Predictions for one fitted step within `budget_nbytes`. `plans`: those there may be; None for steps as they are.

    `effective`: samples between two updates, where they are accumulated over several batches; else None: a batch is one. The
    fitted step then accumulates, and a batch of all of them does without `spare_nbytes` of gradients, at best.
    `joules`: of a step, where that is known.
    """

    fit: StepFit
    budget_nbytes: int
    plans: Plans | None = None
    effective: int | None = None
    spare_nbytes: int = 0
    joules: Joules | None = None

    def peak(self, size: int) -> int:
        """Of the unmodified step."""
        return unmodified_peak(self.fit.at(size))

    def largest_unmodified(self, cap: int) -> int:
        """The largest size whose step fits as it is."""
        found = largest(lambda size: self.peak(size) <= self.budget_nbytes, 1, cap)
        whole = self.effective or 0
        return whole if found < whole <= cap and self._fits(whole) else found

    def _fits(self, size: int) -> bool:
        """Whether a step fits as it is."""
        return self.peak(size) <= self.budget_nbytes + (self.spare_nbytes if size == self.effective else 0)

    def choose(self, mode: Mode, permitted: Callable[[int], Sequence[int]], cap: int) -> Choice | None:
        """The best of the sizes that `permitted(limit)` gives, rising; None where none fits."""
        plain = self.largest_unmodified(cap)
        sizes = permitted(plain if self.plans is None else self.plans.largest(plain, cap, self.budget_nbytes))
        while sizes:
            at = bisect_right(sizes, plain)
            some = sizes[-1:] if mode == "largest" else (*_thinned(sizes[:at]), *_thinned(sizes[at:]))
            found = [choice for choice in map(self.predicted, some) if choice is not None]
            if found:
                return max(found, key=lambda choice: _merit(choice, mode))
            sizes = permitted(int(_LESS * sizes[-1]))
        return None

    def predicted(self, size: int) -> Choice | None:
        """What this size would do: as it is where that fits or there are no plans, else under the fastest; None without one."""
        if self.plans is None or self._fits(size):
            return self.unmodified(size)
        found = self.plans.fastest(size, self.budget_nbytes)
        return None if found is None else self._priced(size, found[1], found[0], True)

    def unmodified(self, size: int) -> Choice:
        """What this size would do as it is, whether that fits or not."""
        return self._priced(size, self.peak(size), 0.0, False)

    def _priced(self, size: int, peak_nbytes: int, extra_seconds: float, planned: bool) -> Choice:
        """An update is shared by the batches that it is accumulated over."""
        ops = self.fit.at(size).ops
        whole = sum(op.seconds for op in ops)
        update = sum(op.seconds for op in ops if op.phase == "update")
        beyond = extra_seconds - update * (1 - size / (self.effective or size))
        seconds = whole + beyond
        joules = None if self.joules is None else self.joules.of(size, whole, beyond) / size
        return Choice(size, peak_nbytes, size / seconds if seconds > 0 else 0.0, planned, joules)


def _merit(choice: Choice, mode: Mode) -> tuple[float, int]:
    """What the best choice has the most of; of equals the smaller one is the better one."""
    if mode == "energy" and choice.joules_per_sample is not None:
        return -choice.joules_per_sample, -choice.size
    return choice.samples_per_second, -choice.size


def _thinned(sizes: Sequence[int]) -> Iterable[int]:
    """A few of the sizes, the first and the last among them, about evenly spaced by ratio where there are many."""
    if len(sizes) <= _GRID:
        return sizes
    ratio = (sizes[-1] / sizes[0]) ** (1 / (_GRID - 1))
    wanted = [sizes[0] * ratio**i for i in range(_GRID)]
    return sorted({*(min(sizes, key=lambda s: abs(s - w)) for w in wanted), sizes[-1]})
