"""The model of the caching allocator against its documented rules, one by one, and against a trace written by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_memopt.errors import ConfigError
from lightning_memopt.plan import Machine
from lightning_memopt.plan.allocator import Allocator, ExhaustedError, Settings
from lightning_memopt.plan.allocator.settings import MIB
from tests.allocator_trace import compare

KIB = 1024


def filled(*sizes: int, settings: Settings | None = None, **options: Any) -> Allocator:
    """An allocator with these allocations, named 0, 1, ..."""
    a = Allocator(settings, **options)
    for i, nbytes in enumerate(sizes):
        a.alloc(i, nbytes)
    return a


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (31 * MIB, 32 * MIB, 32 * MIB),  # not more than 1 MiB would be left: the block stays whole
    ],
)
def test_rounding_and_segments(nbytes: int, allocated: int, reserved: int) -> None:
    a = filled(nbytes)
    assert (a.requested, a.allocated, a.reserved) == (nbytes, allocated, reserved)


def test_small_blocks_share_a_segment_down_to_512_bytes() -> None:
    assert filled(*[512 * KIB] * 4).reserved == 2 * MIB
    assert filled(*[512 * KIB] * 5).reserved == 4 * MIB
    a = filled(MIB, MIB - 512, 512)
    assert a.reserved == 2 * MIB
    a.alloc("one more", 1)
    assert a.reserved == 4 * MIB


def test_small_and_large_blocks_do_not_mix() -> None:
    a = filled(19 * MIB)
    a.free(0)
    a.alloc("small", 100)
    assert a.reserved == 20 * MIB + 2 * MIB


def test_requests_between_1_and_10_mib_share_segments_of_20() -> None:
    assert filled(*[5 * MIB] * 4).reserved == 20 * MIB
    assert filled(*[5 * MIB] * 5).reserved == 40 * MIB
    a = filled(2 * MIB)
    a.alloc("the rest of that segment", 18 * MIB)
    assert a.reserved == 20 * MIB


def test_a_large_block_is_split_only_where_more_than_1_mib_is_left() -> None:
    a = filled(20 * MIB)
    a.free(0)
    a.alloc("exactly 1 MiB left", 19 * MIB)
    assert a.allocated == 20 * MIB
    a.free("exactly 1 MiB left")
    a.alloc("more", 19 * MIB - 512)
    assert a.allocated == 19 * MIB - 512


def test_the_smallest_block_that_is_large_enough_at_the_lowest_address() -> None:
    a = filled(40 * MIB, 30 * MIB, 50 * MIB)
    for i in range(3):
        a.free(i)
    a.alloc("best", 29 * MIB)
    a.alloc("next", 38 * MIB)
    assert a.reserved == 120 * MIB
    a.alloc("largest", 50 * MIB)  # still whole: neither of the others was cut from it
    assert a.reserved == 120 * MIB


def test_freed_neighbours_are_joined() -> None:
    a = filled(*[5 * MIB] * 4)
    a.free(1)
    a.free(2)
    a.alloc("both", 9 * MIB + 512 * KIB)
    assert a.reserved == 20 * MIB
    a.free("both")
    a.free(0)
    a.free(3)
    a.alloc("all", 20 * MIB)
    assert a.reserved == 20 * MIB


def test_streams_do_not_share_blocks() -> None:
    a = filled(20 * MIB)
    a.free(0)
    a.alloc("other", 20 * MIB, stream=7)
    assert a.reserved == 40 * MIB
    a.alloc("same", 20 * MIB)
    assert a.reserved == 40 * MIB


def test_freed_segments_stay_until_the_cache_is_emptied_and_peaks_can_be_reset() -> None:
    a = filled(20 * MIB, 30 * MIB, 5 * MIB, 5 * MIB)
    for i in (0, 1, 2):
        a.free(i)
    assert a.reserved == a.peak_reserved == 70 * MIB and a.allocated == 5 * MIB and a.peak_allocated == 60 * MIB
    a.empty_cache()
    assert a.reserved == 20 * MIB, "a part of the last segment is in use"
    a.reset_peaks()
    assert (a.peak_reserved, a.peak_allocated, a.peak_requested) == (20 * MIB, 5 * MIB, 5 * MIB)


def test_pressure_gives_back_what_is_cached_and_then_fails() -> None:
    a = filled(30 * MIB, 30 * MIB, limit_nbytes=64 * MIB)
    a.free(0)
    a.alloc("larger", 34 * MIB)
    assert a.reserved == 64 * MIB and a.peak_reserved == 64 * MIB
    with pytest.raises(ExhaustedError):
        a.alloc("too much", 1)


def test_blocks_above_max_split_size_are_neither_split_nor_taken_by_smaller_requests() -> None:
    settings = Settings.parse("max_split_size_mb:32")
    a = filled(64 * MIB, settings=settings)
    a.free(0)
    a.alloc("small", 24 * MIB)
    assert a.reserved == 88 * MIB
    a.alloc("large", 50 * MIB)
    assert a.reserved == 88 * MIB and a.allocated == 88 * MIB, "not cut"
    a.free("large")
    a.alloc("20 MiB less", 44 * MIB)
    assert a.reserved == 132 * MIB
    c = filled(64 * MIB, 40 * MIB, 48 * MIB, settings=settings, limit_nbytes=200 * MIB)
    for i in range(3):
        c.free(i)
    c.alloc("larger than each of them: the largest go until their sum is enough", 100 * MIB)
    assert c.reserved == (40 + 100) * MIB
    b = filled(24 * MIB, 64 * MIB, 40 * MIB, settings=settings, limit_nbytes=130 * MIB)
    b.free(1)
    b.free(0)
    b.alloc("too small for the 64 MiB, which alone are given back", 40 * MIB)
    assert b.reserved == (24 + 40 + 40) * MIB


def test_garbage_collection_gives_back_the_oldest_first() -> None:
    settings = Settings.parse("garbage_collection_threshold:0.5")
    a = filled(20 * MIB, 22 * MIB, 12 * MIB, settings=settings, limit_nbytes=100 * MIB)
    a.free(0)
    a.alloc("a", 12 * MIB)
    a.free("a")
    assert a.reserved == 54 * MIB
    a.free(1)
    a.alloc("new", 40 * MIB)  # above half: what is older than the average goes
    assert a.reserved < 54 * MIB + 40 * MIB
    plain = filled(20 * MIB, 22 * MIB, 12 * MIB, limit_nbytes=100 * MIB)
    plain.free(0)
    plain.free(1)
    plain.alloc("new", 40 * MIB)
    assert plain.reserved == 94 * MIB


def test_rounding_to_parts_of_a_power_of_two() -> None:
    settings = Settings.parse("roundup_power2_divisions:4")
    assert settings.rounded(1200) == 1536, "too small for four parts of 512"
    assert settings.rounded(5 * MIB + 1) == 6 * MIB and settings.rounded(5 * MIB) == 5 * MIB
    by_size = Settings.parse("roundup_power2_divisions:[64:8,256:4,>:1],expandable_segments:True")
    assert by_size.divisions == (8,) * 7 + (0, 4) + (1,) * 7
    assert by_size.rounded(65 * MIB) == 72 * MIB and by_size.rounded(130 * MIB) == 130 * MIB
    assert by_size.rounded(257 * MIB) == 320 * MIB and by_size.rounded(513 * MIB) == 513 * MIB and by_size.expandable


def test_settings_of_the_environment() -> None:
    assert Settings.from_environment({}) == Settings()
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb: 64"}
    assert Settings.from_environment(both) == Settings(max_split_nbytes=64 * MIB)
    assert Settings.from_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}).expandable
    assert Settings.parse("backend:native,pinned_num_register_threads:4") == Settings()
    for wrong in (
        "max_split_size_mb:8",
        "garbage_collection_threshold:2",
        "roundup_power2_divisions:3",
        "expandable_segments:1",
    ):
        with pytest.raises(ConfigError, match=wrong.partition(":")[0]):
            Settings.parse(wrong)


# -- expandable segments ---------------------------------------------------------------------------------

EXPANDABLE = Settings(expandable=True)


def test_expandable_segments_grow_by_pages_and_serve_what_follows() -> None:
    a = filled(30 * MIB, settings=EXPANDABLE)
    assert a.reserved == 40 * MIB
    a.alloc("fits", 10 * MIB)
    assert a.reserved == 40 * MIB
    a.alloc("grows", MIB + 512)
    assert a.reserved == 60 * MIB
    a.alloc("small", 3 * KIB)
    assert a.reserved == 62 * MIB
    assert a.allocated == a.requested


def test_expandable_segments_have_no_fragments_where_plain_ones_do() -> None:
    sizes = [11 * MIB, 13 * MIB, 17 * MIB]

    def grows(settings: Settings) -> int:
        a = filled(*sizes, settings=settings)
        for i in range(3):
            a.free(i)
        a.alloc("all", 40 * MIB)
        return a.reserved

    assert grows(Settings()) == (12 + 14 + 18 + 40) * MIB
    assert grows(EXPANDABLE) == 60 * MIB


def test_a_block_at_the_end_counts_as_large_as_it_can_become() -> None:
    a = filled(8 * MIB, 27 * MIB, settings=EXPANDABLE)  # then 5 MiB free at the end of the second page
    a.free(0)
    a.alloc("into the 8 MiB, not into the 5 that can grow", 4 * MIB)
    assert a.reserved == 40 * MIB
    a.alloc("more than is left of the 8", 8 * MIB)
    assert a.reserved == 60 * MIB


def test_expandable_pages_go_back_but_not_parts_of_them() -> None:
    a = filled(30 * MIB, 30 * MIB, 15 * MIB, settings=EXPANDABLE)
    assert a.reserved == 80 * MIB
    a.free(1)  # from 30 to 60 MiB: one whole page of 20 inside
    a.empty_cache()
    assert a.reserved == 60 * MIB
    a.alloc("back", 25 * MIB)  # 10 MiB before the hole, which is mapped again
    assert a.reserved == 80 * MIB
    a.free(0)
    a.free(2)
    a.free("back")
    a.empty_cache()
    assert a.reserved == 0 and not a._large.unmapped and not a._large.keys


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:8"])
def test_books_are_kept_whatever_happens(text: str) -> None:
    """Random requests: what is reserved is the sum of all blocks, and in the end nothing is left."""
    for seed in range(5):
        rng = random.Random(seed)
        a = Allocator(Settings.parse(text), limit_nbytes=rng.choice((None, 700 * MIB)))
        live: list[int] = []
        for i in range(300):
            if live and rng.random() < 0.5:
                a.free(live.pop(rng.randrange(len(live))))
            else:
                try:
                    a.alloc(i, int(2 ** rng.uniform(3, 25.5)), stream=rng.choice((0, 0, 3)))
                except ExhaustedError:
                    continue
                live.append(i)
            if rng.random() < 0.02:
                a.empty_cache()
            if i % 10:
                continue
            free = [b for pool in (a._small, a._large) for b in pool.at.values()]
            used = list(a._blocks.values())
            assert sum(b.nbytes for b in free + used) == a.reserved
            assert sum(b.nbytes for b in used) == a.allocated >= a.requested
            for b in free + used:
                assert b.next is None or (b.next.previous is b and b.address + b.nbytes == b.next.address)
                assert not (b.free and b.next is not None and b.next.free and b.next.mapped), "free neighbours"
            assert all(len(pool.keys) == len(pool.at) for pool in (a._small, a._large))
        for i in live:
            a.free(i)
        a.empty_cache()
        assert (a.requested, a.allocated, a.reserved) == (0, 0, 0)


# -- a recorded trace ------------------------------------------------------------------------------------


def entry(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


BY_HAND = [
    entry("segment_alloc", 0x7F0000000000, 2 * MIB),
    entry("alloc", 0x7F0000000000, 1000),
    entry("segment_alloc", 0x7F0000200000, 20 * MIB),
    entry("alloc", 0x7F0000200000, 6 * MIB),
    entry("alloc", 0x7F0000800000, 6 * MIB),
    entry("free_requested", 0x7F0000200000, 6 * MIB),
    entry("free_completed", 0x7F0000200000, 6 * MIB),
    entry("alloc", 0x7F0000E00000, 7 * MIB),  # not into the 6 MiB, but into the 8 MiB that are left at the end
    entry("segment_alloc", 0x7F0002000000, 30 * MIB),
    entry("alloc", 0x7F0002000000, 29 * MIB + 700 * KIB),
    entry("free_requested", 0x7F0002000000, 29 * MIB + 700 * KIB),
    entry("free_completed", 0x7F0002000000, 29 * MIB + 700 * KIB),
    entry("segment_free", 0x7F0002000000, 30 * MIB),  # empty_cache
    entry("alloc", 0x7F0000200000, 6 * MIB),
    entry("snapshot", 0, 0),
]


def test_a_trace_by_hand_is_predicted_step_by_step() -> None:
    found = compare(BY_HAND)
    assert found.first_difference is None
    assert found.recorded_peak == found.predicted_peak == 52 * MIB and found.error == 0
    assert [r // MIB for _, r, _ in found.steps] == [2, 22, 22, 22, 22, 52, 52, 22]


def test_a_trace_of_another_allocator_is_seen_to_differ() -> None:
    found = compare(BY_HAND, EXPANDABLE)
    assert found.first_difference is not None
    other = [dict(e, size=24 * MIB) if e["action"] == "segment_alloc" and e["size"] == 20 * MIB else e for e in BY_HAND]
    assert compare(other).first_difference == (3, 26 * MIB, 22 * MIB)
    assert compare([]).error == 0 and compare(BY_HAND[1:2]).error == 1.0


def said(**changed: object) -> dict[str, object]:
    """What the allocator of torch 2.14 says of itself, as far as it is read."""
    divisions = {str(1 << i): 0 for i in range(16)}
    plain = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": divisions,
    }
    return plain | changed


def test_settings_are_those_that_the_allocator_says() -> None:
    assert Settings.of_allocator(said()) == Settings() == Settings.of_allocator({})
    text = "expandable_segments:True,max_split_size_mb:256,roundup_power2_divisions:[64:8,>:4],garbage_collection_threshold:0.8"
    divisions = {str(1 << i): 8 if i < 7 else 4 for i in range(16)}
    found = said(
        PYTORCH_CUDA_ALLOC_CONF=text,
        expandable_segments=True,
        max_split_size=256 * MIB,
        roundup_power2_divisions=divisions,
        garbage_collection_threshold=0.8,
    )
    assert Settings.of_allocator(found) == Settings.parse(text)


def test_a_later_text_may_set_a_part() -> None:
    """As torch does: its text is the last one that was set, and expandable segments stay."""
    found = said(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128", max_split_size=128 * MIB, expandable_segments=True)
    assert Settings.of_allocator(found) == Settings(expandable=True, max_split_nbytes=128 * MIB)
    assert Settings.of_allocator(said(PYTORCH_CUDA_ALLOC_CONF="large_segment_size_mb:40")).large_segment_nbytes == 40 * MIB


def test_a_machine_that_nobody_asked_has_the_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert Machine().allocator.max_split_nbytes == 64 * MIB
    assert Machine(allocator=Settings()).allocator == Settings()
