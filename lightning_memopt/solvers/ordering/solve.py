"""Solve an ordering problem: a problem in, the sequence with the lowest peak that the given seconds allow out, and a bound.

Cheap methods come first: the given order, and list scheduling. Then, as long as the peak is above the bound, come the minimum
cut at the op of the peak, which either proves that no sequence is better or says which ops should run before that op, and
CP-SAT on an excerpt around the peak.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.errors import OrderingError
from lightning_memopt.solvers.ordering import excerpts, search
from lightning_memopt.solvers.ordering.cuts import Cuts
from lightning_memopt.solvers.ordering.lists import KEYS, scheduled
from lightning_memopt.solvers.ordering.problem import Problem
from lightning_memopt.solvers.ordering.reach import Reach

_WIDTH = 40
"""Number of ops of the first excerpt. Excerpts get wider as long as nothing better is found."""
_WORKERS = 2
_MOST_RUNS = 1_000_000
"""Maximum number of runs of ops in one exact search: a few seconds."""
_MOST_FAILURES = 6
_EXCERPT_SECONDS = 4.0


@dataclass(frozen=True)
class Order:
    """A sequence of ops.

    sequence: all ops, each after those that must run before it.
    peak_nbytes: the most bytes in memory at one op of the sequence.
    bound_nbytes: no sequence has a lower peak.
    given_nbytes: the peak of the order in which the ops were given.
    by: the method that found the sequence.
    seconds: what the solve took.
    """

    sequence: tuple[int, ...]
    peak_nbytes: int
    bound_nbytes: int
    given_nbytes: int
    by: str
    seconds: float

    @property
    def gap(self) -> float:
        """By which share the peak is above the bound; 0 if no sequence can be better."""
        return self.peak_nbytes / self.bound_nbytes - 1 if self.bound_nbytes else 0.0


def order(problem: Problem, seconds: float = 60.0) -> Order:
    """The ops in a sequence with a peak as low as possible.

    seconds: limit of the search.

    Raises OrderingError if `seconds` is not a positive number.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise OrderingError(f"{seconds} is not a positive number of seconds; give one")
    began = clocks.monotonic()
    solving = _Solving(problem, began + seconds)
    solving.cheap()
    solving.bound()
    solving.split()
    solving.search()
    solving.excerpts()
    return Order(
        tuple(solving.sequence), solving.peak_nbytes, solving.bound_nbytes, solving.given_nbytes, solving.by,
        clocks.monotonic() - began,
    )  # fmt: skip


