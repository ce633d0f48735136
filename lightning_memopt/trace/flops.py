"""Count the floating-point operations of an op by torch's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_memopt.torch_private import OpOverload

_OF_SHAPES = flop_registry[torch.ops.aten.mm].__code__
"""The code of the wrapper that torch puts around its formulas. It maps whole trees, which takes longer than most ops."""


class Flops:
    """The formulas of a step's ops, by the identity of the op, because hashing an op runs Python code of torch."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[OpOverload, Callable[..., Any] | None]] = {}
        self.without: set[int] = set()
        """Identities of known ops that have no formula."""
        self._of_shapes: dict[tuple[Any, ...], int] = {}
        """Identity of an op, and the shapes of a call -> its operations."""

    def of(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
        """The operations of one call; 0 if there is no formula."""
        entry = self._known.get(id(func))
        if entry is None:
            entry = self._known[id(func)] = func, flop_registry.get(func._overloadpacket)
        formula: Any = entry[1]
        if formula is None:
            self.without.add(id(func))
            return 0
        if getattr(formula, "__code__", None) is not _OF_SHAPES:
            return int(formula(*args, **kwargs, out_val=out))
        shapes, result = [_shape(value) for value in args], _shape(out)
        key = (id(func), repr(shapes), repr(result)) if not kwargs else None
        known = None if key is None else self._of_shapes.get(key)
        if known is not None:
            return known
        named = {name: _shape(value) for name, value in kwargs.items()}
        flops = int(formula.__wrapped__(*shapes, **named, out_shape=result))
        if key is not None:
            self._of_shapes[key] = flops
        return flops


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return type(value)([_shape(v) for v in value]) if type(value) in (list, tuple) else value
