"""How many hold a value of a dict: state that others hold is not parked."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch

from lightning_memopt.torch_private import storage_id, storage_use_count, tensor_use_count


def held_by(step: FrameType) -> Counter[int]:
    """Identity of a value -> how often the variables of this frame, and the lists in them, hold it."""
    held: Counter[int] = Counter()
    variables = step.f_locals
    times = 2 if variables is step.f_locals else 1  # until Python 3.12 the frame keeps this dict, which holds them, too
    for value in variables.values():
        held[id(value)] += times
        if type(value) is list:
            held.update(map(id, value))
    return held


def references(holder: dict[Any, Any], name: Any) -> int:
    """How many hold a value of this dict."""
    return sys.getrefcount(dict.__getitem__(holder, name))


def use_counts(holder: dict[Any, Any], name: Any) -> tuple[int, int, int]:
    """How many hold a value of this dict, its tensor in C++, and its storage."""
    t = dict.__getitem__(holder, name)
    t.untyped_storage()  # once Python has seen a storage, it counts as one that holds it
    return references(holder, name) - 1, tensor_use_count(t), storage_use_count(storage_id(t))


ALONE = use_counts({0: torch.empty(1)}, 0)
"""`use_counts` of a tensor that nothing else holds."""
