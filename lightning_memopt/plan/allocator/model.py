"""A model of PyTorch's caching allocator for CUDA: which bytes of the device a sequence of allocations and frees reserves.

The model follows the allocator's documented rules (torch 2.11 to 2.13). It needs neither torch nor a device.

1. Sizes are rounded up to multiples of 512 bytes (`Settings.rounded`). Requests of up to 1 MiB are served from the pool of
   small blocks, larger ones from the pool of large blocks.
2. A request gets the smallest free block of its pool and stream that is large enough; of equal ones, the one at the lowest
   address. A small block is split if at least 512 bytes are left. A large block is split if more than 1 MiB is left and the
   request is below `max_split_size`. Requests below that size do not take blocks of that size or more. Requests of that size or
   more do not take blocks that are larger by 20 MiB or more.
3. If there is no such block, a segment is taken from the device (`Settings.segment_nbytes`).
4. A freed block is joined with its free neighbours in the segment. The segment stays reserved.
5. Segments that nobody uses go back to the device by `empty_cache`, or when the device (`limit_nbytes`) has no room for another
   segment: first those above `max_split_size` (if it is set), then all. If more than the share `gc_threshold` of the limit is
   reserved, the large segments that have been unused for longest go back before a new one is taken.
6. `expandable_segments`: a pool has one segment for each stream. It grows at its end by pages (2 MiB; 20 MiB for large blocks),
   and free pages go back by rule 5. Blocks are always split. A free block that can grow counts with the size to which it can
   grow.

Not modelled: private pools of CUDA graphs, blocks that other streams use (`record_stream`), the addresses that the device
hands out (here they rise), and memory that does not pass through the allocator.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from lightning_memopt.errors import MemOptError
from lightning_memopt.plan.allocator.blocks import Block, Pool, cut, follow, join, reach, room
from lightning_memopt.plan.allocator.settings import MIN_BLOCK_NBYTES, SMALL_NBYTES, Settings
from lightning_memopt.units import ceil_div

_ADDRESS_SPACE_NBYTES = 1 << 46
"""Bytes to which an expandable segment may grow."""


class Placed(NamedTuple):
    """A block of a segment as it was found. requested: what was asked for; 0 if it is free."""

    address: int
    nbytes: int
    requested: int


class Found(NamedTuple):
    """A segment as it was found, or consecutive pages of an expandable one: all its blocks, in order."""

    stream: int
    small: bool
    expandable: bool
    blocks: tuple[Placed, ...]


class ExhaustedError(MemOptError):
    """The modelled device has no room for a block, even after all cached segments were given back.

    Remedy: give the model a device of more bytes.
    """


class Allocator:
    """The state of one device's allocator, in bytes.

    requested: bytes that were requested.
    allocated: bytes of whole blocks, as torch counts them.
    reserved: bytes of segments.
    peak_requested, peak_allocated, peak_reserved: the most of each since `reset_peaks`.
    """

    def __init__(self, settings: Settings | None = None, limit_nbytes: int | None = None) -> None:
        self.settings = settings or Settings()
        self.limit_nbytes = limit_nbytes
        self.requested = self.allocated = self.reserved = 0
        self._small, self._large = Pool(True), Pool(False)
        self._blocks: dict[Hashable, Block] = {}
        self._sizes: dict[int, int] = {}  # requested bytes -> bytes of the block
        self._next_address = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Set the peaks to the present values."""
        self.peak_requested, self.peak_allocated, self.peak_reserved = self.requested, self.allocated, self.reserved

    def enter(self, segments: Iterable[Found], beside_nbytes: int = 0) -> None:
        """Begin with segments that were found in a real allocator, by rising addresses. A held block gets the name
        ("there", address). `beside_nbytes`: bytes that are reserved beside these segments.
        """
        self.reserved += beside_nbytes
        ends: dict[tuple[int, bool], Block] = {}  # last blocks of expandable segments
        for found in segments:
            pool = self._small if found.small else self._large
            at = found.blocks[0].address
            last = ends.get((found.stream, found.small)) if found.expandable else None
            base = at if last is None else last.base
            if last is not None and last.address + last.nbytes < at:
                end = last.address + last.nbytes
                last = follow(last, Block(end, at - end, found.stream, pool, base, True, mapped=False))
                pool.unmapped.append(last)
            for placed in found.blocks:
                last = follow(last, Block(placed.address, placed.nbytes, found.stream, pool, base, found.expandable))
                if placed.requested:
                    last.free, last.requested = False, placed.requested
                    self._blocks["there", placed.address] = last
                    self.requested += placed.requested
                    self.allocated += placed.nbytes
                else:
                    pool.add(last)
                self.reserved += placed.nbytes
            assert last is not None
            self._next_address = max(self._next_address, last.address + last.nbytes)
            if found.expandable:
                ends[found.stream, found.small] = last
        for last in ends.values():
            end = last.address + last.nbytes
            last = follow(last, Block(end, _ADDRESS_SPACE_NBYTES, last.stream, last.pool, last.base, True, mapped=False))
            last.pool.unmapped.append(last)
            self._next_address = max(self._next_address, last.address + last.nbytes)
        self.reset_peaks()

    # -- requests ----------------------------------------------------------------------------------

    def alloc(self, name: Hashable, nbytes: int, stream: int = 0) -> None:
        """Allocate `nbytes`, to be freed by their name. Nothing is allocated for 0 bytes. Raises ExhaustedError."""
        if nbytes == 0:
            return
        if name in self._blocks:
            raise ValueError(f"{name!r} is allocated already")
        size = self._sizes.get(nbytes)
        if size is None:
            size = self._sizes[nbytes] = self.settings.rounded(nbytes)
        pool = self._small if size <= SMALL_NBYTES else self._large
        pool.requests += 1
        block = self._found(pool, size, stream) or self._taken(pool, size, stream)
        self._split(block, size)
        block.free, block.requested = False, nbytes
        self._blocks[name] = block
        self.requested += nbytes
        self.allocated += block.nbytes
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, name: Hashable) -> None:
        """Free an allocation; unknown names (of 0 bytes) are ignored."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self.requested -= block.requested
        self.allocated -= block.nbytes
        block.free = True
        join(block)
        block.pool.add(block)

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Give an allocation another name."""
        if old in self._blocks:
            self._blocks[new] = self._blocks.pop(old)

    def empty_cache(self) -> None:
        """Give back what nobody uses: whole segments, and whole pages of expandable ones."""
        for pool in (self._large, self._small):
            for block in list(pool.at.values()):
                if block.expandable:
                    self._unmap(block)
                elif block.alone:
                    self._release(block)

    # -- blocks ------------------------------------------------------------------------------------

    def _found(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block that serves the request, taken out of the pool."""
        i, n = pool.from_size(stream, size), len(pool.keys)
        if i == n:
            return None
        block = pool.at[pool.keys[i][2]]
        while block.expandable and i + 1 < n and pool.keys[i + 1][0] == stream:
            following = pool.block(i + 1)
            if reach(following) >= reach(block):
                break
            i, block = i + 1, following
        limit = self.settings.max_split_nbytes
        if limit is not None:
            if size < limit <= block.nbytes:
                return None
            if size >= limit and block.nbytes >= size + self.settings.max_non_split_rounding_nbytes:
                return None
        del pool.keys[i], pool.at[block.address]
        return block

    def _taken(self, pool: Pool, size: int, stream: int) -> Block:
        """A block of new memory."""
        self._collect()
        block = self._new(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._new(pool, size, stream)
        if block is None:
            self.empty_cache()
            block = self._new(pool, size, stream)
        if block is None:
            raise ExhaustedError(f"{size} bytes are asked for, {self.reserved} of {self.limit_nbytes} are reserved")
        return block

    def _has_room(self, nbytes: int) -> bool:
        return self.limit_nbytes is None or self.reserved + nbytes <= self.limit_nbytes

    def _new(self, pool: Pool, size: int, stream: int) -> Block | None:
        nbytes = self.settings.segment_nbytes(size)
        if self.settings.expandable:
            return self._grown(pool, size, stream)
        if not self._has_room(nbytes):
            return None
        self._reserve(nbytes)
        return self._segment(pool, nbytes, stream)

    def _segment(self, pool: Pool, nbytes: int, stream: int) -> Block:
        block = Block(self._next_address, nbytes, stream, pool, self._next_address)
        self._next_address += nbytes
        return block

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        """Cut a taken block to `size`, if the rules say so."""
        left = block.nbytes - size
        if block.pool.small or self.settings.expandable:
            splits = left >= MIN_BLOCK_NBYTES
        else:
            limit = self.settings.max_split_nbytes
            splits = left > SMALL_NBYTES and (limit is None or size < limit)
        if splits:
            block.pool.add(cut(block, size))

    # -- giving back -------------------------------------------------------------------------------

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.nbytes

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back blocks above `max_split_size`: one that is large enough by itself, or else the largest ones until their
        bytes are enough. Returns whether they are.
        """
        limit = self.settings.max_split_nbytes
        if limit is None:
            return False
        wanted = max(size, limit)
        i = pool.from_size(stream, wanted)
        if i < len(pool.keys):
            self._release(pool.block(i))
            return True
        released = 0
        while released < wanted:
            mine = [key for key in pool.keys if key[0] == stream and key[1] >= limit]
            if not mine:
                return False
            released += mine[-1][1]
            self._release(pool.at[mine[-1][2]])
        return True

    def _collect(self) -> None:
        """The garbage collection of rule 5. In each round, blocks that are older than the average are given back, until the
        excess is gone.
        """
        if not self.settings.gc_threshold or self.limit_nbytes is None:
            return
        excess = self.reserved - int(self.settings.gc_threshold * self.limit_nbytes)
        while excess > 0:
            ages = {b: self._large.requests - b.since for b in self._large.at.values() if b.alone and not b.expandable}
            average = sum(ages.values()) / max(1, len(ages))
            old = [block for block, age in ages.items() if age >= average]
            if not old:
                return
            for block in old:
                excess -= block.nbytes
                self._release(block)

    # -- expandable segments -----------------------------------------------------------------------

    def _grown(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block of `size` bytes at the lowest address that has room for it. Parts without memory get pages. None if the
        device has too little memory.
        """
        block = next((b for u in pool.unmapped if u.stream == stream and (b := room(u, size)) is not None), None)
        if block is None:
            block = self._segment(pool, _ADDRESS_SPACE_NBYTES, stream)
            block.expandable, block.mapped = True, False
            insort(pool.unmapped, block, key=lambda b: b.address)
        if not block.mapped and not self._map(block, min(block.nbytes, size)):
            return None
        while block.nbytes < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.nbytes, following.nbytes)):
                return None
            block = following
        pool.remove(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Put pages under the first `nbytes` of a block that has none; False if the device has no room."""
        page = self.settings.page_nbytes(block.pool.small)
        nbytes = min(ceil_div(nbytes, page) * page, block.nbytes)
        if not self._has_room(nbytes):
            return False
        block.pool.unmapped.remove(block)
        if nbytes < block.nbytes:
            insort(block.pool.unmapped, cut(block, nbytes), key=lambda b: b.address)
        block.mapped = True
        self._reserve(nbytes)
        join(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block."""
        page = self.settings.page_nbytes(block.pool.small)
        first = ceil_div(block.address - block.base, page) * page + block.base
        last = (block.address + block.nbytes - block.base) // page * page + block.base
        if first >= last:
            return
        pool = block.pool
        pool.remove(block)
        if first > block.address:
            before, block = block, cut(block, first - block.address)
            pool.add(before)
        if last < block.address + block.nbytes:
            pool.add(cut(block, last - block.address))
        self.reserved -= last - first
        block.mapped = False
        join(block)
        if not block.alone:  # otherwise nothing of the segment is left
            insort(pool.unmapped, block, key=lambda b: b.address)
