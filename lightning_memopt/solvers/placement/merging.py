"""Buffers that tile a rectangle become one buffer, where all bytes of the arena are in use.

Where the load is the capacity right before and right after a moment, the buffers that come at this moment fill exactly the
holes that those that go leave behind. Where sums of sizes are equal only by design, equal sums say which buffers fill which
hole:

    chain      one goes, one of the same size comes: together they are one buffer that lasts longer
    stack      several come (or go), together as large as one that goes (or comes), and last equally long: one larger buffer
    twins      several come and go together: one larger buffer, whether or not they fill a hole (even seeds)
    pinwheel   five buffers around each other, the smallest tiling that is neither

This repeats until nothing changes. The rules are a guess: equal sums may be an accident. So a problem that cannot be placed
when merged may be possible unmerged, and other guesses come from another `seed`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.solvers.placement.buffers import Ints, Problem

_MOST_IN_A_STACK = 4
_MOST_STEPS = 3000
"""Steps of one search for equal sums."""


class Item:
    """Buffers that were merged into one.

    lower, upper, size: as of a buffer.
    parts: (index of a buffer, its offset within this item).
    """

    __slots__ = ("lower", "parts", "size", "upper")

    def __init__(self, lower: int, upper: int, size: int, parts: list[tuple[int, int]]) -> None:
        self.lower, self.upper, self.size, self.parts = lower, upper, size, parts


class Merging:
    """Merged items of a problem, for a capacity in bytes. `problem()` is what is left; `offsets` leads back.

    No rule is applied after `until`, in `clocks.monotonic()`."""

    def __init__(self, problem: Problem, capacity: int, seed: int, until: float = math.inf) -> None:
        self._n = len(problem)
        self._random = random.Random(seed)
        self._twins = seed % 2 == 0
        rows = zip(problem.lower.tolist(), problem.upper.tolist(), problem.size.tolist(), strict=True)
        self.items = {Item(lower, upper, size, [(i, 0)]) for i, (lower, upper, size) in enumerate(rows)}
        self._going: dict[int, list[Item]] = {}
        self._coming: dict[int, list[Item]] = {}
        for item in sorted(self.items, key=lambda item: item.parts):
            self._coming.setdefault(item.lower, []).append(item)
            self._going.setdefault(item.upper, []).append(item)
        full = problem.load_nbytes == capacity
        self._full = frozenset(problem.times[1:-1][full[:-1] & full[1:]].tolist())
        self._open = set(self._full)
        while self._open and clocks.monotonic() < until:
            moment = self._random.choice(sorted(self._open))
            while self._merge_at(moment):
                pass
            self._open.discard(moment)

    def problem(self) -> Problem:
        """The problem of the items, in a fixed order."""
        self._order = sorted(self.items, key=lambda item: item.parts)
        columns = [(item.lower, item.upper, item.size) for item in self._order]
        return Problem(*np.array(columns, dtype=np.int64).reshape(-1, 3).T.copy())

    def offsets(self, offsets: Ints) -> Ints:
        """Offsets of all buffers, from those of the items of `problem()`."""
        result = np.zeros(self._n, dtype=np.int64)
        for item, offset in zip(self._order, offsets.tolist(), strict=True):
            for index, above in item.parts:
                result[index] = offset + above
        return result

    def _merge_at(self, moment: int) -> bool:
        """Apply one rule to what comes and goes at a moment. Returns whether one applied."""
        going, coming = list(self._going.get(moment, ())), list(self._coming.get(moment, ()))
        self._random.shuffle(going)
        self._random.shuffle(coming)
        if self._twins:
            for item in coming:
                alike = [other for other in coming if other.upper == item.upper]
                if len(alike) > 1 and self._stack(alike):
                    return True
        for first in going:
            for second in coming:
                if first.size == second.size:
                    self._replace([(first, 0), (second, 0)], first.lower, second.upper, first.size)
                    return True
        for sides in ((going, coming), (coming, going)):
            for single in sides[0]:
                for group in _tilings(single.size, sides[1]):
                    if self._stack(group) or (single in going and len(group) == 2 and self._pinwheel(single, group)):
                        return True
        return False

    def _stack(self, group: list[Item]) -> bool:
        lower, upper = group[0].lower, group[0].upper
        if any((item.lower, item.upper) != (lower, upper) for item in group):
            return False
        tops = np.cumsum([0, *(item.size for item in group)]).tolist()
        self._replace(list(zip(group, tops, strict=False)), lower, upper, tops[-1])
        return True

    def _pinwheel(self, west: Item, pair: list[Item]) -> bool:
        """`west` goes, `north` and `middle` come in its place; later `south` and `middle` go, and `east` comes."""
        for middle, north in (pair, pair[::-1]):
            for south in self._going.get(middle.upper, ()):
                if south is middle or south.lower != west.lower or middle.upper >= north.upper:
                    continue
                for east in self._coming.get(middle.upper, ()):
                    if east.size == south.size + middle.size and east.upper == north.upper:
                        low = south.size
                        five = [(south, 0), (west, low), (middle, low), (north, low + middle.size), (east, 0)]
                        self._replace(five, west.lower, east.upper, low + west.size)
                        return True
        return False

    def _replace(self, parts: list[tuple[Item, int]], lower: int, upper: int, size: int) -> None:
        """One item in place of several, each with its offset within the new one."""
        for item, _ in parts:
            self.items.discard(item)
            self._coming[item.lower].remove(item)
            self._going[item.upper].remove(item)
        merged = Item(lower, upper, size, [(index, above + at) for item, above in parts for index, at in item.parts])
        self.items.add(merged)
        self._coming.setdefault(lower, []).append(merged)
        self._going.setdefault(upper, []).append(merged)
        self._open |= {lower, upper} & self._full


def _tilings(size: int, items: list[Item]) -> Iterator[list[Item]]:
    """Groups of two to four of the items whose sizes sum up to `size`."""
    usable = sorted((item for item in items if item.size < size), key=lambda item: -item.size)
    steps = _MOST_STEPS

    def groups(start: int, missing: int, chosen: list[Item]) -> Iterator[list[Item]]:
        nonlocal steps
        for k in range(start, len(usable)):
            steps -= 1
            if steps < 0:
                return
            item = usable[k]
            if item.size == missing:
                yield [*chosen, item]
            elif item.size < missing and len(chosen) + 1 < _MOST_IN_A_STACK:
                yield from groups(k + 1, missing - item.size, [*chosen, item])

    return groups(0, size, [])
