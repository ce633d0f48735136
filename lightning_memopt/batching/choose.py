"""Which batch size: the peak and the samples a second of any size, predicted from a fitted step, with and without plans.

Plans are lives on the points of the step, and those are the same at every batch size: a plan that was solved at one size is
priced at another by simulating it there. So the planner solves at a few sizes only, and bisection does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_memopt.batching.fit import StepFit
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, reserved_bytes_of, simulate
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import keep_all

Mode = Literal["largest", "throughput", "energy"]
MODES = ("largest", "throughput", "energy")
_ROUNDS = 4
"""How often the smallest plan is solved anew at the size that the one before it allows."""
_GRID = 8
"""Sizes that are priced between the largest that needs no plan and the largest there is."""
_POOL = 32
"""Plans of a frontier that are priced at other sizes."""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size in [low, high] that fits, where `low` does and what fits is an interval; 0 where `low` does not."""
    if high < low or not fits(low):
        return 0
    step = 1
    while low + step <= high and fits(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Choice:
    """A batch size, and what is predicted of it. `planned`: whether it needs tensors to be rebuilt."""

    size: int
    peak_nbytes: int
    samples_per_second: float
    planned: bool


def unmodified_peak(graph: Graph) -> int:
    """What a budget is compared with, without a plan."""
    reserve = reserved_bytes_of(graph)
    return reserve(keep_all(graph)) if reserve is not None else max(unmodified_levels(graph), default=0)


@dataclass(eq=False)
class Chooser:
    """Predictions for one fitted step within `budget_nbytes`. `plans`: whether tensors may be rebuilt.

    `effective`: samples between two updates, where they are accumulated over several batches; else None: a batch is one. The
    fitted step then accumulates, and a batch of all of them does without `spare_nbytes` of gradients, at best.
    `solve`: the planner, as the session calls it.
    """

    fit: StepFit
    budget_nbytes: int
    plans: bool
    effective: int | None = None
    spare_nbytes: int = 0
    solve: Callable[[Graph], planner.Frontier] = planner.solve
    _pool: list[tuple[tuple[Life, ...], float]] = field(default_factory=list)

    def peak(self, size: int) -> int:
        """Of the unmodified step."""
        return unmodified_peak(self.fit.at(size))

    def largest_unmodified(self, cap: int) -> int:
        """The largest size whose step fits as it is."""
        found = largest(lambda size: self.peak(size) <= self.budget_nbytes, 1, cap)
        whole = self.effective or 0
        return whole if found < whole <= cap and self.peak(whole) <= self._room(whole) else found

    def _room(self, size: int) -> int:
        return self.budget_nbytes + (self.spare_nbytes if size == self.effective else 0)

    def largest_planned(self, cap: int) -> int:
        """The largest size for which there is a plan. The smallest plan of one size says how far it goes; solved anew there."""
        found = self.largest_unmodified(cap)
        for _ in range(_ROUNDS):
            if found >= cap:
                break
            plan = planner.smallest(self.fit.at(max(found, 1)))
            further = largest(lambda size: self._needs(size, plan.lives) <= self.budget_nbytes, max(found, 1), cap)  # noqa: B023
            if further <= found:
                break
            found = further
        # a plan that is smallest at the size itself may need less than one that is at a smaller size
        while found < cap and self._smallest_nbytes(found + 1) <= self.budget_nbytes:
            found += 1
        return found

    def choose(self, mode: Mode, permitted: Callable[[int], Sequence[int]], cap: int) -> Choice | None:
        """The best of the sizes that `permitted(limit)` gives, rising; None where none fits."""
        limit = self.largest_planned(cap) if self.plans else self.largest_unmodified(cap)
        sizes = permitted(limit)
        if not sizes:
            return None
        if mode == "largest":
            return self.predicted(sizes[-1])
        plain = [size for size in sizes if self.peak(size) <= self._room(size)]
        return max(
            map(self.predicted, (*_thinned(plain), *_thinned(sizes[len(plain) :]))),
            key=lambda choice: (choice.samples_per_second, -choice.size),
        )

    def predicted(self, size: int) -> Choice:
        """What this size would do: unmodified where that fits or nothing does, else under the fastest plan of the pool."""
        graph, peak = self.fit.at(size), self.peak(size)
        if not self.plans or peak <= self._room(size):
            return Choice(size, peak, self._rate(size, 0.0), False)
        self._solve_at(size)
        best: tuple[float, int] | None = None
        for lives, overhead in self._pool:
            try:
                found = simulate(graph, lives).predicted
            except LoweringError:
                continue
            seconds = found.seconds + overhead
            if best is None or seconds < best[0]:
                needs = self._needs(size, lives)
                best = (seconds, needs) if needs <= self.budget_nbytes else best
        if best is None:  # solved at another size, all of them: this one has a plan of its own
            plan = planner.smallest(graph)
            best = plan.predicted.seconds, plan.predicted.needed_bytes + planner.UNSEEN_NBYTES
        return Choice(size, best[1], self._rate(size, best[0]), True)

    def _needs(self, size: int, lives: tuple[Life, ...]) -> int:
        graph = self.fit.at(size)
        reserve = reserved_bytes_of(graph)
        nbytes = reserve(lives) if reserve is not None else simulate(graph, lives).predicted.peak_bytes
        return nbytes + planner.UNSEEN_NBYTES

    def _smallest_nbytes(self, size: int) -> int:
        return planner.smallest(self.fit.at(size)).predicted.needed_bytes + planner.UNSEEN_NBYTES

    def _rate(self, size: int, extra_seconds: float) -> float:
        """Samples a second. An update is shared by the batches that it is accumulated over."""
        ops = self.fit.at(size).ops
        update = sum(op.seconds for op in ops if op.phase == "update")
        batch = sum(op.seconds for op in ops) - update + extra_seconds
        seconds = batch + update * size / (self.effective or size)
        return size / seconds if seconds > 0 else 0.0

    def _solve_at(self, size: int) -> None:
        """Fill the pool, once: a frontier holds all sorts of plans."""
        if not self._pool:
            candidates = self.solve(self.fit.at(size)).candidates
            step = -(-len(candidates) // _POOL)
            self._pool.extend((c.lives, c.predicted.overhead_seconds) for c in candidates[::step])
            smallest = planner.smallest(self.fit.at(size))
            self._pool.append((smallest.lives, smallest.predicted.overhead_seconds))


def _thinned(sizes: Sequence[int]) -> Iterable[int]:
    """A few of the sizes, the first and the last among them, about evenly spaced by ratio where there are many."""
    if len(sizes) <= _GRID:
        return sizes
    ratio = (sizes[-1] / sizes[0]) ** (1 / (_GRID - 1))
    wanted = [sizes[0] * ratio**i for i in range(_GRID)]
    return sorted({*(min(sizes, key=lambda s: abs(s - w)) for w in wanted), sizes[-1]})
