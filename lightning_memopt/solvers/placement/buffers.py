"""Buffers that need addresses: lifetimes, sizes, the lower bound, independent parts; and the buffers of a recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_memopt.errors import PlacementError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.allocator import requests
from lightning_memopt.units import round_up

Ints = npt.NDArray[np.int64]

MOST_NBYTES = 1 << 62
"""Times, sizes and the sum of all sizes are below this, so that the sum of any two of them fits into 64 bits."""


class Buffer(NamedTuple):
    """One interval of time that needs bytes at consecutive addresses.

    id: its name.
    lower: the time at which it is allocated.
    upper: the time at which it is free again: a buffer that is allocated at this time may share its bytes.
    size: bytes.
    """

    id: str
    lower: int
    upper: int
    size: int


@dataclass(frozen=True, eq=False)
class Problem:
    """Buffers as arrays of shape (n,), in the order in which they were given.

    lower, upper: half-open lifetimes.
    size: bytes, all positive.
    """

    lower: Ints
    upper: Ints
    size: Ints

    @classmethod
    def of(cls, buffers: Sequence[Buffer], alignment: int = 1) -> Problem:
        """The problem of these buffers, with sizes rounded up to multiples of `alignment` bytes.

        Raises PlacementError if a lifetime is empty, a size is not positive, or a number needs more than 62 bits.
        """
        total = 0
        for buffer in buffers:
            if buffer.upper <= buffer.lower:
                raise PlacementError(
                    f"buffer {buffer.id}: its upper {buffer.upper} is not above its lower {buffer.lower}; give one that is"
                )
            if buffer.size <= 0:
                raise PlacementError(f"buffer {buffer.id}: its size {buffer.size} is not positive; leave it out")
            total += round_up(buffer.size, alignment)
            if max(total, abs(buffer.lower), abs(buffer.upper)) >= MOST_NBYTES:
                raise PlacementError(f"buffer {buffer.id}: times, and sizes together, are too large; give numbers below 2^62")
        columns = [(b.lower, b.upper, round_up(b.size, alignment)) for b in buffers]
        return cls(*np.array(columns, dtype=np.int64).reshape(-1, 3).T.copy())

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def times(self) -> Ints:
        """The times at which a buffer is allocated or freed, ascending. Section `k` is from `times[k]` to `times[k + 1]`."""
        return np.unique(np.concatenate([self.lower, self.upper]))

    @cached_property
    def first(self) -> Ints:
        """The first section of every buffer."""
        return np.searchsorted(self.times, self.lower)

    @cached_property
    def last(self) -> Ints:
        """The section after the last one of every buffer."""
        return np.searchsorted(self.times, self.upper)

    @cached_property
    def load_nbytes(self) -> Ints:
        """The live bytes in each section."""
        steps = np.zeros(max(len(self.times), 1), dtype=np.int64)
        np.add.at(steps, self.first, self.size)
        np.subtract.at(steps, self.last, self.size)
        return np.cumsum(steps)[:-1]

    @cached_property
    def bound_nbytes(self) -> int:
        """The most bytes that are live at one time (max-live). No placement can be lower."""
        return int(self.load_nbytes.max(initial=0))

    def part(self, indices: Ints) -> Problem:
        """The problem of some of the buffers."""
        return Problem(self.lower[indices], self.upper[indices], self.size[indices])

    def components(self) -> list[Ints]:
        """Indices of the buffers, grouped in the order of time so that no buffer is live between two groups. Each group can be
        placed separately.
        """
        if not len(self):
            return []
        order = np.argsort(self.lower, kind="stable")
        ends = np.maximum.accumulate(self.upper[order])
        cuts = np.flatnonzero(self.lower[order][1:] >= ends[:-1]) + 1
        return np.split(order, cuts)

    def height_nbytes(self, offsets: Ints) -> int:
        """The bytes that a placement needs: the highest end of a buffer."""
        return int((offsets + self.size).max(initial=0))


def buffers_of(graph: Graph, lives: Iterable[Life] | None = None) -> list[Buffer]:
    """One buffer for each allocation of the step that has bytes, in order; times are numbers of requests to the allocator.

    lives: of a plan; None for the unmodified step. Tensors from before the step that stay are not among the buffers.
    """
    actions = requests(graph, lives)
    began: dict[object, tuple[int, int]] = {}
    buffers = []
    for moment, (name, nbytes) in enumerate(actions):
        if nbytes >= 0:
            began[name] = (moment, nbytes)
        else:
            lower, size = began.pop(name)
            buffers.append((lower, moment, size))
    buffers += [(lower, len(actions), size) for lower, size in began.values()]
    return [Buffer(str(lower), lower, upper, size) for lower, upper, size in sorted(buffers) if size]
