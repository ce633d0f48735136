"""The dynamic programme over (s, t, bytes): least extra seconds for the backward of stages t..s of a chain.

In: a chain, a budget, a bucket. Out: a `ChainTable`, from which the cost and a schedule of every level up to the budget
are read. Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), with several options per
stage. Exact, within the bucket, among memory-persistent schedules (a boundary once kept stays until its backward).

Column m of the table stands for m * bucket + rest bytes, rest = budget mod bucket, so that the last column is the
budget itself. Sizes are rounded up to buckets: a schedule found fits in bytes.

Three things make it fast (section 'Speed' of docs/formulation.md):
* stored is E(s,t) = D(s,t) + S[s] (S[s]: seconds of the sweeps before s) unless t is last; then the Checkpoint branch
  is min over s' of E(s',t) + E(s,s'-1), less S[s]: one addition and one minimum per entry, vectors over s' and memory;
* positions s' that cannot win in a block of columns are left out, and columns where more memory is no help copied;
* rows of different s run on two threads, each waiting for the rows below to be ahead of it (numpy drops the GIL).

No decision is stored; `schedule` finds the best branch again, one column at a time. Tables above `FLOAT64_NBYTES` are
float32: the seconds reported are then added up again from the schedule in float64.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_memopt.errors import ChainError, InfeasibleError
from lightning_memopt.solvers.chain_bounds import SweepNeeds, base_nbytes, option_need_nbytes
from lightning_memopt.solvers.chain_model import Chain, Checkpoint, Hold, Rebuild, Schedule
from lightning_memopt.solvers.chain_simulate import simulate

FLOAT64_NBYTES = 256 << 20
_BLOCK = 512  # columns that are bounded, and kept or left out, together
_BLOCK_NBYTES = 384 << 10  # temporaries of one vector operation: they stay in a core's L2
_ROWS_PER_TASK = 4  # neighbouring s share the rows they read while those are in cache
_THREADS = 2
_THREADED_NBYTES = 4 << 10  # rows shorter than this are not worth a second thread: it would wait for the lock

Floats = npt.NDArray[np.floating]


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
        """Columns to go down when `nbytes` are taken away; rounded up."""
        return -(-nbytes // self.bucket_nbytes)

    def column(self, nbytes: int) -> int:
        """First column that has at least `nbytes`."""
        return max(0, -((self.rest_nbytes - nbytes) // self.bucket_nbytes))

    def floor(self, level_nbytes: int) -> int:
        """Last column that has at most `level_nbytes`; -1 if none."""
        return min(self.columns - 1, (level_nbytes - self.rest_nbytes) // self.bucket_nbytes)

    def nbytes(self, column: int) -> int:
        return column * self.bucket_nbytes + self.rest_nbytes


def _steps(needs: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(number of checkpoint positions, bytes that they need), one entry per distinct number of bytes."""
    if not needs.size:
        return []
    ends = [*(np.flatnonzero(needs[1:] > needs[:-1]) + 1).tolist(), needs.size]
    return [(end, int(needs[end - 1])) for end in ends]


