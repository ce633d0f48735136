"""The allocator of a tier's bytes, beside a map of every single byte."""

from __future__ import annotations

import random

import pytest

from lightning_memopt.runtime.tiers import Space


def runs(free: list[bool]) -> list[tuple[int, int]]:
    """(length, start) of every longest run of free units."""
    found, start = [], None
    for i, is_free in enumerate([*free, False]):
        if is_free and start is None:
            start = i
        elif not is_free and start is not None:
            found.append((i - start, start))
            start = None
    return found


@pytest.mark.parametrize("align", [1, 512])
def test_beside_a_map_of_all_units(align: int) -> None:
    """Best fit, lowest address first; neighbours are one piece again at once; every byte is counted."""
    draw = random.Random(align)
    units = 40
    space = Space(units * align + align // 2, align)
    free = [True] * units
    taken: list[tuple[int, int]] = []
    refused = 0
    for _ in range(5000):
        if taken and draw.random() < 0.5:
            offset, nbytes = taken.pop(draw.randrange(len(taken)))
            space.give(offset, nbytes)
            first, count = offset // align, -(-nbytes // align)
            free[first : first + count] = [True] * count
        else:
            nbytes = draw.randint(1, 9 * align)
            count = -(-nbytes // align)
            expected = min((run for run in runs(free) if run[0] >= count), default=None)
            offset = space.take(nbytes)
            if expected is None:
                assert offset is None
                refused += 1
            else:
                assert offset == expected[1] * align
                free[expected[1] : expected[1] + count] = [False] * count
                taken.append((offset, nbytes))
        assert space.used_nbytes == free.count(False) * align
        assert space.largest_nbytes == max(runs(free), default=(0, 0))[0] * align
    assert refused > 100
    for offset, nbytes in taken:
        space.give(offset, nbytes)
    assert space.largest_nbytes == space.capacity_nbytes == units * align and space.used_nbytes == 0


def test_what_was_not_taken_cannot_be_given_back() -> None:
    space = Space(4096, 512)
    a, b = space.take(600), space.take(512)
    assert (a, b) == (0, 1024) and space.take(4096) is None
    for offset, nbytes in ((1536, 512), (512, 2048), (-512, 512), (4096, 512), (0, 0), (0, 8192)):
        with pytest.raises(ValueError, match="not taken"):
            space.give(offset, nbytes)
    space.give(0, 600)
    with pytest.raises(ValueError, match="not taken"):
        space.give(0, 600)
    with pytest.raises(ValueError, match="not a piece"):
        space.take(0)
    assert space.used_nbytes == 512 and Space(0).take(1) is None
    with pytest.raises(ValueError):
        Space(-1)
