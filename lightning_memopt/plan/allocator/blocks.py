"""The blocks of the allocator's model, which are the parts of a segment in order of address, and the pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Block:
    address: int
    nbytes: int
    stream: int
    pool: Pool
    base: int
    """The address at which its segment begins."""
    expandable: bool = False
    mapped: bool = True
    free: bool = True
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None
    since: int = 0
    """Number of requests that its pool had received when the block became free."""

    @property
    def alone(self) -> bool:
        return self.previous is None and self.next is None


class Pool:
    """Free blocks by (stream, bytes, address), and by address the parts of expandable segments that have no memory."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[tuple[int, int, int]] = []
        self.at: dict[int, Block] = {}
        self.unmapped: list[Block] = []
        self.requests = 0

    def add(self, block: Block) -> None:
        block.since = self.requests
        insort(self.keys, (block.stream, block.nbytes, block.address))
        self.at[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.stream, block.nbytes, block.address))], self.at[block.address]

    def from_size(self, stream: int, nbytes: int) -> int:
        """The position of the stream's smallest block of at least `nbytes`; the position of the end if there is none."""
        i = bisect_left(self.keys, (stream, nbytes, -1))
        return i if i < len(self.keys) and self.keys[i][0] == stream else len(self.keys)

    def block(self, i: int) -> Block:
        return self.at[self.keys[i][2]]


def cut(block: Block, nbytes: int) -> Block:
    """Shorten a block; returns the rest."""
    rest = Block(block.address + nbytes, block.nbytes - nbytes, block.stream, block.pool, block.base, block.expandable)
    rest.mapped = block.mapped
    rest.previous, rest.next, block.next, block.nbytes = block, block.next, rest, nbytes
    if rest.next is not None:
        rest.next.previous = rest
    return rest


def follow(last: Block | None, block: Block) -> Block:
    """Append a block to its segment, after the block `last`. Returns it."""
    block.previous = last
    if last is not None:
        last.next = block
    return block


def join(block: Block) -> None:
    """Join a free block, which is in no pool, with its free neighbours."""
    for other in (block.previous, block.next):
        if other is None or not other.free or other.mapped != block.mapped:
            continue
        if other.mapped:
            block.pool.remove(other)
        else:
            block.pool.unmapped.remove(other)
        if other is block.previous:
            block.address, block.previous = other.address, other.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        block.nbytes += other.nbytes


def reach(block: Block) -> int:
    """The bytes of a block and of the part without memory into which it can grow."""
    following = block.next
    return block.nbytes + (following.nbytes if following is not None and not following.mapped else 0)


def room(unmapped: Block, size: int) -> Block | None:
    """The block at which `size` free bytes begin: the part without memory, or the free block before it. None if there are
    fewer.
    """
    before = unmapped.previous
    first = before if before is not None and before.free else unmapped
    nbytes = 0
    block: Block | None = first
    while block is not None and block.free and nbytes < size:
        nbytes += block.nbytes
        block = block.next
    return first if nbytes >= size else None
