"""The largest batch size by real steps alone: used if no step could be fitted, or if a trial contradicted the predictions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from lightning_memopt.batching.trials import Trial, Trials

CLOSE = 0.02
"""The search ends when the smallest size that failed is at most this share above the largest one that ran."""


def bisected(trials: Trials, permitted: Callable[[int], Sequence[int]], known: int) -> Trial | None:
    """A real trial of the largest permitted size that fits, to within `CLOSE`; None if none fits.

    From `known`, a size that ran, it doubles until a size fails. Then it bisects between the largest size that fits and the
    smallest that fails: by ratio while they are far apart, else by difference. Sizes that failed before are not tried again.
    """
    sizes = permitted(trials.cap)
    failed = min((t.size for t in trials.done if not t.fits), default=None)
    best: Trial | None = None
    low = -1  # index of the last size that fits
    high = len(sizes) if failed is None else bisect_left(sizes, failed)  # index of the first size that does not
    i = bisect_right(sizes, known) - 1
    while low + 1 < high:
        i = min(max(i, low + 1), high - 1)
        trial = trials.confirm(sizes[i])
        if trial is None:  # the data has no such batch: `trials.cap` is now the largest batch that it has, which may fit
            high = bisect_right(sizes, trials.cap)
            i = high - 1
            continue
        if trial.fits:
            best = trial
            low = i
        else:
            high = i
        if high == len(sizes):
            i = bisect_left(sizes, 2 * sizes[i])
        elif best is not None and sizes[high] - best.size <= max(1, CLOSE * best.size):
            break
        else:
            i = bisect_left(sizes, _between(1 if best is None else best.size, sizes[high]))
    return best


def _between(small: int, large: int) -> int:
    """The geometric mean of two sizes if they are far apart, else the arithmetic mean."""
    return math.isqrt(small * large) if large > 4 * small else (small + large) // 2
