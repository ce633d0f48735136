"""Find out which segment of CUDA's caching allocator serves a request if several could: the allocator itself is tried.

Among free blocks of the same size, torch 2.11 takes the one at the lowest address, and torch 2.13 the one in the oldest
segment. Torch does not tell how old a segment is. So all free blocks are allocated, then one block of the same size is freed in
each segment, and that size is requested once per segment. The order of the answers is the order of the segments. The device is
not asked for memory, because a free block serves each request.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_SMALL_NBYTES = 1 << 20
"""The largest request that is served from the pool of small blocks. All blocks of the other pool are larger."""

Segment = Mapping[str, Any]


class _UnexpectedError(Exception):
    """A request was not served as the segments predict: another thread uses the allocator, or its settings are unusual."""


def in_order(segments: Sequence[Segment], device: int, stream: int) -> list[Segment]:
    """The segments of torch's snapshot, in the order in which they serve requests of a stream; by address if that is not known.

    This changes nothing except the peaks in the allocator's statistics.
    """
    ranks: dict[int, int] = {}
    for small in (True, False):
        pool = [s for s in segments if (s["segment_type"] == "small") == small and _is_asked(s, stream)]
        with contextlib.suppress(_UnexpectedError, torch.OutOfMemoryError), _Free(pool, small, device, stream) as free:
            for address in free.order():
                ranks[address] = len(ranks)
    return sorted(segments, key=lambda s: (ranks.get(s["address"], len(ranks)), s["address"]))


def _is_asked(segment: Segment, stream: int) -> bool:
    """Whether a segment takes part. Expandable segments do not, because each pool and stream has only one; private pools do
    not, because they serve nobody else.
    """
    own = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    return own and segment["stream"] == stream and not segment.get("is_expandable")


class _Free:
    """The free blocks of one pool and stream. Within the context all of them are allocated; at its end they are freed."""

    def __init__(self, pool: Sequence[Segment], small: bool, device: int, stream: int) -> None:
        self._pool = pool
        self._small = small
        self._where = device, stream
        self._taken: dict[int, int] = {}
        """Address -> bytes."""

    def __enter__(self) -> _Free:
        try:
            self._take_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for address in tuple(self._taken):
            self._give_back(address)

    def order(self) -> list[int]:
        """Addresses of the segments that have both used and free blocks, in the order in which they serve requests."""
        segments = [s["address"] for s in self._pool if any(b["state"] == "active_allocated" for b in s["blocks"])]
        largest: dict[int, tuple[int, int]] = {}
        starts = sorted(s["address"] for s in self._pool)
        for address, nbytes in self._taken.items():
            segment = starts[bisect_right(starts, address) - 1]
            if segment in segments:
                largest[segment] = max(largest.get(segment, (0, 0)), (nbytes, address))
        if len(largest) < 2:
            return []
        size = min(nbytes for nbytes, _ in largest.values())
        equal: dict[int, int] = {}
        """A block of `size` -> its segment."""
        for segment, (nbytes, address) in largest.items():
            if nbytes == size:
                equal[address] = segment
            elif self._small or nbytes - size > _SMALL_NBYTES:
                self._give_back(address)
                self._take(nbytes - size, address)
                self._take(size, address + nbytes - size)
                equal[address + nbytes - size] = segment
        for address in equal:
            self._give_back(address)
        return [equal[self._take(size)] for _ in equal]

    def _take_all(self) -> None:
        free = dict(sorted(_free_blocks(self._pool), key=lambda block: block[1]))
        while free:
            nbytes = next(iter(free.values()))
            size = min(nbytes, _SMALL_NBYTES) if self._small else nbytes
            taken = self._take(size)
            if free.get(taken, 0) < size:
                raise _UnexpectedError
            rest = free.pop(taken) - size
            if rest:
                free = dict(sorted([*free.items(), (taken + size, rest)], key=lambda block: block[1]))

    def _take(self, nbytes: int, expected: int | None = None) -> int:
        address = int(torch.cuda.caching_allocator_alloc(nbytes, *self._where))
        self._taken[address] = nbytes
        if expected is not None and address != expected:
            raise _UnexpectedError
        return address

    def _give_back(self, address: int) -> None:
        del self._taken[address]
        torch.cuda.caching_allocator_delete(address)


def _free_blocks(pool: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """(address, bytes)"""
    for segment in pool:
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield address, int(block["size"])
            address += int(block["size"])
