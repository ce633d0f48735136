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
    _gather(tree, is_leaf, leaves)
    return leaves


def _gather(node: Any, is_leaf: IsLeaf | None, leaves: list[Any]) -> None:
    kind = type(node)
    if isinstance(node, torch.Tensor) or (is_leaf is not None and is_leaf(node)):
        leaves.append(node)
    elif kind is tuple or kind is list:
        for child in node:
            _gather(child, is_leaf, leaves)
    elif kind is dict:
        for child in node.values():
            _gather(child, is_leaf, leaves)
    else:
        leaves += tree_leaves(node, is_leaf=is_leaf)
