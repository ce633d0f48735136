"""An exact search for placements within a capacity. This code is the reference of the one in C++.

Sections are filled from below. The *floor* of a section is the height below which everything is decided. At the chosen section
exactly one thing is true in every placement: one of its buffers begins at the floor, or none does. So the branches exclude
each other. Bytes that are decided to stay empty are paid from the section's *slack*, the capacity without the load. Where there
is no slack, some buffer has to begin at the floor. A buffer may begin above the floor of other sections that it goes through:
it is a *block* there, and the gap below it is decided later.

Only placements are looked at in which every buffer stands on another one or on the ground, in which of two equal buffers
the first is lower, and in which of two buffers that come and go together, one right above the other, the larger is lower: every
placement can be brought into that form. A branch ends where

    a section has slack for the bytes that must stay empty no longer, because no buffer can begin that low;
    a gap below a block cannot be filled;
    on both sides of a boundary between sections, the buffers that do not cross it cannot end at equal heights. Those that cross
    it have one bottom, so below the lowest of them both sides are as high (`_level`).

The section with the lowest floor is decided first. Searches start again after a limit of nodes, with another style and noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.solvers.placement.buffers import Ints
from lightning_memopt.solvers.placement.native import Stop
from lightning_memopt.solvers.placement.sections import Sections
from lightning_memopt.solvers.placement.sequences import Generator, gcd_of, luby, reaches

_FAR = 1 << 61
_LEANS = (0.0, 0.05, 0.3)
"""How much the slack of a section counts against it, beside its floor, when a section is chosen."""


class _Block(NamedTuple):
    bottom: int
    top: int
    buffer: int


class Search:
    """The state of a search. Changes are noted in a trail, and undone from it.

    floor, slack: of every section, in bytes.
    real: whether the bytes right below the floor of a section belong to a buffer (or are the ground), and are not wasted.
    under: the buffer right below the floor of a section, -1 if there is none.
    blocks: of every section, the lowest last.
    low: of every buffer, a height that it is not below.
    offset: of every buffer, -1 as long as it is not placed.
    left, crossing: unplaced buffers of a section, and those of them that are in the next section, too.
    options: branches of a section; 0 if it cannot be chosen.
    """

    def __init__(self, sections: Sections, capacity: int, seed: int) -> None:
        n, m = len(sections.first), len(sections.load_nbytes)
        self.first, self.last = sections.first.tolist(), sections.last.tolist()
        self.size, self.twin = sections.size.tolist(), sections.twin.tolist()
        self.n, self.m, self.capacity = n, m, capacity
        self.quantum = gcd_of(self.size)
        self.members = [[j for j in range(n) if self.first[j] <= s < self.last[j]] for s in range(m)]
        self.enders = [[j for j in self.members[s] if self.last[j] == s + 1] for s in range(m)]
        self.starters = [[j for j in self.members[s + 1] if self.first[j] == s + 1] for s in range(m - 1)]
        self.floor, self.slack = [0] * m, [capacity - load for load in sections.load_nbytes.tolist()]
        self.real, self.under, self.weight, self.options = [True] * m, [-1] * m, [1] * m, [0] * m
        self.blocks: list[list[_Block]] = [[] for _ in range(m)]
        self.low, self.offset = [0] * n, [-1] * n
        self.left = [len(members) for members in self.members]
        self.crossing = [sum(self.last[j] > s + 1 for j in self.members[s]) for s in range(m)]
        self.placed = self.nodes = 0
        self.trail: list[tuple[list, int, object]] = []  # (list, index, old value); index -1: a buffer is placed
        self.dirty = (m, 0)
        self.generator = Generator(seed)
        self.style = (0.05, False, 64.0)
        self.noise = [1024] * n

    def run(self, nodes_a_try: int, most_nodes: int, until: float, stop: Stop) -> bool | None:
        """True: placed. False: there is no placement. None: a limit ended the search."""
        self._stop, self._until = stop, until
        if min(self.slack) < 0:
            return False
        result, round_ = None, 0
        while result is None and self.nodes < most_nodes and not self._over():
            round_ += 1
            if round_ > 1:
                self.noise = [512 + self.generator.next() % 1024 for _ in range(self.n)]
                lean, long = _LEANS[self.generator.next() % 3], bool(self.generator.next() % 2)
                self.style = (lean, long, 1.0 if self.generator.next() % 4 == 0 else 64.0)
            self.limit = min(most_nodes, self.nodes + nodes_a_try * luby(round_))
            self.dirty = (0, self.m)
            try:
                result = self._descend()
            except RecursionError:  # more buffers than Python's stack has space for
                return None
            if not result:
                self._undo(0)
        return result

    def _over(self) -> bool:
        return bool(self._stop) or clocks.monotonic() > self._until

    def _set(self, values: list, index: int, value: object) -> None:
        self.trail.append((values, index, values[index]))
        values[index] = value

    def _undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            values, index, old = self.trail.pop()
            if index >= 0:
                values[index] = old
            else:
                self._count(old, 1)  # type: ignore[arg-type]
        self.dirty = (self.m, 0)

    def _count(self, j: int, by: int) -> None:
        self.placed -= by
        for s in range(self.first[j], self.last[j]):
            self.left[s] += by
            if s + 1 < self.last[j]:
                self.crossing[s] += by

    # -- changes: each returns False at a dead end ---------------------------------------------------------

    def _raise(self, s: int, height: int, real: bool, under: int) -> bool:
        """Nothing of section `s` is below `height` any more."""
        blocks = self.blocks[s]
        while blocks and blocks[-1].bottom <= height:
            height, real, under = blocks[-1].top, True, blocks[-1].buffer
            blocks = blocks[:-1]
        if blocks is not self.blocks[s]:
            self._set(self.blocks, s, blocks)
        self._set(self.floor, s, height)
        self._set(self.real, s, real)
        self._set(self.under, s, under)
        self._touch(s, s + 1)
        for j in self.members[s]:
            if self.offset[j] < 0 and self.low[j] <= height:
                self._touch(self.first[j], self.last[j])
                self._set(self.low, j, height)
                if height + self.size[j] > self.capacity:
                    return False
        return True

    def _waste(self, s: int, height: int) -> bool:
        """The bytes from the floor of section `s` to `height`, which is not above its lowest block, stay empty."""
        if height - self.floor[s] > self.slack[s]:
            return False
        self._set(self.slack, s, self.slack[s] - (height - self.floor[s]))
        return self._raise(s, height, False, -1) and self._level(s - 1) and self._level(s)

    def _place(self, j: int, at: int) -> bool:
        self._set(self.offset, j, at)
        self.trail.append(([], -1, j))
        self._count(j, -1)
        for s in range(self.first[j], self.last[j]):
            if self.floor[s] == at:
                if not self._raise(s, at + self.size[j], True, j):
                    return False
                continue
            block = _Block(at, at + self.size[j], j)
            self._set(self.blocks, s, sorted([*self.blocks[s], block], reverse=True))
            self._touch(s, s + 1)
            for k in self.members[s]:
                if self.offset[k] < 0:
                    self._touch(self.first[k], self.last[k])
        return self._level(self.first[j] - 1) and self._level(self.last[j] - 1)

    def _touch(self, first: int, last: int) -> None:
        """These sections are looked at again."""
        self.dirty = (min(self.dirty[0], first), max(self.dirty[1], last))

    # -- dead ends ---------------------------------------------------------------------------------------------

    def _level(self, s: int) -> bool:
        """Whether both sides of the boundary behind section `s` can be equally high below what crosses it."""
        if s < 0 or self.crossing[s] == 0 or self.floor[s] == self.floor[s + 1]:
            return True
        higher = self.floor[s] - self.floor[s + 1]
        terms = [self.size[j] for j in self.starters[s] if self.offset[j] < 0]
        terms += [-self.size[j] for j in self.enders[s] if self.offset[j] < 0]
        terms += [b.bottom - b.top for b in self.blocks[s] if self.last[b.buffer] == s + 1]
        terms += [b.top - b.bottom for b in self.blocks[s + 1] if self.first[b.buffer] == s + 1]
        if reaches(terms, higher - self.slack[s + 1], higher + self.slack[s]):
            return True
        self.weight[s] += 1
        self.weight[s + 1] += 1
        return False

    def _fits(self, j: int, at: int) -> bool:
        top = at + self.size[j]
        if self.low[j] > at or top > self.capacity:
            return False
        ranges = (self.blocks[s] for s in range(self.first[j], self.last[j]))
        return not any(b.bottom < top and b.top > at for blocks in ranges for b in blocks)

    def _stands(self, j: int, at: int) -> bool:
        """Whether the buffer would stand on another one or on the ground."""
        return at == 0 or any(
            (self.floor[s] == at and self.real[s]) or any(b.top == at for b in self.blocks[s])
            for s in range(self.first[j], self.last[j])
        )

    def _candidate(self, j: int, s: int) -> bool:
        at, k = self.floor[s], self.under[s]
        if self.twin[j] >= 0 and self.offset[self.twin[j]] < 0:
            return False
        if k >= 0 and (self.first[k], self.last[k]) == (self.first[j], self.last[j]) and self.size[k] < self.size[j]:
            return False
        return self._fits(j, at) and (self.real[s] or self._stands(j, at))

    # -- the search ---------------------------------------------------------------------------------------------

    def _look(self) -> tuple[bool, int]:
        """Raise floors to where a buffer can begin. Returns (whether this is no dead end, the section to decide or -1)."""
        while self.dirty[0] < self.dirty[1]:
            sections, self.dirty = range(*self.dirty), (self.m, 0)
            for s in sections:
                if not self._look_at(s):
                    return False, -1
        chosen, best = -1, 0.0
        for s in range(self.m):
            if self.options[s]:
                value = self.floor[s] + self.style[0] * self.slack[s] + 1e-3 * self.options[s] / self.weight[s]
                if chosen < 0 or value < best:
                    chosen, best = s, value
        return True, chosen

    def _look_at(self, s: int) -> bool:
        if self.left[s] == 0:
            self._set(self.options, s, 0)
            return True
        at, blocks, slack = self.floor[s], self.blocks[s], self.slack[s]
        ceiling = blocks[-1].bottom if blocks else self.capacity
        unplaced = [j for j in self.members[s] if self.offset[j] < 0]
        below = [j for j in unplaced if self.low[j] + self.size[j] <= ceiling]
        if blocks:
            sizes = [self.size[j] for j in below]
            if ceiling - at - sum(sizes) > slack or not reaches(sizes, ceiling - at - slack, ceiling - at):
                self.weight[s] += 1
                return False
        lowest = min((self.low[j] for j in below), default=ceiling)
        if lowest > at:
            if self._waste(s, lowest):
                return True
            self.weight[s] += 1
            return False
        passes = self.real[s] and slack >= self.quantum  # it may be that no buffer begins at this height
        options = passes + sum(self.low[j] <= at and (passes or self._candidate(j, s)) for j in unplaced)
        if options == 0 and slack == 0:
            self.weight[s] += 1
            return False
        self._set(self.options, s, options)
        return True

    def _bump(self) -> bool:
        """No section can be decided: the lowest unplaced buffer stands on a placed one. Floors rise to the least such top."""
        least = _FAR
        for j in range(self.n):
            if self.offset[j] < 0:
                for s in range(self.first[j], self.last[j]):
                    tops = [b.top for b in self.blocks[s]] + ([self.floor[s]] if self.real[s] else [])
                    least = min([least, *(top for top in tops if self.low[j] <= top < least and self._fits(j, top))])
        moved = False
        for s in range(self.m):
            while least < _FAR and self.left[s] > 0 and self.floor[s] < least:
                if not self._waste(s, min(least, self.blocks[s][-1].bottom) if self.blocks[s] else least):
                    self.weight[s] += 1
                    return False
                moved = True
        return moved

    def _descend(self) -> bool | None:
        if self.placed == self.n:
            return True
        self.nodes += 1
        if self.nodes >= self.limit or self._over():
            return None
        going, s = self._look()
        while going and s < 0:
            going = self._bump()
            if going:
                going, s = self._look()
        if not going:
            return False
        at, mark = self.floor[s], len(self.trail)
        options = [(-self._score(j, at), j) for j in self.members[s] if self.offset[j] < 0 and self._candidate(j, s)]
        for _, j in sorted(options):
            result = self._descend() if self._place(j, at) else False
            if result is not False:
                return result
            self._undo(mark)
        if not self.real[s] or self.slack[s] < self.quantum:
            return False
        return self._descend() if self._waste(s, at + self.quantum) else False

    def _score(self, j: int, at: int) -> float:
        """Buffers that leave no gap below them come first, then those that end level with their neighbours, then large ones."""
        _, long, snug = self.style
        length = self.last[j] - self.first[j]
        flush = all(self.floor[s] == at for s in range(self.first[j], self.last[j]))
        before, behind, top = self.first[j] - 1, self.last[j], at + self.size[j]
        factor = 1024.0 if flush else 1.0
        level = 1.0
        if before < 0 or self.crossing[before] == 0 or self.floor[before] == top:
            level *= snug
        if self.crossing[behind - 1] == 0 or self.floor[behind] == top:
            level *= snug
        return float(self.size[j]) * length * (length if long else 1) * float(self.noise[j]) * factor * level


def search(
    sections: Sections, capacity: int, *, seed: int, nodes_a_try: int, most_nodes: int, seconds: float, stop: Stop
) -> tuple[Ints | None, bool, int]:
    """(offsets of shape (n,) or None, whether that is proven, nodes).

    nodes_a_try: nodes after which a search starts again, times the sequence of Luby.
    most_nodes, seconds: limits of all tries together.
    stop: ends the search from another thread.
    """
    run = Search(sections, capacity, seed)
    result = run.run(nodes_a_try, most_nodes, clocks.monotonic() + seconds, stop)
    return np.array(run.offset, dtype=np.int64) if result else None, result is not None, run.nodes
