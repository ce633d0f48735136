"""Which bytes of a pool are free: best fit, lowest address first; free neighbours are joined at once."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from lightning_memopt.units import round_up


class Piece(weakref.ref[Any]):
    """The bytes of one object in a space. A callback runs when the object is freed.

    An interrupt may come after any call. So a space changes its counts and marks the piece without a call in between: bytes are
    never taken without a piece that says so, and never given back twice.

    nbytes: number of bytes.
    offset: where they begin; None before they are taken.
    given: whether they are free again.
    """

    __slots__ = ("given", "nbytes", "offset")

    def __new__(cls, owner: Any, dies: Callable[[Any], None], nbytes: int) -> Piece:
        return super().__new__(cls, owner, dies)

    def __init__(self, owner: Any, dies: Callable[[Any], None], nbytes: int) -> None:
        super().__init__(owner, dies)  # type: ignore[call-arg]  # which weakref.ref takes
        hash(self)  # the owner's hash, which must be computed while it is alive
        self.nbytes = nbytes
        self.offset: int | None = None
        self.given = False


class Space:
    """Pieces of `0 .. capacity_nbytes`, whose offsets and sizes are multiples of `align`. Not thread-safe: callers lock.

    align: alignment in bytes.
    capacity_nbytes: rounded down to a multiple of `align`.
    used_nbytes: bytes in use, with every piece rounded up to a multiple of `align`.
    """

    def __init__(self, capacity_nbytes: int, align: int = 512) -> None:
        if capacity_nbytes < 0 or align < 1:
            raise ValueError(f"a space of {capacity_nbytes} bytes, aligned to {align}: give at least 0 and 1")
        self.align = align
        self.capacity_nbytes = capacity_nbytes // align * align
        self.used_nbytes = 0
        self._free = [(0, self.capacity_nbytes)] if self.capacity_nbytes else []
        """(offset, size) of every free piece, by offset. No two pieces touch."""

    @property
    def largest_nbytes(self) -> int:
        """Maximum number of bytes that can be taken at once."""
        return max((size for _, size in self._free), default=0)

    def rounded(self, nbytes: int) -> int:
        """The size of the piece that `nbytes` take."""
        return round_up(nbytes, self.align)

    def take(self, nbytes: int, piece: Piece | None = None) -> int | None:
        """The offset of a piece of `nbytes` (at least 1), in the smallest free piece that is large enough; None if none is."""
        size = self.rounded(nbytes)
        if size <= 0:
            raise ValueError(f"{nbytes} bytes are not a piece")
        smallest = min(((free_size, offset) for offset, free_size in self._free if free_size >= size), default=None)
        if smallest is None:
            return None
        free_size, offset = smallest
        i = bisect_left(self._free, (offset,))
        self._free[i : i + 1] = [(offset + size, free_size - size)] if free_size > size else []
        self.used_nbytes += size
        if piece is not None:
            piece.offset = offset
        return offset

    def give(self, offset: int, nbytes: int, piece: Piece | None = None) -> None:
        """Give back the piece at `offset` that `take(nbytes)` returned. Raises ValueError for bytes that are free already."""
        size = self.rounded(nbytes)
        end = offset + size
        i = bisect_left(self._free, (offset,))
        before = self._free[i - 1] if i else (0, 0)
        after = self._free[i] if i < len(self._free) else (self.capacity_nbytes, 0)
        if offset < 0 or size <= 0 or sum(before) > offset or end > after[0]:
            raise ValueError(f"bytes {offset}..{end} were not taken")
        first = i - 1 if i and sum(before) == offset else i
        last = i + 1 if after[1] and end == after[0] else i
        begin = before[0] if first < i else offset
        finish = sum(after) if last > i else end
        self._free[first:last] = [(begin, finish - begin)]
        self.used_nbytes -= size
        if piece is not None:
            piece.given = True
