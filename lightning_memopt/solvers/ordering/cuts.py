"""The fewest bytes that can be in memory while an op runs, over all sequences, by a minimum cut.

When an op runs, the ops that have run before form a set. This set has all ancestors of the op, none of its descendants, and for
each of its members all ops that must run before that one. A buffer is in memory if its maker has run (or is running), and one
of its users has not. The cheapest such set is a minimum s-t cut: each buffer has a node "all users have run", which requires
all users, and a price that is paid if the maker has run but not all users (Picard, 1976). The largest of these minima over all
ops bounds the peak of every sequence, and is never below the bound of ancestors and descendants (`reach`). The set also gives a
better sequence: first the ops of the set, then the op, then all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from lightning_memopt.solvers.ordering.problem import Problem
from lightning_memopt.solvers.ordering.reach import Flags, Reach

_INFINITE = 1 << 52


@dataclass(frozen=True, eq=False)
class Cut:
    """The cheapest state in which an op runs.

    op: the op.
    first: which ops have run, shape (ops,).
    nbytes: no sequence has fewer bytes in memory while the op runs.
    """

    op: int
    first: Flags
    nbytes: int

    def applied(self, sequence: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ops of a part of a sequence that run before the op, and those after it, each in the order that they had."""
        early = [op for op in sequence if self.first[op]]
        return early, [op for op in sequence if not self.first[op] and op != self.op]


class Cuts:
    """The minimum cuts of a problem, one for each op."""

    def __init__(self, problem: Problem, reach: Reach) -> None:
        self.problem, self.reach = problem, reach
        n = len(problem)
        self._befores = np.array([(op, o) for op, ops in enumerate(problem.before) for o in ops], dtype=np.int64).reshape(-1, 2)
        flat, starts = problem.flat_users
        buffers = np.repeat(np.arange(len(starts)), np.diff([*starts, len(flat)]))
        self._users = np.stack([buffers, flat], axis=1)
        self._starts = starts
        self._makers = np.array(problem.makers, dtype=np.int64)
        self._stays = np.zeros(len(starts), dtype=np.bool_)
        self._stays[list(problem.stays)] = True
        self._source, self._sink = n + len(starts), n + len(starts) + 1

    def at(self, op: int, before: Sequence[int] = (), after: Sequence[int] = ()) -> Cut:
        """The cheapest state in which the op runs, if the ops `before` have run and the ops `after` have not.

        Both are closed: with each op, `before` has all that must run before it, and `after` all that must run after it.
        """
        n = len(self.problem)
        above, below = self.reach.ancestors(op), self.reach.descendants(op)
        if len(before) or len(after):
            above, below = above.copy(), below.copy()
            above[list(before)] = below[list(after)] = True
        running = below.copy()
        running[op] = True
        free = ~(above | running)
        made = np.append(above, True)  # the last one is that of BEFORE
        made[op] = True
        nbytes = self.problem.workspace[op] + self.problem.resident_nbytes
        if not len(self._starts):
            return Cut(op, above, nbytes)
        never = np.logical_or.reduceat(running[self._users[:, 1]], self._starts) | self._stays
        nbytes += int(self.problem.sizes[made[self._makers] & never].sum())
        if not free.any():
            return Cut(op, above, nbytes)
        buffers = np.arange(len(self._starts))
        maker_free = np.append(free, False)[self._makers]
        from_source = made[self._makers] & ~never & np.logical_or.reduceat(free[self._users[:, 1]], self._starts)
        tails = np.where(maker_free, self._makers, self._source)
        heads = np.where(never, self._sink, n + buffers)
        priced = maker_free | from_source
        needs = self._users[(priced & ~never)[self._users[:, 0]] & free[self._users[:, 1]]]
        order = self._befores[free[self._befores[:, 0]] & free[self._befores[:, 1]]]
        tails = np.concatenate([tails[priced], n + needs[:, 0], order[:, 0]])
        heads = np.concatenate([heads[priced], needs[:, 1], order[:, 1]])
        endless = np.full(len(needs) + len(order), _INFINITE, dtype=np.int64)
        capacities = np.concatenate([self.problem.sizes[priced], endless])
        flow = SimpleMaxFlow()
        flow.add_arcs_with_capacity(tails, heads, capacities)
        flow.add_arc_with_capacity(self._source, self._sink, 0)  # makes both nodes exist, even if nothing has a price
        status = flow.solve(self._source, self._sink)
        if status != flow.OPTIMAL:
            raise RuntimeError(f"minimum cut did not solve: {status}")
        side = np.asarray(flow.get_source_side_min_cut(), dtype=np.int64)
        first = above.copy()
        first[side[side < n]] = True
        return Cut(op, first, nbytes + int(flow.optimal_flow()))