class _Solving:
    """The best sequence so far, and the best bound."""

    def __init__(self, problem: Problem, until: float) -> None:
        self.problem, self.until = problem, until
        self.reach = Reach(problem)
        self.cuts = Cuts(problem, self.reach)
        self.sequence = list(range(len(problem)))
        self.by = "the given order"
        self.peak_nbytes = self.given_nbytes = problem.peak_nbytes(self.sequence)
        self._wide = self._width_of(self.sequence)
        self._starts: list[list[int]] = []
        self._tried: set[int] = set()
        self.bound_nbytes = self.reach.bound_nbytes

    def done(self) -> bool:
        return self.peak_nbytes <= self.bound_nbytes or clocks.monotonic() >= self.until

    def _width_of(self, sequence: Sequence[int]) -> int:
        """At how many ops a sequence has its peak. Of two sequences with equal peaks, the one with fewer such ops is easier to
        improve.
        """
        levels = self.problem.levels_nbytes(sequence)
        return int((levels == levels.max(initial=0)).sum())

    def better(self, sequence: Sequence[int], by: str) -> bool:
        """Take the sequence if it is better."""
        peak, wide = self.problem.peak_nbytes(sequence), self._width_of(sequence)
        if (peak, wide) >= (self.peak_nbytes, self._wide):
            return False
        self.sequence, self.peak_nbytes, self._wide, self.by = list(sequence), peak, wide, by
        return True

    def cheap(self) -> None:
        """List scheduling."""
        given = list(self.sequence)
        self._starts = [given]
        for name, key in KEYS.items():
            if self.done():
                return
            sequence = scheduled(self.problem, given, key)
            self._starts.append(sequence)
            self.better(sequence, f"list scheduling, {name}")

    def bound(self) -> None:
        """Minimum cuts at the ops with the highest levels, until no other op can have a higher bound."""
        levels = self.problem.levels_nbytes(self.sequence)
        for position in np.argsort(-levels, kind="stable").tolist():
            if levels[position] <= self.bound_nbytes or self.done():
                return
            op = self.sequence[position]
            if op not in self._tried:
                self._tried.add(op)
                self.bound_nbytes = max(self.bound_nbytes, self.cuts.at(op).nbytes)

    def split(self) -> None:
        """Split sequences by cuts: at the op of the peak, then within the parts, as long as that lowers the peak.

        Then the best sequence again, split first at another op whose level is above the bound, as long as that helps.
        """
        for start in self._starts:
            if self.done():
                return
            self.better(self._split(start, None), "minimum cuts")
        tried: set[int] = set()
        improved = True
        while improved and not self.done():
            improved = False
            levels = self.problem.levels_nbytes(self.sequence)
            for position in np.argsort(-levels, kind="stable").tolist():
                op = self.sequence[position]
                if self.done() or levels[position] <= self.bound_nbytes:
                    return
                if op not in tried:
                    tried.add(op)
                    improved = self.better(self._split(self.sequence, op), "minimum cuts")
                    if improved:
                        break

    def _split(self, start: Sequence[int], first: int | None) -> list[int]:
        """A sequence that is first split at the op `first`, and then wherever it has its peak. If None, it is split at the peak
        from the beginning.
        """
        sequence, ends = list(start), [0, len(start)]
        while clocks.monotonic() < self.until:
            levels = self.problem.levels_nbytes(sequence)
            if levels.max() <= self.bound_nbytes:
                break
            at = int(np.argmax(levels)) if first is None else sequence.index(first)
            part = bisect_right(ends, at)
            low, high = ends[part - 1], ends[part]
            cut = self.cuts.at(sequence[at], sequence[:low], sequence[high:])
            if cut.nbytes == levels[at] and first is None:
                break  # the peak cannot be lowered while these parts stay as they are
            first = None
            early, late = cut.applied(sequence[low:high])
            sequence[low:high] = [*early, cut.op, *late]
            ends[part:part] = [e for e in (low + len(early), low + len(early) + 1) if low < e < high]
        return sequence

    def search(self) -> None:
        """The exact search on the whole sequence for a peak just below the present one. It finds a better sequence, or proves
        that there is none. (Targets between bound and peak would need more searches, each of which takes as long.)
        """
        while not self.done():
            target = self.peak_nbytes - 1
            answer = search.within(self.problem, self.sequence, 0, len(self.sequence), target, _MOST_RUNS, self.until)
            if answer.proven:
                self.bound_nbytes = self.peak_nbytes
            if answer.sequence is None or not self.better(answer.sequence, "exact search"):
                return

    def excerpts(self) -> None:
        """CP-SAT on wider and wider excerpts around the peak."""
        width, failures = _WIDTH, 0
        while not self.done() and failures < _MOST_FAILURES:
            levels = self.problem.levels_nbytes(self.sequence)
            at = int(np.argmax(levels)) + (failures % 3 - 1) * width // 3
            low, high = max(0, at - width // 2), min(len(self.sequence), at + width // 2)
            left = self.until - clocks.monotonic()
            solved = excerpts.solved(
                self.problem, self.sequence, low, high, self.bound_nbytes, min(left, _EXCERPT_SECONDS), _WORKERS
            )
            if self.better(solved.sequence, "CP-SAT around the peak"):
                failures = 0
            else:
                failures += 1
                width = min(len(self.sequence), width * 3 // 2)
