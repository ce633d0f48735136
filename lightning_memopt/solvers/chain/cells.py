"""The storage of the chain's table: for each state (s, t) with s <= t, one packed row of cells over the columns of memory.

Rows never rise with memory. So a row is stored only up to the column from which it is constant, which saves memory and the time
to touch memory for the first time. Rows are stored one after the other in the order of `put`, in whole blocks of columns.
`samples` has copies of a few cells of every block, so that bounds over blocks need to read little.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_memopt.units import ceil_div

PER_BLOCK = 4  # samples per block

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]


class Cells:
    """The rows of a triangle of states. They never rise along the columns, and are infinite where nothing fits."""

    def __init__(self, length: int, columns: int, block: int, dtype: np.dtype[Any]) -> None:
        self.columns = columns
        self.block = block
        self.blocks = ceil_div(columns, block)
        self.constant_from = np.zeros((length, length), dtype=np.int64)
        """The column from which each row is constant."""
        self.samples: Floats = np.empty((length, length, PER_BLOCK, self.blocks + 2), dtype=dtype)
        """[s, t, i, 1 + j]: the cell at column j * block + i * block / PER_BLOCK; infinity for columns below 0, and the row's
        last value beyond its end.
        """
        step = block // PER_BLOCK
        sampled = np.arange(PER_BLOCK)[:, None] * step + np.arange(-1, self.blocks + 1) * block
        self._sampled = np.minimum(sampled, columns - 1)
        self._begin = np.zeros((length, length), dtype=np.int64)  # in blocks
        self._width = np.zeros((length, length), dtype=np.int64)  # blocks before the constant ones
        # There is room for rows that never become constant, but only pages that are written take memory.
        room = 1 + length * (length + 1) // 2 * (self.blocks + 2)
        self._cells: Floats = np.empty(room * block, dtype=dtype)
        self._cells[:block] = np.inf
        self._used = 1

    def put(self, s: int, t: int, row: Floats) -> None:
        """Store the columns `0..len(row)-1` of a state. Later columns have the value of the last of these."""
        least = row[-1]
        constant_from = bisect_left(range(len(row) - 1), True, key=lambda m: bool(row[m] <= least))
        width = ceil_div(constant_from, self.block)
        self.constant_from[s, t], self._begin[s, t], self._width[s, t] = constant_from, self._used, width
        begin = self._used * self.block
        self._used += width + 2  # two constant blocks, because a window may begin within the first one
        end = begin + constant_from
        self._cells[begin:end] = row[:constant_from]
        self._cells[end : self._used * self.block] = least
        self.samples[s, t] = self._cells[begin + np.minimum(self._sampled, constant_from)]
        self.samples[s, t, :, 0] = np.inf

    def value(self, s: int, t: int, column: int) -> float:
        return float(self._cells[self._begin[s, t] * self.block + min(column, int(self.constant_from[s, t]))])

    def values(self, s: slice | int, t: slice | int, column: int) -> Floats:
        """One column of several rows, shape (number of rows,)."""
        return self._cells[self._begin[s, t] * self.block + np.minimum(column, self.constant_from[s, t])]

    def row(self, s: int, t: int) -> Floats:
        """A copy of all columns of a row, shape (columns,)."""
        width = int(self.constant_from[s, t])
        begin = int(self._begin[s, t]) * self.block
        out = np.empty(self.columns, dtype=self._cells.dtype)
        out[:width] = self._cells[begin : begin + width]
        out[width:] = self._cells[begin + width]
        return out

    def windows(self, s: slice | int, t: slice | int, shift: int, which: Ints, at: Ints, out: Floats) -> None:
        """out[i] is one block of columns, from `at[i] * block - shift` on, of row `which[i]` of the selected rows.

        Columns may be as low as `1 - block`; cells before column 0 have no meaning.
        """
        lag = ceil_div(shift, self.block)
        rows = np.minimum(at - lag, self._width[s, t][which])
        rows += self._begin[s, t][which]
        offset = lag * self.block - shift
        cells = self._cells[offset : offset + (self._used - 1) * self.block].reshape(-1, self.block)
        np.take(cells, rows, axis=0, out=out, mode="clip")
