"""Observe one real step at each of two small batch sizes, and fit the step at any size from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memopt.batching.batches import host_cap, nbytes_of
from lightning_memopt.batching.fit import FitError, StepFit, fit
from lightning_memopt.batching.trials import Trials
from lightning_memopt.graph import Graph
from lightning_memopt.session.observe.graphs import smoothed

_FAR = 4
"""A size is far from the observed ones if it is more than this many times the larger one."""


@dataclass(frozen=True)
class Profile:
    """The result of profiling.

    largest: the largest size, in samples, that ran.
    step: the step at any size; None if it could not be fitted.
    why: why it could not be fitted; empty if it could.
    """

    largest: int
    step: StepFit | None = None
    why: str = ""


def profile(trials: Trials) -> Profile | None:
    """Observe two sizes, at most the size in use, and smaller ones if those do not fit; None if not even size 1 fits.

    Size 1 is avoided if possible: torch chooses other kernels for dimensions of 1.
    """
    size = min(trials.cap, max(2, trials.source.size // 2))
    while not trials.warm(size):
        if size == 1:
            return None
        size = max(1, min(size // 2, trials.cap))
    first = trials.observe(size)
    if first is None:
        return Profile(size, why="one step could not be recorded")
    second_size, second = _second(trials, size)
    if second is None:
        return Profile(size, why="there is only one size to profile")
    if second_size > size:
        return _fitted(trials, first, second, (size, second_size))
    return _fitted(trials, second, first, (second_size, size))


def _second(trials: Trials, size: int) -> tuple[int, Graph | None]:
    """A second size that fits, and its graph: double the first size, or all samples of the data; else half of it."""
    double = min(2 * size, trials.cap)
    if double > size:
        graph = trials.observe(double)
        if graph is not None:
            return double, graph
        if size < trials.cap < double:  # the data has fewer samples than `double`: the failed attempt lowered `cap`
            return trials.cap, trials.observe(trials.cap)
    return size // 2, trials.observe(size // 2) if size > 1 else None


def _fitted(trials: Trials, small: Graph, large: Graph, sizes: tuple[int, int]) -> Profile:
    """Fit the step from two graphs. Lowers `trials.cap` to the size whose batches still fit into the host's memory."""
    try:
        step = fit(smoothed([small]), smoothed([large]), sizes)
    except FitError as error:
        return Profile(sizes[1], why=str(error))
    nbytes = [nbytes_of(trials.source.batch(size)) for size in sizes]
    cap = host_cap((nbytes[1] - nbytes[0]) / (sizes[1] - sizes[0]), trials.source.copies)
    trials.cap = min(trials.cap, cap or trials.cap)
    return Profile(sizes[1], step)


def sharpened(observe: Callable[[int], Graph | None], step: StepFit, largest: int) -> StepFit:
    """The step, fitted again with a larger second size if `largest` is far from the observed sizes; else `step` itself.

    `largest` is the largest size that is predicted to fit without a plan, or in tiles; half of it is observed. Two tiny batches
    do not show the workspaces that libraries take, and the seconds that ops take, at large sizes, nor the sizes of tiles.
    """
    half = largest // 2
    graph = observe(half) if half > _FAR * step.sizes[1] else None
    if graph is None:
        return step
    try:
        return fit(step.small, smoothed([graph]), (step.sizes[0], half))
    except FitError:
        return step


def in_tiles(trials: Trials, sizes: tuple[int, int]) -> StepFit | None:
    """The step whose loss head runs in tiles, fitted from two sizes; None if it does not fit or cannot be fitted, or if no head
    runs in tiles.
    """
    small, large = map(trials.observe_tiles, sizes)
    if small is None or large is None:
        return None
    try:
        return fit(smoothed([small]), smoothed([large]), sizes)
    except FitError:
        return None
