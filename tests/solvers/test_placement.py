"""Placement: valid, never below the bound, and as low as exhaustive search on tiny cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memopt.errors import PlacementError
from lightning_memopt.solvers.placement import Buffer, faults, place
from lightning_memopt.solvers.placement.buffers import Problem


def tiny(seed: int, n: int, times: int = 6, sizes: int = 9) -> list[Buffer]:
    rng = random.Random(seed)
    buffers = []
    for i in range(n):
        lower = rng.randrange(times)
        buffers.append(Buffer(f"b{i}", lower, rng.randint(lower + 1, times), rng.randint(1, sizes)))
    return buffers


def lowest(buffers: Sequence[Buffer]) -> int:
    """The least height, by every permutation: each buffer goes on top of those before it that it shares a moment with.

    An optimal placement from which no buffer can be lowered has this form, in the order of its offsets.
    """
    best = sum(b.size for b in buffers)
    for order in itertools.permutations(buffers):
        tops: list[tuple[Buffer, int]] = []
        for b in order:
            below = [top for other, top in tops if other.lower < b.upper and b.lower < other.upper]
            tops.append((b, max(below, default=0) + b.size))
        best = min(best, max(top for _, top in tops))
    return best


def max_live(buffers: Sequence[Buffer]) -> int:
    moments = {b.lower for b in buffers}
    return max((sum(b.size for b in buffers if b.lower <= t < b.upper) for t in moments), default=0)


@pytest.mark.parametrize("seed", range(25))
def test_tiny_cases_are_as_low_as_exhaustive_search(seed: int) -> None:
    buffers = tiny(seed, n=3 + seed % 4)
    placement = place(buffers, seconds=2)
    assert not faults(buffers, placement.offsets, placement.height_nbytes)
    assert placement.height_nbytes == lowest(buffers)
    assert placement.bound_nbytes == max_live(buffers)


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 9), st.integers(1, 50)), max_size=12),
    st.sampled_from([1, 8]),
)
def test_every_placement_is_valid(rows: list[tuple[int, int, int]], alignment: int) -> None:
    buffers = [Buffer(str(i), lower, lower + length, size) for i, (lower, length, size) in enumerate(rows)]
    placement = place(buffers, seconds=0.05, alignment=alignment)
    assert not faults(buffers, placement.offsets, placement.height_nbytes, alignment)
    ends = [offset + -(-b.size // alignment) * alignment for b, offset in zip(buffers, placement.offsets, strict=True)]
    assert placement.height_nbytes == max(ends, default=0) >= placement.bound_nbytes
    assert placement.bound_nbytes == max_live([b._replace(size=-(-b.size // alignment) * alignment) for b in buffers])


def test_the_check_sees_every_fault() -> None:
    buffers = [Buffer("a", 0, 2, 10), Buffer("b", 1, 3, 10), Buffer("c", 2, 4, 10)]
    assert not faults(buffers, [0, 10, 0], 20)
    assert faults(buffers, [0, 9, 0]) == ["b and a overlap", "c and b overlap"]
    assert faults(buffers, [0, 10, 0], 19) == ["b: ends at 20, above 19"]
    assert len(faults(buffers, [-1, 10, 0])) == 1 and len(faults(buffers, [0, 10, 21], alignment=2)) == 1
    assert faults(buffers, [0, 10]) == ["2 offsets for 3 buffers"]


@pytest.mark.parametrize("seed", range(30))
def test_the_check_agrees_with_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    buffers = tiny(seed, n=8)
    offsets = [rng.randrange(30) for _ in buffers]
    pairs = [
        (a, b)
        for (a, x), (b, y) in itertools.combinations(zip(buffers, offsets, strict=True), 2)
        if a.lower < b.upper and b.lower < a.upper and x < y + b.size and y < x + a.size
    ]
    assert len(faults(buffers, offsets)) == len(pairs)


def test_a_capacity_is_kept_or_said_not_to_be() -> None:
    buffers = [Buffer("a", 0, 2, 10), Buffer("b", 1, 3, 10)]
    assert place(buffers, 20).fits and place(buffers, 1000).fits
    hopeless = place(buffers, 19, seconds=60)
    assert not hopeless.fits and hopeless.height_nbytes == hopeless.bound_nbytes == 20 and hopeless.seconds < 5
    assert place([]).offsets == ()


@pytest.mark.parametrize(
    "buffer, what",
    [(Buffer("a", 1, 1, 5), "upper 1"), (Buffer("a", 0, 1, 0), "size 0"), (Buffer("a", 0, 1, 1 << 62), "2^62")],
)
def test_buffers_that_mean_nothing_are_refused(buffer: Buffer, what: str) -> None:
    with pytest.raises(PlacementError, match="buffer a") as refused:
        place([buffer])
    assert what in str(refused.value)


@pytest.mark.parametrize("request_", [{"capacity": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"alignment": 0}])
def test_requests_that_mean_nothing_are_refused(request_: dict[str, int]) -> None:
    with pytest.raises(PlacementError):
        place([Buffer("a", 0, 1, 1)], **request_)


def test_parts_do_not_concern_each_other() -> None:
    buffers = [Buffer("a", 0, 3, 5), Buffer("b", 1, 2, 5), Buffer("c", 3, 5, 7), Buffer("d", 4, 6, 2), Buffer("e", 9, 11, 1)]
    parts = Problem.of(buffers).components()
    assert [sorted(part.tolist()) for part in parts] == [[0, 1], [2, 3], [4]]
