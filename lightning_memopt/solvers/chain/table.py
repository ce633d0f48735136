"""The dynamic programme over (s, t, bytes): least extra seconds for the backward of stages t..s of a chain.

In: a chain, a budget, a bucket. Out: a `ChainTable`, from which the cost and a schedule of every level up to the budget
are read. Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), with several options per
stage. The result is exact, up to the bucket size, among memory-persistent schedules (a boundary that was kept stays until its
backward).

Column m of the table stands for m * bucket + rest bytes, rest = budget mod bucket, so that the last column is the
budget itself. Sizes are rounded up to buckets, so a schedule that was found also fits in bytes.

What makes it fast (section 'Speed' of docs/formulation.md):
* stored is E(s,t) = D(s,t) + S[s] (S[s]: seconds of the sweeps before s) unless t is last; then the Checkpoint branch
  is min over s' of E(s',t) + E(s,s'-1), less S[s]: one addition and one minimum per entry, vectors over s' and memory;
* positions s' that cannot win in a block of columns, as bounds show, are left out, and a row ends where more memory does not
  help; the remaining blocks, one per position, are gathered and reduced in a few vector operations.

No decision is stored; `tree` finds the best branch again, one column at a time. Tables above `FLOAT64_NBYTES` are
float32: the seconds reported are then added up again from the tree in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_memopt.errors import ChainError, InfeasibleError
from lightning_memopt.solvers.chain.bounds import SweepNeeds, base_nbytes, option_need_nbytes
from lightning_memopt.solvers.chain.cells import PER_BLOCK, Cells, Floats, Ints
from lightning_memopt.solvers.chain.model import Chain, Checkpoint, CheckpointTree, Hold, Rebuild
from lightning_memopt.solvers.chain.simulate import simulate
from lightning_memopt.units import ceil_div

FLOAT64_NBYTES = 128 << 20
_BLOCK = 64  # number of columns that are bounded, and then computed or left out, together
_WINDOWS = 2048  # number of blocks of columns computed at once, so that they stay in a core's L2
_UNBOUNDED = 1024  # up to this number of blocks, over all positions, bounds cost more than they save
_ROWS = 4  # number of neighbouring s filled together, because they read the same rows while those are in cache


@dataclass(frozen=True, slots=True)
class Grid:
    """Bytes <-> columns: column m is m * bucket + rest bytes."""

    bucket_nbytes: int
    rest_nbytes: int
    columns: int

    @classmethod
    def of(cls, budget_nbytes: int, bucket_nbytes: int) -> Grid:
        whole, rest = divmod(budget_nbytes, bucket_nbytes)
        return cls(bucket_nbytes, rest, whole + 1)

    def shift(self, nbytes: int) -> int:
        """How many columns to go down if `nbytes` are taken away, rounded up."""
        return ceil_div(nbytes, self.bucket_nbytes)

    def column(self, nbytes: int) -> int:
        """The first column that has at least `nbytes`."""
        return max(0, -((self.rest_nbytes - nbytes) // self.bucket_nbytes))

    def floor(self, level_nbytes: int) -> int:
        """The last column that has at most `level_nbytes`; -1 if there is none."""
        return min(self.columns - 1, (level_nbytes - self.rest_nbytes) // self.bucket_nbytes)

    def nbytes(self, column: int) -> int:
        return column * self.bucket_nbytes + self.rest_nbytes


class ChainTable:
    """The least extra seconds of a chain for every level of memory up to the budget, and the schedules that reach them."""

    def __init__(self, chain: Chain, budget_nbytes: int, bucket_nbytes: int) -> None:
        """Solve. `budget_nbytes` >= 0 counts everything including x_0; `bucket_nbytes` >= 1."""
        if budget_nbytes < 0 or bucket_nbytes < 1:
            raise ChainError(
                f"budget {budget_nbytes} bytes and bucket {bucket_nbytes} bytes: give a budget of at least 0 and a "
                "bucket of at least 1"
            )
        self.chain = chain
        self.grid = Grid.of(budget_nbytes, bucket_nbytes)
        length = len(chain.stages)
        entries = length * (length + 1) // 2
        self.dtype: np.dtype[Any] = np.dtype(np.float64 if entries * self.grid.columns * 8 <= FLOAT64_NBYTES else np.float32)
        self._sweeps = np.concatenate([[0.0], np.cumsum([s.sweep_seconds for s in chain.stages])]).tolist()
        self._shift = [self.grid.shift(s.input_nbytes) for s in chain.stages]
        self._needs = [SweepNeeds.of(chain, s) for s in range(length)]
        self._ways = [self._options(s) for s in range(length)]
        self._cells = Cells(length, self.grid.columns, _BLOCK, self.dtype)
        self._scratch: Floats = np.empty((2, max(_WINDOWS, _UNBOUNDED, self._cells.blocks), _BLOCK), dtype=self.dtype)
        self._bounds: Floats = np.empty((2, length * self._cells.blocks), dtype=self.dtype)
        for top in range(length - 1, -1, -_ROWS):
            rows = range(top, max(-1, top - _ROWS), -1)
            for t in range(rows[-1], length):
                for s in rows:
                    if s <= t:
                        self._fill(s, t)
        del self._scratch, self._bounds

    # ---- reading ----

    def seconds(self, level_nbytes: int) -> float:
        """The least extra seconds within `level_nbytes` (at most the budget); infinity if no schedule fits."""
        column = self._column_of(level_nbytes)
        seconds = self._cells.value(0, -1, column) if column >= 0 else float("inf")
        if self.dtype == np.float64 or seconds == float("inf"):
            return seconds
        return simulate(self.chain, self.tree(level_nbytes))[0]

    def levels(self) -> tuple[int, ...]:
        """The levels in bytes at which the least cost changes, ascending. The first is the smallest feasible one."""
        row = self._cells.row(0, -1)
        tolerance = 64 * float(np.finfo(self.dtype).eps) * (self._sweeps[-1] + 1e-300)
        out: list[int] = []
        cost = np.inf
        previous = np.concatenate([[np.inf], row[:-1]])
        for column in np.flatnonzero(row < previous):
            if cost == np.inf or row[column] < cost - tolerance:
                out.append(self.grid.nbytes(int(column)))
                cost = float(row[column])
        return tuple(out)

    def tree(self, level_nbytes: int) -> CheckpointTree:
        """A schedule with the least extra seconds within `level_nbytes`. Raises InfeasibleError if none fits."""
        column = self._column_of(level_nbytes)
        if column < 0 or not np.isfinite(self._cells.value(0, -1, column)):
            raise InfeasibleError(
                f"no schedule of this chain fits {level_nbytes} bytes in buckets of {self.grid.bucket_nbytes} bytes; "
                "raise the budget, or use finer buckets (minimum_budget names the smallest budget)",
                budget_nbytes=level_nbytes,
            )
        built: list[CheckpointTree] = []
        todo: list[tuple[str, int, int, int]] = [("solve", 0, len(self.chain.stages) - 1, column)]
        while todo:
            action, s, t, m = todo.pop()
            if action == "checkpoint":
                left, right = built.pop(), built.pop()
                built.append(Checkpoint(s, t, right, left))
            elif action == "hold":
                built.append(Hold(s, t, built.pop()))
            elif s == t:
                built.append(self._best_single(s, m))
            else:
                at, option = self._best_branch(s, t, m)
                if option is None:
                    todo += [("checkpoint", s, at, 0), ("solve", s, at - 1, m), ("solve", at, t, m - self._shift[s])]
                else:
                    todo += [("hold", s, option, 0), ("solve", s + 1, t, m - self._ways[s][option][0])]
        return built.pop()

    def _column_of(self, level_nbytes: int) -> int:
        if level_nbytes > self.grid.nbytes(self.grid.columns - 1):
            raise ChainError(
                f"level {level_nbytes} bytes is above the budget {self.grid.nbytes(self.grid.columns - 1)} bytes that "
                "the table was solved for: solve again with a larger budget"
            )
        return self.grid.floor(level_nbytes)

    # ---- the branches of one state ----

    def _fold(self, s: int, t: int) -> float:
        """The difference between the stored E(s, t) and D(s, t)."""
        return 0.0 if t == len(self.chain.stages) - 1 else self._sweeps[s]

    def _singles(self, s: int) -> list[tuple[int, float, Hold | Rebuild]]:
        """(first column, D, node) for every way to do the backward of stage s alone."""
        stage = self.chain.stages[s]
        last = s == len(self.chain.stages) - 1
        ways: list[tuple[int, float, Hold | Rebuild]] = []
        if not last:
            first = self.grid.column(stage.input_nbytes + stage.rebuild_peak_nbytes)
            ways.append((first, stage.rebuild_seconds, Rebuild(s)))
        for index, option in enumerate(stage.options):
            first = self.grid.column(option_need_nbytes(self.chain, s, s, index))
            ways.append((first, option.rebuild_seconds + (0.0 if last else option.rerun_seconds), Hold(s, index, None)))
        return ways

    def _options(self, s: int) -> list[tuple[int, int, int, float, float]]:
        """Per option: columns taken, bytes for its forward without the base, bytes for its backward, added cost in a rerun,
        added cost in the user's own forward.

        The cost is what holding adds to the entry of (s+1, t): D(s,t) - D(s+1,t) in the user's own forward, and in a rerun
        E(s,t) - E(s+1,t) = D(s,t) - D(s+1,t) - sweep_seconds of s.
        """
        stage = self.chain.stages[s]
        x_s = stage.input_nbytes
        return [
            (
                self.grid.shift(x_s + o.held_nbytes),
                x_s + o.forward_peak_nbytes,
                x_s + o.backward_peak_nbytes,
                o.rebuild_seconds + o.rerun_seconds - stage.sweep_seconds,
                o.rebuild_seconds,
            )
            for o in stage.options
        ]

    def _holds(self, s: int, t: int) -> list[tuple[int, int, float]]:
        """Per option, s < t: (columns it takes, first column, what it adds to the entry of (s+1, t))."""
        own = t == len(self.chain.stages) - 1
        base = base_nbytes(self.chain, s, t)
        column = self.grid.column
        return [
            (taken, max(taken, column(max(base + forward, backward))), own_cost if own else rerun_cost)
            for taken, forward, backward, rerun_cost, own_cost in self._ways[s]
        ]

    def _best_single(self, s: int, m: int) -> Hold | Rebuild:
        return min((way for way in self._singles(s) if way[0] <= m), key=lambda way: way[1])[2]

    def _best_branch(self, s: int, t: int, m: int) -> tuple[int, int | None]:
        """The best branch of state (s, t) at column m: (checkpoint position, None) or (0, option)."""
        best = np.inf
        choice: tuple[int, int | None] = (0, None)
        for option, (taken, first, extra) in enumerate(self._holds(s, t)):
            if m >= first and (cost := self._cells.value(s + 1, t, m - taken) + extra) < best:
                best, choice = cost, (0, option)
        needs = self._needs[s].upto(self.chain, s, t)
        rows = int(np.searchsorted(needs, self.grid.nbytes(m), side="right"))
        if rows and m >= self._shift[s]:
            costs = self._cells.values(slice(s + 1, s + 1 + rows), t, m - self._shift[s])
            costs = costs + self._cells.values(s, slice(s, s + rows), m)
            at = int(costs.argmin())
            if float(costs[at]) - self._sweeps[s] < best:
                return s + 1 + at, None
        return choice

    # ---- filling ----

    def _fill(self, s: int, t: int) -> None:
        """Compute the entry (s, t) for every column, up to the one from which no branch improves, and store it."""
        cells, columns = self._cells, self.grid.columns
        if s == t:
            ways = self._singles(s)
            row = np.full(min(columns, 1 + max(first for first, _, _ in ways)), np.inf, dtype=self.dtype)
            for first, cost, _ in ways:
                np.minimum(row[first:], cost + self._fold(s, t), out=row[first:])
            cells.put(s, t, row)
            return
        holds = self._holds(s, t)
        firsts = self._firsts(s, t)
        full = cells.constant_from
        end = max(int(full[s + 1 : t + 1, t].max()) + self._shift[s], int(full[s, s:t].max()), int(firsts[-1]))
        for taken, first, _ in holds:
            end = max(end, first, int(full[s + 1, t]) + taken)
        end = min(columns, end + 1)
        blocks = np.full((ceil_div(end, _BLOCK), _BLOCK), np.inf, dtype=self.dtype)
        row = blocks.reshape(-1)[:end]
        below = cells.row(s + 1, t)
        for taken, first, extra in holds:
            if first < end:
                np.minimum(row[first:], below[first - taken : end - taken] + self.dtype.type(extra), out=row[first:])
        firsts = firsts[: int(firsts.searchsorted(end))]
        if firsts.size:
            self._checkpoints(s, t, firsts, blocks)
        cells.put(s, t, row)

    def _firsts(self, s: int, t: int) -> Ints:
        """The first column of the checkpoint at each of s+1..t. It never falls."""
        need = self._needs[s].upto(self.chain, s, t)
        return np.maximum(self._shift[s], -((self.grid.rest_nbytes - need) // self.grid.bucket_nbytes))

    def _checkpoints(self, s: int, t: int, firsts: Ints, blocks: Floats) -> None:
        """Lower `blocks` to the minimum, over all positions with a first column, of right + left - S[s], where they fit."""
        begin, stop = int(firsts[0]) // _BLOCK, len(blocks)
        out, count = blocks[begin:], stop - begin
        fold = self.dtype.type(self._sweeps[s])
        if firsts.size * count <= _UNBOUNDED:
            which, at = np.divmod(np.arange(firsts.size * count), count)
            cost = self._costs(s, t, firsts, which, begin + at).reshape(-1, count, _BLOCK)
            np.minimum(out, np.minimum.reduce(cost, axis=0) - fold, out=out)
            return

        at_start, at_end = self._block_bounds(s, t, firsts, begin, count)
        worst = np.minimum(at_start.min(axis=0), out[:, 0] + fold)
        block, position = np.divmod(np.flatnonzero((at_end < worst).T), firsts.size)
        # The positions of a block are reduced to one row of costs. Blocks with about equally many positions are reduced
        # together; a block with fewer is filled up by repeating its last position.
        counts = np.bincount(block, minlength=count)
        by_count = np.argsort(-counts, kind="stable")
        counts = counts[by_count]
        first, last = np.searchsorted(block, by_count), counts - 1
        best = np.repeat(worst[by_count], _BLOCK).reshape(-1, _BLOCK)
        for groups in _batches(counts.tolist()):
            picks = [first[:m] + np.minimum(np.arange(k, end)[:, None], last[:m]) for m, k, end in groups]
            take = np.concatenate([pick.ravel() for pick in picks])
            cost = self._costs(s, t, firsts, position[take], begin + block[take])
            done = 0
            for m, k, end in groups:
                size = m * (end - k)
                least = np.minimum.reduce(cost[done : done + size].reshape(end - k, m, _BLOCK), axis=0)
                np.minimum(best[:m], least, out=best[:m])
                done += size
        best -= fold
        out[by_count] = np.minimum(out[by_count], best)

    def _block_bounds(self, s: int, t: int, firsts: Ints, begin: int, count: int) -> tuple[Floats, Floats]:
        """For `count` blocks from `begin`: an upper and a lower bound on each position's cost in the whole block.

        Both have shape (positions, count). Costs never rise with memory, so within a block they are at most the cost at the
        block's start, and at least the cost at the next block's start. A position whose lower bound is not below the upper
        bound of another one need not be computed there; the upper bound itself is used instead.
        """
        right = self._cells.samples[s + 1 : s + 1 + firsts.size, t]
        left = self._cells.samples[s, s : s + firsts.size, 0, begin + 1 :]
        step = _BLOCK // PER_BLOCK
        lag, part = divmod(-self._shift[s] // step, PER_BLOCK)  # the sample at or below (a block's start - the shift)
        below = right[:, part, begin + lag + 1 : begin + lag + 1 + count]
        lag, part = divmod(-(self._shift[s] // step), PER_BLOCK)  # the sample at or above (the next block's start - the shift)
        above = right[:, part, begin + lag + 2 : begin + lag + 2 + count]
        at_start, at_end = self._bounds[:, : firsts.size * count].reshape(2, -1, count)
        np.add(below, left[:, :count], out=at_start)
        np.add(above, left[:, 1 : count + 1], out=at_end)
        if (cut := ceil_div(int(firsts[-1]), _BLOCK) - begin) > 0:  # blocks in which some position does not fit yet
            starts = np.arange(begin, begin + min(cut, count)) * _BLOCK
            at_start[:, :cut][firsts[:, None] > starts] = np.inf
            at_end[:, :cut][firsts[:, None] >= starts + _BLOCK] = np.inf
        return at_start, at_end

    def _costs(self, s: int, t: int, firsts: Ints, which: Ints, at: Ints) -> Floats:
        """right + left of position `which[i]` in the block `at[i]`, shape (len(which), _BLOCK). It is a view that the next call
        reuses.
        """
        cost, other = self._scratch[:, : which.size]
        self._cells.windows(slice(s + 1, t + 1), t, self._shift[s], which, at, cost)
        self._cells.windows(s, slice(s, t), 0, which, at, other)
        cost += other
        missing = firsts[which] - at * _BLOCK
        if (partly := (missing > 0).nonzero()[0]).size:
            cost[partly] = np.where(np.arange(_BLOCK) < missing[partly, None], self.dtype.type(np.inf), cost[partly])
        return cost


def _batches(counts: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Batches of groups (m, k, end), which stand for the positions k..end-1 of the first m blocks. A batch has at most
    `_WINDOWS` of these.

    `counts`: the number of positions per block, falling. In each group, at least two thirds of the blocks have all positions of
        the range.
    """
    batch: list[tuple[int, int, int]] = []
    m, k, room = len(counts), 0, _WINDOWS
    while True:
        while m and counts[m - 1] <= k:
            m -= 1
        if not m:
            break
        if batch and room < m:
            yield batch
            batch, room = [], _WINDOWS
        end = min(counts[2 * m // 3], k + max(1, room // m))
        batch.append((m, k, end))
        room -= m * (end - k)
        k = end
    if batch:
        yield batch
