"""Sizes in a joint graph. With dynamic shapes they are symbolic expressions. A plan is made for the sizes of the batch that the
region was compiled for.

Nothing here compares symbols: that would add a guard, and the code would serve fewer batches.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.torch_private import hint_of

_SYMBOL = re.compile(r"\b[su]+\d+\b")


class UnreadableError(UnsupportedError):
    """The region cannot be planned; the text says why.

    Remedy: change what the text names in the compiled code, or leave that part eager.
    """


def number(size: int | torch.SymInt) -> int:
    """A size as a number, for the batch that the region was compiled for. Raises UnreadableError if it depends on values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = hint_of(size)
    if hint is None:
        raise UnreadableError("its sizes depend on values (nonzero, masks as indices, while_loop)")
    return hint


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind a fake tensor."""
    return number(tensor.untyped_storage().nbytes())


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def symbols_of(value: Any) -> list[Any]:
    """The symbolic numbers in the results of a node, including those in sizes and strides."""
    leaves = pytree.tree_leaves(value)
    leaves += [size for t in tensors_of(value) for size in (*t.shape, *t.stride())]
    return [leaf for leaf in leaves if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)]


def with_numbers(value: Any) -> Any:
    """The results of a node with numbers instead of symbols, because formulas for FLOPs compare sizes."""

    def tensor(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided([*map(number, t.shape)], [*map(number, t.stride())], dtype=t.dtype, device="meta")

    value = pytree.tree_map_only(torch.Tensor, lambda t: tensor(t) if symbols_of(t) else t, value)
    return pytree.tree_map_only(torch.SymInt, number, value)


class Signature:
    """Describes sizes so that two compilations of the same code give the same text, even if they name their symbols
    differently.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def of(self, node: fx.Node) -> str:
        sizes = [str(t.untyped_storage().nbytes()) for t in tensors_of(node.meta.get("val"))]
        return _SYMBOL.sub(lambda m: self._names.setdefault(m[0], f"n{len(self._names)}"), " ".join(sizes))
