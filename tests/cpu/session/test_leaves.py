"""Leaves of batches are those of torch, in torch's order."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_memopt.session.forward.leaves import leaves_of
from lightning_memopt.session.forward.shapes import _is_samples

Pair = namedtuple("Pair", "b a")
ONES = torch.ones(2)
SAMPLES = [torch.ones(i) for i in range(1, 6)]
TREES: list[Any] = [
    ONES,
    None,
    "text",
    (),
    [],
    {},
    (ONES, [3, {"b": ONES, "a": (None, "x")}]),
    Pair(ONES, [ONES, 1]),
    OrderedDict(b=ONES, a=[1, 2]),
    defaultdict(list, z=[ONES, {"k": (1,)}]),
    {"x": SAMPLES, "y": {1, 2}},
    [SAMPLES, (ONES, Pair(SAMPLES, 2))],
    torch.nn.Parameter(ONES),
    type("Batch", (dict,), {})(b=ONES, a=1),
]


@pytest.mark.parametrize("is_leaf", [None, _is_samples])
@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_leaves(tree: Any, is_leaf: Any) -> None:
    ours, expected = leaves_of(tree, is_leaf), tree_leaves(tree, is_leaf=is_leaf)
    assert len(ours) == len(expected) and all(a is b for a, b in zip(ours, expected, strict=True))
