"""The largest sizes of a step that fit on cards: the step is recorded at two sizes, from which it is known at any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_memopt.batching.fit import FitError, StepFit, fit
from lightning_memopt.batching.plans import largest
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.cards import Card
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Machine, Schedule, lower, simulate
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.collector import collector_paused
from lightning_memopt.solvers.rollout import keep_all

LARGEST = {"batch": 1 << 14, "length": 1 << 22}
"""The largest sizes that are asked about."""
_BEYOND = 8
"""How many times the largest unmodified step the one is for which a plan is made. A plan makes room for about as many."""
_NEAR = 0.02
"""The share by which a largest size may be too small."""
Most = tuple[int | None, int | None]
"""The largest size of a step that fits unmodified, and by a plan; None if it is not known."""


def at_sizes(here: int, graph_at: Callable[[int], Graph], graph: Graph) -> StepFit | str:
    """The step at any size, from two; `here` is the one of `graph`. If it is another step at another size: how they differ. One
    sample is often another step than two.
    """
    different = ""
    graphs = {here: graph}
    for small, large in ((here, 2 * here), (2 * here, 3 * here)):
        try:
            for size in (small, large):
                if size not in graphs:
                    graphs[size] = graph_at(size)
            return fit(graphs[small], graphs[large], (small, large))
        except (ConfigError, FitError) as error:
            different = str(error)
    return different


def needed_nbytes(graph: Graph, lives: tuple[Life, ...], schedule: Schedule | None = None) -> int:
    """What torch's allocator reserves for a plan."""
    reserve = Machine().reserve(graph)
    return simulate(graph, lives, schedule).predicted.peak_nbytes if reserve is None else reserve(lives, schedule)


@collector_paused()
def most(sizes: StepFit, cards: Sequence[Card], cap: int, here: int, other: StepFit | None = None) -> list[Most]:
    """For each card, the largest sizes that fit, at most `cap`; 0 if none does. The plan is the smallest one of a step that is
    larger than any unmodified one that fits: in smaller ones, what is not rebuilt may matter more than activations.

    here: the size of the step that was recorded.
    other: another way to run the step, which plans may take.
    """
    plain = _most_by(keep_all(sizes.large), sizes, cards, cap, here)
    largest = list(plain)
    for step in (sizes,) if other is None else (sizes, other):
        beyond = planner.smallest(step.at(_BEYOND * max(1, *plain)))
        largest = list(map(max, largest, _most_by(beyond.lives, step, cards, cap, here)))
    return list(zip(plain, largest, strict=True))


@collector_paused()
def most_unmodified(sizes: StepFit, cards: Sequence[Card], cap: int, here: int) -> list[int]:
    """`most` without plans."""
    return _most_by(keep_all(sizes.large), sizes, cards, cap, here)


def _most_by(lives: tuple[Life, ...], sizes: StepFit, cards: Sequence[Card], cap: int, here: int) -> list[int]:
    """For each card, the largest size that fits by a plan."""
    schedule = lower(sizes.at(here), lives)  # the points of the step are the same at every size
    peaks: dict[int, int] = {}
    needed: dict[int, int] = {}

    def peak(n: int) -> int:
        return simulate(sizes.at(n), lives, schedule).predicted.peak_nbytes

    def needs(n: int) -> int:
        return needed_nbytes(sizes.at(n), lives, schedule)

    def on(usable_nbytes: int) -> int:
        """Reserved bytes take long to ask for: first, allocated bytes bound the size."""
        high = largest(peak, usable_nbytes, 1, cap, known=peaks)
        found = largest(needs, usable_nbytes, here, high, _NEAR, needed)
        return found or largest(needs, usable_nbytes, 1, min(high, here), _NEAR, needed)

    largest_first = sorted({card.usable_nbytes for card in cards}, reverse=True)
    sizes_on = {usable_nbytes: on(usable_nbytes) for usable_nbytes in largest_first}
    return [sizes_on[card.usable_nbytes] for card in cards]
