"""Which ops come before and after each op in every sequence, and the quick bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_memopt.solvers.ordering.problem import BEFORE, Ints, Problem

Flags = npt.NDArray[np.bool_]

_MOST_CELLS = 1 << 24
"""Maximum number of cells of a table (ops x users of buffers) that is made at once."""


@dataclass(frozen=True, eq=False)
class Reach:
    """The transitive closure of the precedence of a problem, as one row of bits for each op."""

    problem: Problem

    @cached_property
    def _ancestors(self) -> list[int]:
        """Op -> bits of the ops that must run before it."""
        rows: list[int] = []
        for ops in self.problem.before:
            row = 0
            for other in ops:
                row |= rows[other] | 1 << other
            rows.append(row)
        return rows

    @cached_property
    def _descendants(self) -> list[int]:
        """Op -> bits of the ops that must run after it."""
        rows = [0] * len(self.problem)
        for op in range(len(self.problem) - 1, -1, -1):
            for other in self.problem.after[op]:
                rows[op] |= rows[other] | 1 << other
        return rows

    def _flags(self, rows: list[int]) -> Flags:
        """Rows of bits as booleans, shape (rows, ops)."""
        n = len(self.problem)
        width = (n + 7) // 8
        packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), dtype=np.uint8)
        unpacked = np.unpackbits(packed.reshape(len(rows), width), axis=1, count=n, bitorder="little")
        return unpacked.view(np.bool_)

    def ancestors(self, op: int) -> Flags:
        """Which ops must run before it, shape (ops,)."""
        flags: Flags = self._flags([self._ancestors[op]])[0]
        return flags

    def descendants(self, op: int) -> Flags:
        """Which ops must run after it, shape (ops,)."""
        flags: Flags = self._flags([self._descendants[op]])[0]
        return flags

    @cached_property
    def bounds_nbytes(self) -> Ints:
        """The fewest bytes that are in memory while each op runs, shape (ops,): at least what the op and its ancestors made and
        the op or a descendant uses.
        """
        problem = self.problem
        n = len(problem)
        bounds = np.array(problem.workspace, dtype=np.int64) + problem.resident_nbytes
        if not problem.makers:
            return bounds
        flat, starts = problem.flat_users
        makers = np.array(problem.makers, dtype=np.int64)
        stays = np.zeros(len(makers), dtype=np.bool_)
        stays[list(problem.stays)] = True
        sizes = problem.sizes.astype(np.float64)  # sums are below 2^53, so that they are exact
        for ops in _chunks(n, len(flat)):
            above = self._flags([self._ancestors[op] | 1 << op for op in ops])
            below = self._flags([self._descendants[op] | 1 << op for op in ops])
            made = above[:, makers] | (makers == BEFORE)
            used = np.logical_or.reduceat(below[:, flat], starts, axis=1) | stays
            bounds[ops.start : ops.stop] += ((made & used) @ sizes).astype(np.int64)
        return bounds

    @cached_property
    def bound_nbytes(self) -> int:
        """The quick bound of the peak of every sequence: the highest of all ops, and what the last op has in memory.

        The last op is one that no other op must follow. While it runs, everything that stays is in memory, and everything that
        it uses.
        """
        problem = self.problem
        stays = sum(problem.nbytes[buffer] for buffer in problem.stays)
        own = [
            problem.workspace[op]
            + sum(problem.nbytes[b] for b in {*problem.uses[op], *problem.makes[op]} if b not in problem.stays)
            for op, after in enumerate(problem.after)
            if not after
        ]
        end = problem.resident_nbytes + stays + min(own, default=0)
        return max(int(self.bounds_nbytes.max(initial=problem.resident_nbytes)), end)


def _chunks(count: int, width: int) -> Iterator[range]:
    size = max(1, _MOST_CELLS // max(width, 1))
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
