"""The nodes of autograd in what a module gets or returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import tree_leaves


@uncompiled
def nodes_of(value: Any) -> set[Any]:
    """The nodes of the tensors in what a module gets or returns: in pytrees and dataclasses."""
    nodes = set()
    seen = set[int]()
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, torch.Tensor):
                nodes.add(leaf.grad_fn)
            elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting.append([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
    return nodes - {None}
