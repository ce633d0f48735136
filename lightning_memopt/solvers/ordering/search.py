"""Find an order of an excerpt of a sequence whose levels all stay within a target, or prove that there is none, by an exact
search over sets of ops.

What is in memory depends only on which ops have run, not on their order. So a set from which the search failed is never looked
at again. An op that may run now, stays within the target and frees at least as much as it makes is run at once, because moving
it forward can only lower the levels in between. So the search branches only where several ops need more memory. In a network,
these are the beginnings of parallel branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_memopt import clocks
from lightning_memopt.solvers.ordering.problem import BEFORE, Problem

_SETS_A_LOOK = 256
"""Number of sets of ops after which the clock is read."""


class Answer(NamedTuple):
    """sequence: one that stays within the target; None if none was found. proven: whether it is proven that none exists."""

    sequence: list[int] | None
    proven: bool


def within(
    problem: Problem, sequence: Sequence[int], low: int, high: int, target_nbytes: int, most_runs: int, until: float
) -> Answer:
    """The sequence with the ops at positions `low .. high - 1` in an order in which none of their levels is above the target.

    most_runs: the limit on how often ops are run, over all attempts. until: the time at which the search gives up.
    """
    excerpt = _Excerpt(problem, sequence, low, high, target_nbytes)
    answer = excerpt.search(most_runs, until)
    if answer.sequence is None:
        return answer
    return Answer([*sequence[:low], *answer.sequence, *sequence[high:]], False)


class _Excerpt:
    """The state of the search: which ops of the excerpt have run, in `trail`, and what follows from that.

    key: the same as bits.
    runs: how often an op was run, over all attempts.
    live_nbytes: bytes in memory.
    left: buffer -> number of its users that have not run.
    waiting: op -> number of ops that it waits for.
    """

    def __init__(self, problem: Problem, sequence: Sequence[int], low: int, high: int, target_nbytes: int) -> None:
        self.problem, self.target = problem, target_nbytes
        self.place = {op: k for k, op in enumerate(sequence[low:high])}
        gone = set(sequence[:low])
        self.made = [sum(problem.nbytes[b] for b in buffers) for buffers in problem.makes]
        self.touched = {op: tuple({*problem.uses[op], *problem.makes[op]}) for op in self.place}
        self.left: list[int] = []
        self.live_nbytes = problem.resident_nbytes
        for buffer, (maker, users) in enumerate(zip(problem.makers, problem.users, strict=True)):
            left = len({*users, maker} - gone - {BEFORE}) + (buffer in problem.stays)
            self.left.append(left)
            if left and (maker == BEFORE or maker in gone):
                self.live_nbytes += problem.nbytes[buffer]
        self.waiting = {op: sum(o in self.place for o in problem.before[op]) for op in self.place}
        self.ready = {op for op, count in self.waiting.items() if not count}
        self.trail: list[int] = []
        self.key = self.runs = 0

    def _fits(self, op: int) -> bool:
        return self.live_nbytes + self.made[op] + self.problem.workspace[op] <= self.target

    def _growth(self, op: int) -> int:
        """Bytes by which memory grows when the op has run."""
        nbytes, left = self.problem.nbytes, self.left
        return self.made[op] - sum(nbytes[b] for b in self.touched[op] if left[b] == 1)

    def _run(self, op: int) -> None:
        self.runs += 1
        self.trail.append(op)
        self.key ^= 1 << self.place[op]
        self.ready.remove(op)
        self.live_nbytes += self.made[op]
        for buffer in self.touched[op]:
            self.left[buffer] -= 1
            if not self.left[buffer]:
                self.live_nbytes -= self.problem.nbytes[buffer]
        for other in self.problem.after[op]:
            if other in self.waiting:
                self.waiting[other] -= 1
                if not self.waiting[other]:
                    self.ready.add(other)

    def _undo(self) -> None:
        op = self.trail.pop()
        self.key ^= 1 << self.place[op]
        for other in self.problem.after[op]:
            if other in self.waiting:
                if not self.waiting[other]:
                    self.ready.remove(other)
                self.waiting[other] += 1
        for buffer in self.touched[op]:
            if not self.left[buffer]:
                self.live_nbytes += self.problem.nbytes[buffer]
            self.left[buffer] += 1
        self.live_nbytes -= self.made[op]
        self.ready.add(op)

    def _run_free(self) -> None:
        """Run all ops that fit and do not grow memory."""
        again = True
        while again:
            again = False
            for op in sorted(self.ready):
                if self._fits(op) and self._growth(op) <= 0:
                    self._run(op)
                    again = True

    def search(self, most_runs: int, until: float) -> Answer:
        """Search depth first; the op with the least growth is tried first."""
        dead: set[int] = set()
        branches: list[tuple[int, list[int]]] = []  # (length of the trail, ops not tried yet, the best one last)
        while True:
            self._run_free()
            if len(self.trail) == len(self.place):
                return Answer(list(self.trail), False)
            choices: list[int] = []
            if self.key not in dead:
                dead.add(self.key)
                if self.runs > most_runs or (len(dead) % _SETS_A_LOOK == 0 and clocks.monotonic() >= until):
                    return Answer(None, False)
                choices = [op for op in self.ready if self._fits(op)]
                choices.sort(key=lambda op: (-self._growth(op), -self.place[op]))
            branches.append((len(self.trail), choices))
            while branches and not branches[-1][1]:
                branches.pop()
                if not branches:
                    return Answer(None, True)
            length, choices = branches[-1]
            while len(self.trail) > length:
                self._undo()
            self._run(choices.pop())
