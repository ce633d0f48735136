"""Two small sizes, each recorded in one real step, and the step at any size that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.batching.batches import host_cap, nbytes_of
from lightning_memopt.batching.fit import FitError, StepFit, fit
from lightning_memopt.batching.trials import Trials
from lightning_memopt.graph import Graph
from lightning_memopt.session.graphs import smoothed

_FAR = 4
"""A size that is more than so many times the recorded ones is far from them."""


@dataclass(frozen=True)
class Profile:
    """`largest`: the largest size that ran. `step`: the step at any size; None where there is none, and `why` says why."""

    largest: int
    step: StepFit | None = None
    why: str = ""


def profile(trials: Trials) -> Profile | None:
    """Record two sizes, at most what is used now, and smaller ones where those do not fit; None where not even 1 does.

    Not 1 if that can be: torch takes other ways for dimensions of 1.
    """
    size = min(trials.cap, max(2, trials.source.size // 2))
    while not trials.warm(size):
        if size == 1:
            return None
        size = max(1, min(size // 2, trials.cap))
    first = trials.observe(size)
    if first is None:
        return Profile(size, why="one step could not be recorded")
    other, second = _other(trials, size)
    if second is None:
        return Profile(size, why="there is only one size to profile")
    if other > size:
        return _fitted(trials, first, second, (size, other))
    return _fitted(trials, second, first, (other, size))


def _other(trials: Trials, size: int) -> tuple[int, Graph | None]:
    """A second size that fits, and its graph: the double, or all that the data gives; else the half."""
    double = min(2 * size, trials.cap)
    if double > size:
        graph = trials.observe(double)
        if graph is not None:
            return double, graph
        if size < trials.cap < double:  # the data ended
            return trials.cap, trials.observe(trials.cap)
    return size // 2, trials.observe(size // 2) if size > 1 else None


def _fitted(trials: Trials, small: Graph, large: Graph, sizes: tuple[int, int]) -> Profile:
    """The step from two graphs. Lowers `cap` where the host's memory would not hold the batches."""
    try:
        step = fit(smoothed([small]), smoothed([large]), sizes)
    except FitError as error:
        return Profile(sizes[1], why=str(error))
    nbytes = [nbytes_of(trials.source.batch(size)) for size in sizes]
    cap = host_cap((nbytes[1] - nbytes[0]) / (sizes[1] - sizes[0]), trials.source.copies)
    trials.cap = min(trials.cap, cap or trials.cap)
    return Profile(sizes[1], step)


def sharpened(trials: Trials, step: StepFit, plain: int) -> StepFit:
    """The step, recorded once more at half of `plain`, the largest size that is predicted to fit as it is, where that is far
    from what was recorded: what libraries take on their way, and how long ops take, is on no line that two tiny batches show.
    """
    half = plain // 2
    graph = trials.observe(half) if half > _FAR * step.sizes[1] else None
    if graph is None:
        return step
    try:
        return fit(step.small, smoothed([graph]), (step.sizes[0], half))
    except FitError:
        return step
