"""The largest size by real steps alone: where nothing could be predicted, or a trial said otherwise."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from lightning_memopt.batching.trials import Trial, Trials

CLOSE = 0.02
"""The end: the smallest size that failed is this share above the largest one that ran."""


def bisected(trials: Trials, permitted: Callable[[int], Sequence[int]], known: int) -> Trial | None:
    """The largest permitted size that fits, to within `CLOSE`; None where none does.

    From `known`, which ran, it doubles until a size fails; then what fits is between two sizes, halved by ratio while they are
    far apart. What failed before is not tried again.
    """
    sizes = permitted(trials.cap)
    failed = min((t.size for t in trials.done if not t.fits), default=None)
    best: Trial | None = None
    low, high = -1, len(sizes) if failed is None else bisect_left(sizes, failed)  # the last that fits, the first that does not
    i = bisect_right(sizes, known) - 1
    while low + 1 < high:
        i = min(max(i, low + 1), high - 1)
        trial = trials.confirm(sizes[i])
        if trial is None:  # what the data gave may fit
            high = bisect_right(sizes, trials.cap)
            i = high - 1
            continue
        if trial.fits:
            best, low = trial, i
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
    return math.isqrt(small * large) if large > 4 * small else (small + large) // 2
