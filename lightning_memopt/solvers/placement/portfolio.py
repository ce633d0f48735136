"""One part of a problem that needs more than best-fit: several methods in turn, in two threads, until the target is reached.

The first thread searches merged problems (`merging`), each guess for a while that grows. Where little merges, it searches
sections on demand (`crowded`) instead. The second one runs sections on demand, repeated best-fit, and the search of all
sections in turn. A search of the unmerged problem can prove that a target is out of reach. Without a compiler the same methods
take turns in Python, in one thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator

from lightning_memopt import clocks
from lightning_memopt.solvers.placement import best_fit, crowded, native, promotion, search
from lightning_memopt.solvers.placement.buffers import Ints, Problem
from lightning_memopt.solvers.placement.merging import Merging
from lightning_memopt.solvers.placement.sections import Sections
from lightning_memopt.solvers.placement.sequences import luby

_SLICE_SECONDS = 0.2
"""The shortest time that a method has before the next one has its turn."""

_PATIENCE_SECONDS = 0.4
"""The shortest time of a search among those of sections on demand, before they begin anew: on most steps each takes less."""

_MOST_NODES = 1 << 60

_MOST_CELLS = 1 << 24
"""Pairs of a buffer and one of its sections, above which a search would take gigabytes."""

_STACK_NBYTES = 64 << 20
"""The stack of a thread that searches: a search is as deep as there are buffers."""

_WORTHWHILE = 0.75
"""Merged problems with more than this share of the buffers are not searched."""


class Portfolio:
    """The lowest offsets of a problem so far, and the methods that lower them.

    problem: buffers that all concern each other.
    target_nbytes: the height that is enough.
    offsets, height_nbytes: the lowest placement so far.
    impossible_nbytes: no placement is this low; 0 if nothing was proven.
    """

    def __init__(self, problem: Problem, target_nbytes: int) -> None:
        self.problem, self.target_nbytes, self._until = problem, target_nbytes, 0.0
        self._native = native.available()
        self._place = native.best_fit if self._native else best_fit.best_fit
        self._search = native.search if self._native else search.search
        self._sections = Sections.of(problem)
        self._unit_nbytes = math.gcd(*problem.size.tolist())
        self._searchable = int((self._sections.last - self._sections.first).sum()) <= _MOST_CELLS
        self._orders = list(best_fit.orders(problem).values())
        self._lock, self._stop = threading.Lock(), native.Stop()
        self.impossible_nbytes = 0
        self.offsets = self._place(problem, self._orders[0])
        self.height_nbytes = problem.height_nbytes(self.offsets)
        for order in self._orders[1:]:
            if not self.done():
                self._better(self._place(problem, order))

    def done(self) -> bool:
        return self.height_nbytes <= self.target_nbytes

    def run(self, until: float) -> None:
        """Lower the offsets until they reach the target, the target is proven to be out of reach, or it is `until`.

        until: `clocks.monotonic()`.
        """
        if self.done():
            return
        self._until = until
        self._stop = native.Stop()
        turns = [self._merged(), self._whole()] if self._searchable else [self._whole()]
        if not self._native:
            self._take_turns(_alternating(turns))
            return
        usual_nbytes = threading.stack_size(_STACK_NBYTES)
        threads = [threading.Thread(target=self._take_turns, args=(turn,), daemon=True) for turn in turns]
        try:
            for thread in threads:
                thread.start()
            threading.stack_size(usual_nbytes)
            for thread in threads:
                thread.join()
        finally:
            self._stop.set()  # a keyboard interrupt ends the threads, too

    def _take_turns(self, turns: Iterator[None]) -> None:
        for _ in turns:
            if self._stop or clocks.monotonic() >= self._until:
                return

    def _better(self, offsets: Ints) -> None:
        height = self.problem.height_nbytes(offsets)
        with self._lock:
            if height < self.height_nbytes:
                self.offsets, self.height_nbytes = offsets, height
            if self.done():
                self._stop.set()

    def _slice(self, seconds: float) -> float:
        """At most these seconds, and no more than are left."""
        return min(seconds, self._until - clocks.monotonic())

    def _merged(self) -> Iterator[None]:
        """Each turn searches one merged problem."""
        for seed in itertools.count():
            merging = Merging(self.problem, self.target_nbytes, seed, self._until)
            reduced = merging.problem()
            if len(reduced) > _WORTHWHILE * len(self.problem):
                break
            seconds = self._slice(_SLICE_SECONDS * luby(seed // 2 + 1))
            offsets, _ = self._searched(Sections.of(reduced), self.target_nbytes, seconds, seed)
            if offsets is not None:
                self._better(merging.offsets(offsets))
            yield
        for turn in itertools.count():  # nothing to merge
            # every fourth turn aims higher, because a lower placement is of use, too
            aim = self._half_way() if turn % 4 == 3 else self.target_nbytes
            if self._on_demand(aim, self._until, _PATIENCE_SECONDS * luby(turn // 2 + 1), turn):
                return
            yield

    def _whole(self) -> Iterator[None]:
        """Turns of sections on demand, of repeated best-fit, and of the search."""
        searching = self._searchable
        for turn in itertools.count():
            seconds = _SLICE_SECONDS * 2 ** (turn // 4)
            if searching:
                until = clocks.monotonic() + self._slice(max(seconds, 2.0))
                searching = not self._on_demand(self.target_nbytes, until, max(seconds, _PATIENCE_SECONDS), 1 + turn)
                yield
            # at least a second, because each turn of repeated best-fit begins anew
            until = clocks.monotonic() + self._slice(max(seconds, 1.0))
            promotion.repeated(
                self.problem, self._orders, self.target_nbytes, until, place=self._place,
                better=lambda offsets, _: self._better(offsets), seed=turn, stop=self._stop.__bool__,
            )  # fmt: skip
            yield
            if searching:
                offsets, proven = self._searched(self._sections, self.target_nbytes, self._slice(seconds), turn)
                searching = not self._ended(offsets, proven, self.target_nbytes)
                yield

    def _half_way(self) -> int:
        """Bytes half way from the target to the height, in steps of the sizes' greatest common divisor."""
        return self.target_nbytes + (self.height_nbytes - self.target_nbytes) // 2 // self._unit_nbytes * self._unit_nbytes

    def _on_demand(self, aim_nbytes: int, until: float, patience_seconds: float, seed: int) -> bool:
        """Search sections on demand for a placement within the aim. Returns whether it is proven that there is none."""
        offsets, proven = crowded.on_demand(
            self.problem, aim_nbytes, until, patience_seconds, search=self._searched, place=self._place, better=self._better,
            seed=seed, stop=self._stop.__bool__,
        )  # fmt: skip
        return self._ended(offsets, proven, aim_nbytes)

    def _ended(self, offsets: Ints | None, proven: bool, aim_nbytes: int) -> bool:
        """Take what a search of the problem ended with. Returns whether it is proven that nothing is within the aim."""
        if offsets is not None:
            self._better(offsets)
            return False
        if proven:
            self.impossible_nbytes = max(aim_nbytes, self.impossible_nbytes)
            self._stop.set()
        return proven

    def _searched(self, sections: Sections, capacity: int, seconds: float, seed: int) -> tuple[Ints | None, bool]:
        nodes_a_try = max(1000, 4 * len(sections.first))
        offsets, proven, _ = self._search(
            sections, capacity, seed=seed, nodes_a_try=nodes_a_try, most_nodes=_MOST_NODES, seconds=seconds, stop=self._stop
        )
        return offsets, proven


def _alternating(turns: list[Iterator[None]]) -> Iterator[None]:
    """The turns of all, one after the other, until all are over."""
    while turns:
        for turn in list(turns):
            try:
                next(turn)
            except StopIteration:
                turns.remove(turn)
            else:
                yield
