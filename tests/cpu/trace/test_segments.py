"""The segments of an allocator are put in the order in which they serve equal requests, by asking it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lightning_memopt.device.segments import in_order

SMALL, LARGE = 2 << 20, 20 << 20
UNIT = 512


class Pool:
    """Segments with blocks, best fit first. `serves_before`: of equal blocks, the segment with the least of this serves.

    Raises AssertionError where a request would need a segment more.
    """

    def __init__(self, small: bool, held: Sequence[Sequence[tuple[int, int]]], serves_before: Callable[[int], int]) -> None:
        self.small = small
        self.nbytes = SMALL if small else LARGE
        self.serves_before = serves_before
        self.base = (1 if small else 2) << 40
        self.held: list[dict[int, int]] = [dict(blocks) for blocks in held]

    def free(self) -> Iterator[tuple[int, int, int]]:
        """(segment, offset, bytes)"""
        for number, held in enumerate(self.held):
            at = 0
            for offset, nbytes in [*sorted(held.items()), (self.nbytes, 0)]:
                if offset > at:
                    yield number, at, offset - at
                at = offset + nbytes

    def alloc(self, nbytes: int) -> int:
        fits = [(size, self.serves_before(n), offset, n) for n, offset, size in self.free() if size >= nbytes]
        assert fits, "no free block: a segment is asked of the device"
        size, _, offset, number = min(fits)
        splits = self.small or size - nbytes > 1 << 20
        self.held[number][offset] = nbytes if splits else size
        return self.base + number * self.nbytes + offset

    def delete(self, address: int) -> None:
        number, offset = divmod(address - self.base, self.nbytes)
        del self.held[number][offset]

    def segments(self) -> Iterator[dict[str, Any]]:
        for number, held in enumerate(self.held):
            blocks = [(offset, n, "active_allocated") for offset, n in held.items()]
            blocks += [(offset, n, "inactive") for s, offset, n in self.free() if s == number]
            listed = [{"size": n, "state": state} for _, n, state in sorted(blocks)]
            kind = "small" if self.small else "large"
            yield {"address": self.base + number * self.nbytes, "stream": 7, "segment_type": kind, "blocks": listed}


def some_held(rng: random.Random, small: bool) -> list[tuple[int, int]]:
    """Blocks, with holes between them: those of the large pool are above 1 MiB, as torch splits off no less."""
    unit, end = (UNIT, SMALL) if small else (5 << 18, LARGE)
    at, held = 0, []
    while at < end:
        hole = rng.randint(0, 3) * rng.choice([1, 8]) * unit
        nbytes = min(rng.randint(2, 600 if small else 5) * unit, end - at - hole)
        if nbytes <= 0:
            break
        held.append((at + hole, nbytes))
        at += hole + nbytes
    return held


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Its pools, for small and large requests: to be given by the test."""
    pools: list[Pool] = []

    def alloc(nbytes: int, device: int, stream: int) -> int:
        assert (device, stream) == (0, 7)
        return pools[nbytes > 1 << 20].alloc(nbytes)

    def delete(address: int) -> None:
        pools[address >= 2 << 40].delete(address)

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", alloc)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", delete)
    return pools


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_found_and_nothing_is_changed(allocator: list[Pool], seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    ages = rng.sample(range(count), count)
    allocator[:] = [Pool(small, [some_held(rng, small) for _ in range(count)], ages.__getitem__) for small in (True, False)]
    before = [[dict(held) for held in pool.held] for pool in allocator]
    found = in_order([s for pool in allocator for s in pool.segments()], device=0, stream=7)
    assert [pool.held for pool in allocator] == before
    for pool in allocator:
        served = [(s["address"] - pool.base) // pool.nbytes for s in found if s["address"] // pool.base == 1]
        known = [n for n in served if any(number == n for number, *_ in pool.free()) and pool.held[n]]
        if pool.small:
            assert known == sorted(known, key=ages.__getitem__)
        assert sorted(served) == list(range(count))


@pytest.mark.parametrize("small", [True, False])
def test_segments_with_a_free_block_of_one_size_are_ordered_by_what_serves_first(allocator: list[Pool], small: bool) -> None:
    size = UNIT if small else 2 << 20
    held = [[(size, size), (2 * size, 4 * size)], [(0, size), (2 * size, 4 * size)], [(4 * size, size)]]
    ages = [2, 0, 1]
    pools = [Pool(True, [], ages.__getitem__), Pool(False, [], ages.__getitem__)]
    pools[not small] = Pool(small, held, ages.__getitem__)
    allocator[:] = pools
    segments = list(pools[not small].segments())
    assert in_order(segments, 0, 7) == [segments[1], segments[2], segments[0]]


def test_by_address_where_the_allocator_does_otherwise_than_expected(allocator: list[Pool]) -> None:
    """Another thread took a block in the meantime."""
    pool = Pool(True, [[(0, UNIT)], [(0, UNIT)]], [1, 0].__getitem__)
    allocator[:] = [pool, Pool(False, [], [].__getitem__)]
    segments = list(pool.segments())
    pool.held[0][UNIT] = 4 * UNIT
    assert in_order(segments, 0, 7) == segments and pool.held == [{0: UNIT, UNIT: 4 * UNIT}, {0: UNIT}]


def test_other_streams_private_pools_and_expandable_segments_are_not_asked(allocator: list[Pool]) -> None:
    block = [{"size": SMALL - UNIT, "state": "inactive"}, {"size": UNIT, "state": "active_allocated"}]
    one = {"address": 1, "stream": 8, "segment_type": "small", "blocks": block}
    two = one | {"address": 2, "stream": 7, "is_expandable": True}
    three = one | {"address": 3, "stream": 7, "segment_pool_id": (0, 1)}
    assert in_order([three, one, two], 0, 7) == [one, two, three]
