"""Merged items: which groups are tried, and what one item is left of."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from lightning_memopt.solvers.placement import Buffer, faults
from lightning_memopt.solvers.placement.buffers import Problem
from lightning_memopt.solvers.placement.merging import Item, Merging, _tilings


@pytest.mark.parametrize("seed", range(20))
def test_all_groups_of_two_to_four_that_fill_a_height(seed: int) -> None:
    rng = random.Random(seed)
    items = [Item(0, 1, rng.randint(1, 9), [(i, 0)]) for i in range(8)]
    size = rng.randint(6, 20)
    tilings = [frozenset(map(id, group)) for group in _tilings(size, items)]
    groups = (group for n in (2, 3, 4) for group in combinations(items, n) if sum(item.size for item in group) == size)
    assert len(set(tilings)) == len(tilings) and set(tilings) == {frozenset(map(id, group)) for group in groups}


@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_twins_and_what_follows_them_are_merged_until_one_item_is_left(seed: int) -> None:
    """Even seeds merge twins: four of 10..20, two of 10..30; then 10..20 with 20..30, those of 10..30, and 0..10 with them."""
    rows = [(0, 10, 8), *[(10, 20, 1)] * 4, *[(10, 30, 2)] * 2, (20, 30, 4)]
    buffers = [Buffer(str(i), *row) for i, row in enumerate(rows)]
    merging = Merging(Problem.of(buffers), 8, seed)
    (item,) = merging.items
    assert (item.lower, item.upper, item.size) == (0, 30, 8)
    assert not faults(buffers, merging.offsets(merging.problem().size * 0).tolist(), 8)
