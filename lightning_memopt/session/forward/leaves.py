"""The leaves of a batch, in torch's order. Each step asks for them: torch takes tens of microseconds for two tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_memopt.torch_private import tree_leaves

IsLeaf = Callable[[Any], bool]


def leaves_of(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """As torch's `tree_leaves`. Tuples, lists and dicts are gone through here; containers of other classes by torch."""
    leaves: list[Any] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if isinstance(node, torch.Tensor) or (is_leaf is not None and is_leaf(node)):
            leaves.append(node)
        elif kind is tuple or kind is list:
            waiting += reversed(node)
        elif kind is dict:
            waiting += reversed(node.values())
        else:
            leaves += tree_leaves(node, is_leaf=is_leaf)
    return leaves
