"""Solve a placement problem: buffers in, the lowest placement that the given seconds allow out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.errors import PlacementError
from lightning_memopt.solvers.placement import best_fit, promotion, search
from lightning_memopt.solvers.placement.buffers import Buffer, Ints, Problem
from lightning_memopt.solvers.placement.sections import Sections

_MOST_CELLS = 1 << 24
"""Maximum number of pairs (buffer, section of it) and of pairs of two buffers. The memory of a search is proportional to
these.
"""

_SHORTEST_SECONDS = 0.1
"""Each target gets half of the remaining time, or all of it if less than this remains."""

_STACK_NBYTES = 256 << 20
"""Size of the stack of the searching thread. A search is as deep as there are buffers. Unused pages take no memory."""


@dataclass(frozen=True)
class Placement:
    """Addresses for buffers.

    offsets: bytes from the beginning of the arena, for every buffer in the order in which they were given.
    height_nbytes: bytes of the arena that the offsets need.
    bound_nbytes: no placement needs fewer bytes than this.
    fits: whether the height is within the given capacity; True if none was given.
    seconds: how long the solve took.
    """

    offsets: tuple[int, ...]
    height_nbytes: int
    bound_nbytes: int
    fits: bool
    seconds: float

    @property
    def fragmentation(self) -> float:
        """The share by which the height is above the bound; 0 if the placement is known to be optimal."""
        return self.height_nbytes / self.bound_nbytes - 1 if self.bound_nbytes else 0.0


def place(buffers: Sequence[Buffer], capacity: int | None = None, seconds: float = 60.0, alignment: int = 1) -> Placement:
    """Place the buffers within `capacity` bytes, or as low as possible.

    capacity: bytes. The search ends when a placement fits. If time runs out before, the result is the lowest placement that was
        found, and its `fits` is False.
    seconds: limit of the search. A few cheap placements are always tried, even if the limit is very small.
    alignment: all offsets are multiples of it, in bytes.

    Raises PlacementError if a buffer, the capacity, the seconds or the alignment are not valid.
    """
    began = clocks.monotonic()
    if capacity is not None and capacity < 1:
        raise PlacementError(f"the capacity {capacity} is not positive; give bytes from 1 on, or None")
    if not (math.isfinite(seconds) and seconds > 0):
        raise PlacementError(f"{seconds} is not a positive number of seconds; give one")
    if alignment < 1:
        raise PlacementError(f"the alignment {alignment} is not positive; give bytes from 1 on")
    problem = Problem.of(buffers, alignment)
    bound = problem.bound_nbytes
    target = bound if capacity is None else max(capacity, bound)
    offsets = _offsets(problem, target, began + seconds, lowest=capacity is None)
    height = problem.height_nbytes(offsets)
    fits = capacity is None or height <= capacity
    return Placement(tuple(offsets.tolist()), height, bound, fits, clocks.monotonic() - began)


def _offsets(problem: Problem, target_nbytes: int, until: float, lowest: bool) -> Ints:
    """Offsets of all parts. Each part that needs more than best-fit gets an equal share of the time that is left.

    lowest: whether parts that do not reach the target are placed as low as possible above it.
    """
    offsets = np.zeros(len(problem), dtype=np.int64)
    parts = [(indices, _Part(problem.part(indices), target_nbytes)) for indices in problem.components()]
    parts.sort(key=lambda entry: entry[1].height_nbytes > target_nbytes)
    for rank, (indices, part) in enumerate(parts):
        now = clocks.monotonic()
        share = now + (until - now) / (len(parts) - rank)
        if lowest:
            part.lower_all(target_nbytes, share)
        else:
            part.lower(target_nbytes, share)
        offsets[indices] = part.offsets
    return offsets


class _Part:
    """Buffers that must be placed together, and their lowest placement so far.

    impossible_nbytes: no placement is this low; 0 if nothing was proven.
    """

    def __init__(self, problem: Problem, target_nbytes: int) -> None:
        self.problem = problem
        self._unit_nbytes = math.gcd(*problem.size.tolist())
        self.impossible_nbytes = 0
        self._place = search.best_fit if search.available() else best_fit.best_fit
        self._orders = list(best_fit.orders(problem).values())
        self.offsets = self._place(problem, self._orders[0])
        self.height_nbytes = problem.height_nbytes(self.offsets)
        for order in self._orders[1:]:
            if self.height_nbytes > target_nbytes:
                self._better(self._place(problem, order))

    def lower_all(self, target_nbytes: int, until: float) -> None:
        """`lower`; if the target is not reached, lower the offsets as far as possible: bisect between what was reached and the
        target.
        """
        failed_nbytes, aim_nbytes = 0, target_nbytes
        while self.height_nbytes > target_nbytes and (left := until - clocks.monotonic()) > 0:
            self.lower(aim_nbytes, until - left / 2 if left > _SHORTEST_SECONDS else until)
            if self.height_nbytes > aim_nbytes:
                failed_nbytes = max(failed_nbytes, aim_nbytes)
            steps = (self.height_nbytes - failed_nbytes) // self._unit_nbytes
            if steps <= 1:  # nothing lies in between, but the last attempt may have been given up too early
                if self.impossible_nbytes == failed_nbytes:
                    return
                failed_nbytes = self.impossible_nbytes
                steps = (self.height_nbytes - max(failed_nbytes, target_nbytes)) // self._unit_nbytes
            aim_nbytes = max(target_nbytes, self.height_nbytes - (steps + 1) // 2 * self._unit_nbytes)

    def lower(self, target_nbytes: int, until: float) -> None:
        """Lower the offsets until they reach the target, it is proven to be out of reach, or it is `until`.

        The search runs in a thread of its own. Meanwhile this one repeats best-fit, which finds something lower also where the
        search finds nothing; a keyboard interrupt ends both.
        """
        if self.height_nbytes <= target_nbytes:
            return
        sections, stop = Sections.of(self.problem), search.Stop()
        cells = max(int((sections.last - sections.first).sum()), len(self.problem) ** 2)
        found: list[tuple[Ints | None, bool]] = []

        def searches() -> None:
            found.append(search.search(sections, target_nbytes, until - clocks.monotonic(), stop))
            stop.set()

        thread = _deep(searches) if search.available() and cells <= _MOST_CELLS else None
        try:
            promotion.repeated(
                self.problem, self._orders, target_nbytes, until, place=self._place,
                better=lambda offsets, _: self._better(offsets), stop=stop.__bool__,
            )  # fmt: skip
        finally:
            stop.set()
            if thread is not None:
                thread.join()
        for offsets, certain in found:
            if offsets is not None:
                self._better(offsets)
            elif certain:
                self.impossible_nbytes = max(target_nbytes, self.impossible_nbytes)

    def _better(self, offsets: Ints) -> None:
        height = self.problem.height_nbytes(offsets)
        if height < self.height_nbytes:
            self.offsets, self.height_nbytes = offsets, height


def _deep(run: Callable[[], None]) -> threading.Thread:
    """A thread that has begun, with a stack for a deep recursion."""
    usual_nbytes = threading.stack_size(_STACK_NBYTES)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual_nbytes)
    return thread
