"""Hollow tensors: they look like other tensors, and their storage has no bytes. A recipe says how to make the bytes.

The storage owns the recipe. So what the recipe needs stays in memory as long as anybody holds the hollow tensor or a view of
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_memopt.device.backends import backend_of, current_stream
from lightning_memopt.native.engine import loaded
from lightning_memopt.record.tensors import PLAIN
from lightning_memopt.torch_private import OpOverload


class Recipe(Protocol):
    """How the bytes of a hollow tensor are made.

    like: a tensor of its sizes, strides and dtype, on the meta device.
    device: the device of its bytes.
    stream: where they are made; None on the CPU.
    address: that of its storage, set by the native engine; None if that was freed, or has its bytes.
    """

    like: Any
    device: torch.device
    stream: Any
    address: int | None


_UNREAD = (
    "MemOpt computes this tensor tile by tile, and its bytes were read in a way that MemOpt does not see. Read it by an op of "
    "torch before (x.clone()), or set tile='off'."
)


def recipe_of(t: torch.Tensor) -> Any:
    """The recipe of a hollow tensor; None for other tensors."""
    return loaded().recipe(t) if type(t) in PLAIN else None


def twin(t: torch.Tensor) -> torch.Tensor:
    """A tensor with the sizes, strides and dtype of `t`, on the meta device."""
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")


def hollow(recipe: Recipe) -> torch.Tensor:
    """A hollow tensor, which has the result of the recipe."""
    made: torch.Tensor = loaded().hollow(recipe.like, recipe.device, _UNREAD, recipe)
    return made


def view_of(t: torch.Tensor, func: OpOverload, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The view of the hollow tensor `t` that an op gives; None if the op gives something else. `t` is its first argument."""
    base = twin(t)
    like = func(base, *args[1:], **kwargs)
    if not isinstance(like, torch.Tensor) or like.dtype != t.dtype or like.untyped_storage() is not base.untyped_storage():
        return None
    if like.is_neg() or like.is_conj():  # a view of the bytes has the bit for it
        return None
    view: torch.Tensor = loaded().hollow_view(t, like, t.storage_offset() + like.storage_offset())
    return view


def set_recipe(t: torch.Tensor, recipe: Recipe) -> None:
    """The hollow tensor `t` has the result of this recipe from now on."""
    loaded().set_recipe(t, recipe)


def fill(recipe: Recipe, make: Callable[[], torch.Tensor]) -> int:
    """The hollow tensor of a recipe gets the bytes that `make` gives. Returns a weak reference to its storage, which the caller
    frees. Call below autograd.

    They are made where the plain op would have made them, and the current stream waits for that.
    """
    now = current_stream(recipe.device)
    with contextlib.nullcontext() if now == recipe.stream else backend_of(recipe.device).streams.stream(recipe.stream):
        reference: int = loaded().fill(recipe, make())
    if now != recipe.stream:
        now.wait_stream(recipe.stream)
    return reference