class ChainTable:
    """Least extra seconds of a chain for every level up to the budget, and the schedules that reach them."""

    def __init__(self, chain: Chain, budget_nbytes: int, bucket_nbytes: int) -> None:
        """Solve; `budget_nbytes` >= 0 counts everything including x_0, `bucket_nbytes` >= 1."""
        if budget_nbytes < 0 or bucket_nbytes < 1:
            raise ChainError(
                f"budget {budget_nbytes} bytes and bucket {bucket_nbytes} bytes: give a budget of at least 0 and a "
                "bucket of at least 1"
            )
        self.chain = chain
        self.grid = Grid.of(budget_nbytes, bucket_nbytes)
        length = len(chain.stages)
        cells = length * length * self.grid.columns
        self.dtype: np.dtype[Any] = np.dtype(np.float64 if cells * 8 <= FLOAT64_NBYTES else np.float32)
        self._sweeps = np.concatenate([[0.0], np.cumsum([s.sweep_seconds for s in chain.stages])]).tolist()
        self._shift = [self.grid.shift(s.input_nbytes) for s in chain.stages]
        self._needs = [SweepNeeds.of(chain, s) for s in range(length)]
        self._steps = [(_steps(needs.replay), _steps(needs.own)) for needs in self._needs]
        self._ways = [self._options(s) for s in range(length)]
        # Only the upper triangle is ever touched, so only it becomes resident.
        self._table: Floats = np.empty((length, length, self.grid.columns), dtype=self.dtype)
        self._full = np.zeros((length, length), dtype=np.int64)  # column from which the row is constant
        self._fill_all()

    # ---- reading ----

    def seconds(self, level_nbytes: int) -> float:
        """Least extra seconds within `level_nbytes` (at most the budget); infinity if no schedule fits."""
        column = self._column_of(level_nbytes)
        if column < 0 or not np.isfinite(self._table[0, -1, column]):
            return float("inf")
        if self.dtype == np.float64:
            return float(self._table[0, -1, column])
        return simulate(self.chain, self.schedule(level_nbytes))[0]

    def levels(self) -> tuple[int, ...]:
        """The levels in bytes, ascending, at which the least cost changes; the first is the smallest feasible."""
        row = self._table[0, -1]
        tolerance = 64 * float(np.finfo(self.dtype).eps) * (self._sweeps[-1] + 1e-300)
        out: list[int] = []
        cost = np.inf
        previous = np.concatenate([[np.inf], row[:-1]])
        for column in np.flatnonzero(row < previous):
            if cost == np.inf or row[column] < cost - tolerance:
                out.append(self.grid.nbytes(int(column)))
                cost = float(row[column])
        return tuple(out)

    def schedule(self, level_nbytes: int) -> Schedule:
        """A schedule of least extra seconds within `level_nbytes`; raises InfeasibleError if none fits."""
        column = self._column_of(level_nbytes)
        if column < 0 or not np.isfinite(self._table[0, -1, column]):
            raise InfeasibleError(
                f"no schedule of this chain fits {level_nbytes} bytes in buckets of {self.grid.bucket_nbytes} bytes; "
                "raise the budget, or use finer buckets (minimum_budget names the smallest budget)",
                budget_nbytes=level_nbytes,
            )
        built: list[Schedule] = []
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
        """What the table adds to D(s, t)."""
        return 0.0 if t == len(self.chain.stages) - 1 else self._sweeps[s]

    def _singles(self, s: int) -> list[tuple[int, float, Hold | Rebuild]]:
        """(first column, D, node) of every way to do the backward of stage s alone."""
        stage = self.chain.stages[s]
        last = s == len(self.chain.stages) - 1
        ways: list[tuple[int, float, Hold | Rebuild]] = []
        if not last:
            first = self.grid.column(stage.input_nbytes + stage.rebuild_peak_nbytes)
            ways.append((first, stage.rebuild_seconds, Rebuild(s)))
        for index, option in enumerate(stage.options):
            first = self.grid.column(option_need_nbytes(self.chain, s, s, index))
            ways.append((first, option.replay_seconds + (0.0 if last else option.rerun_seconds), Hold(s, index, None)))
        return ways

    def _options(self, s: int) -> list[tuple[int, int, int, float, float]]:
        """Per option: columns taken, bytes for its forward less the base, for its backward, added cost replayed, own.

        The cost is what holding adds to the entry of (s+1, t): D(s,t) - D(s+1,t) in the user's own pass, and in a
        replay E(s,t) - E(s+1,t) = D(s,t) - D(s+1,t) - sweep_seconds of s.
        """
        stage = self.chain.stages[s]
        x_s = stage.input_nbytes
        return [
            (
                self.grid.shift(x_s + o.held_nbytes),
                x_s + o.forward_peak_nbytes,
                x_s + o.backward_peak_nbytes,
                o.replay_seconds + o.rerun_seconds - stage.sweep_seconds,
                o.replay_seconds,
            )
            for o in stage.options
        ]

    def _holds(self, s: int, t: int) -> list[tuple[int, int, float]]:
        """Per option, s < t: (columns it takes, first column, what it adds to the entry of (s+1, t))."""
        own = t == len(self.chain.stages) - 1
        base = base_nbytes(self.chain, s, t)
        column = self.grid.column
        return [
            (taken, max(taken, column(max(base + forward, backward))), own_cost if own else replay_cost)
            for taken, forward, backward, replay_cost, own_cost in self._ways[s]
        ]

    def _best_single(self, s: int, m: int) -> Hold | Rebuild:
        return min((way for way in self._singles(s) if way[0] <= m), key=lambda way: way[1])[2]

    def _best_branch(self, s: int, t: int, m: int) -> tuple[int, int | None]:
        """(checkpoint position, None) or (0, option): the best branch of state (s, t) at column m."""
        best = np.inf
        choice: tuple[int, int | None] = (0, None)
        for option, (taken, first, extra) in enumerate(self._holds(s, t)):
            if m >= first and (cost := float(self._table[s + 1, t, m - taken]) + extra) < best:
                best, choice = cost, (0, option)
        needs = self._needs[s].upto(self.chain, s, t)
        rows = int(np.searchsorted(needs, self.grid.nbytes(m), side="right"))
        if rows and m >= self._shift[s]:
            costs = self._table[s + 1 : s + 1 + rows, t, m - self._shift[s]] + self._table[s, s : s + rows, m]
            at = int(costs.argmin())
            if float(costs[at]) - self._sweeps[s] < best:
                return s + 1 + at, None
        return choice

    # ---- filling ----

    def _fill_all(self) -> None:
        """Fill rows s = L-1..0. Task i waits, entry by entry, for task i-1 (the rows below it)."""
        length = len(self.chain.stages)
        tops = list(range(length - 1, -1, -_ROWS_PER_TASK))
        ready = [-1] * len(tops)  # last t that the task has filled for all of its rows
        changed = threading.Condition()
        failed = threading.Event()

        def announce(task: int, t: int) -> None:
            with changed:
                ready[task] = t
                changed.notify_all()

        def run(task: int) -> None:
            top = tops[task]
            rows = range(top, max(-1, top - _ROWS_PER_TASK), -1)
            scratch = np.empty(_BLOCK_NBYTES // self.dtype.itemsize, dtype=self.dtype)
            try:
                for t in range(rows[-1], length):
                    if task and t > top and ready[task - 1] < t:
                        with changed:
                            changed.wait_for(lambda: ready[task - 1] >= t or failed.is_set())  # noqa: B023
                    if failed.is_set():
                        return
                    for s in rows:
                        if s <= t:
                            self._fill(s, t, scratch)
                    announce(task, t)
            except BaseException:
                failed.set()
                announce(task, length)
                raise

        threads = _THREADS if self.grid.columns * self.dtype.itemsize >= _THREADED_NBYTES else 1
        with ThreadPoolExecutor(threads) as pool:  # first in, first out: a task never waits for one not started
            for future in [pool.submit(run, task) for task in range(len(tops))]:
                future.result()

    def _fill(self, s: int, t: int, scratch: Floats) -> None:
        """Fill the entry (s, t) for every column."""
        columns = self.grid.columns
        out = self._table[s, t]
        if s == t:
            out.fill(np.inf)
            for first, cost, _ in self._singles(s):
                np.minimum(out[first:], cost + self._fold(s, t), out=out[first:])
            self._full[s, t] = min(columns - 1, max(first for first, _, _ in self._singles(s)))
            return
        holds = self._holds(s, t)
        segments = self._segments(s, t)
        # From column `end` on, no branch gains from more memory.
        taken = self._shift[s]
        end = max(int(self._full[s + 1 : t + 1, t].max()) + taken, int(self._full[s, s:t].max()), segments[-1][0])
        for held, first, _ in holds:
            end = max(end, first, int(self._full[s + 1, t]) + held)
        end = min(columns, end + 1)
        out[:end] = np.inf
        for held, first, extra in holds:
            below = self._table[s + 1, t, first - held : end - held]
            for low in range(first, end, scratch.size):
                part = out[low : min(end, low + scratch.size)]
                candidate = np.add(
                    below[low - first : low - first + part.size], self.dtype.type(extra), out=scratch[: part.size]
                )
                np.minimum(part, candidate, out=part)
        for index, (start, rows) in enumerate(segments):
            stop = min(end, segments[index + 1][0] if index + 1 < len(segments) else end)
            if start < stop:
                self._checkpoints(s, t, start, stop, rows, scratch)
        floor = out[end - 1]
        out[end:] = floor
        self._full[s, t] = bisect_left(range(end - 1), True, key=lambda m: bool(out[m] <= floor))

    def _segments(self, s: int, t: int) -> list[tuple[int, int]]:
        """(first column, number of checkpoint positions that fit): the positions that fit are always a prefix."""
        own = t == len(self.chain.stages) - 1
        base = 0 if own else self.chain.stages[t].backward_base_nbytes
        segments: list[tuple[int, int]] = []
        for end, nbytes in self._steps[s][own]:
            rows = min(end, t - s)
            first = max(self._shift[s], self.grid.column(nbytes + base))
            if segments and segments[-1][0] == first:
                segments.pop()
            segments.append((first, rows))
            if rows == t - s:
                break
        return segments

    def _checkpoints(self, s: int, t: int, start: int, stop: int, rows: int, scratch: Floats) -> None:
        """out[start:stop] = min of itself and, over the first `rows` checkpoint positions, right + left less S[s].

        All of these never rise with memory, so in a block of columns a position is at best its value at the block's
        end and the answer is at worst its value at the block's start: positions that cannot win are left out.
        """
        out = self._table[s, t]
        fold = self.dtype.type(self._sweeps[s])
        right = self._table[s + 1 : s + 1 + rows, t, start - self._shift[s] : stop - self._shift[s]]
        left = self._table[s, s : s + rows, start:stop]
        at_start = right[:, ::_BLOCK] + left[:, ::_BLOCK]
        at_end = np.concatenate([at_start[:, 1:], right[:, -1:] + left[:, -1:]], axis=1)
        worst = np.minimum(at_start.min(axis=0), out[start:stop:_BLOCK] + fold)
        useful = (at_end <= worst) & (at_end < np.inf)
        for block in range(worst.size):
            kept = useful[:, block].nonzero()[0]
            if not kept.size:
                continue
            low, high = block * _BLOCK, min(stop - start, (block + 1) * _BLOCK)
            part = out[start + low : start + high]
            part += fold
            first, after = int(kept[0]), int(kept[-1]) + 1
            if kept.size > 4 and 2 * kept.size > after - first:
                per = scratch.size // (high - low)
                for top in range(first, after, per):
                    bottom = min(after, top + per)
                    space = scratch[: (bottom - top) * (high - low)].reshape(bottom - top, high - low)
                    np.add(right[top:bottom, low:high], left[top:bottom, low:high], out=space)
                    np.minimum(part, space.min(axis=0), out=part)
            else:
                space = scratch[: high - low]
                for row in kept.tolist():
                    np.add(right[row, low:high], left[row, low:high], out=space)
                    np.minimum(part, space, out=part)
            part -= fold
