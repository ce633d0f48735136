"""What several ranks show of their compiled regions, put together (session/regions/shared_regions.py)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from lightning_memopt.compiled import Halves
from lightning_memopt.plan import Life
from lightning_memopt.session.regions.region_choice import Option
from lightning_memopt.session.regions.shared_regions import Shown, options_of, post_of, together


def posted(*ranks: Shown) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(shown.fields())) for shown in ranks]


@pytest.mark.parametrize("seed", range(50))
def test_together_they_fit_if_all_fit(seed: int) -> None:
    """Ranks may have other limits. What is too much for all together is that of the rank with the least room."""
    rng = random.Random(seed)
    peaks = [rng.randint(90, 110) for _ in range(rng.randint(2, 4))]
    ranks = [Shown(False, 0, ("a", "b"), peak, peak - rng.randint(0, 9), rng.randint(90, 110)) for peak in peaks]
    shown = together(posted(*ranks))
    assert shown is not None and shown.alike and shown.limit_nbytes == ranks[0].limit_nbytes and shown.keys == ("a", "b")
    assert shown.too_large == any(rank.too_large for rank in ranks)
    room = lambda s, nbytes: s.limit_nbytes - nbytes  # noqa: E731
    assert room(shown, shown.peak_nbytes) == min(room(rank, rank.peak_nbytes) for rank in ranks)
    assert room(shown, shown.least_nbytes) == min(room(rank, rank.least_nbytes) for rank in ranks)


def test_without_a_limit_the_highest_peak_counts() -> None:
    shown = together(posted(Shown(False, 0, ("a",), 5, 4), Shown(False, 0, ("a",), 7, 3)))
    assert shown == Shown(False, 0, ("a",), 7, 4)


def test_code_that_one_rank_compiled_counts_for_all() -> None:
    """The fewest discarded steps count: a rank that has not shown its peak may discard once more."""
    shown = together(posted(Shown(False, 4, ("a",), 7, 7), Shown(True, 3)))
    assert shown is not None and shown.compiled and shown.discarded == 3


@pytest.mark.parametrize(
    "other", [Shown(False, 0, ("a", "c"), 7, 7, 8), Shown(False, 0, ("a",), 7, 7, 8), Shown(False, 0, ("a", "b"), 7, 7, None)]
)
def test_other_regions_or_other_wishes_are_not_alike(other: Shown) -> None:
    own = Shown(False, 0, ("a", "b"), 9, 9, 8)
    for shown in (together(posted(own, other)), together(posted(other, own))):
        assert shown is not None and not shown.alike and shown.too_large
    assert together([*posted(own), {}]) is None, "a rank has no step to show"


def test_options_are_sent_as_they_are() -> None:
    lives = (
        Life(tensor=3, born_at=0, freed_at=9, how="original"),
        Life(tensor=4, born_at=7, freed_at=9, how="rebuild"),
    )
    options = [Option(lives, Halves(100, 200), 5, 1), None]
    assert options_of(json.loads(json.dumps(post_of(options)))) == options
    assert options_of(json.loads(json.dumps(post_of(None)))) is None
