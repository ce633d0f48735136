"""Floating-point operations of an op, by the formulas that torch has of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_memopt.torch_private import OpOverload

_OF_SHAPES = flop_registry[torch.ops.aten.mm].__code__
"""The code of the wrapper that torch puts around formulas of shapes. It maps whole trees, which takes longer than most ops."""


def flops_of(func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """The operations of one call; 0 where there is no formula."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    if getattr(formula, "__code__", None) is not _OF_SHAPES:
        return int(formula(*args, **kwargs, out_val=out))
    return int(
        formula.__wrapped__(*_shapes(args), **dict(zip(kwargs, _shapes(kwargs.values()), strict=True)), out_shape=_shape(out))
    )


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return type(value)(_shapes(value)) if type(value) in (list, tuple) else value


def _shapes(values: Any) -> list[Any]:
    return [_shape(value) for value in values]
