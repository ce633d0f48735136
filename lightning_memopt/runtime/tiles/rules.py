"""Which ops have recipes: for each op that reads results of recipes, the kind of recipe of its own result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from lightning_memopt.record.tensors import tensors_in
from lightning_memopt.runtime.tiles.hollow import twin
from lightning_memopt.runtime.tiles.kinds import (
    LogSoftmax,
    LogSoftmaxGradient,
    LossGradient,
    Placed,
    Pointwise,
    Product,
    Rowwise,
    Scatter,
    Zeros,
)
from lightning_memopt.runtime.tiles.recipes import Recipe, Seen, dtype_name, numbers_of, seen_in
from lightning_memopt.torch_private import OpOverload

_ATEN = torch.ops.aten
Kind = Callable[..., Recipe]
_POINTWISE = {"_to_copy", "clone", "masked_fill"}
"""Ops on each entry alone that do not have torch's tag for it."""
_ROWWISE = {
    _ATEN._softmax.default: 1,
    _ATEN._softmax_backward_data.default: 2,
    _ATEN._log_softmax_backward_data.default: 2,
}
"""Ops on each row alone whose results have as many columns -> which argument is the dimension."""
_SCATTERS = (_ATEN.scatter.src, _ATEN.scatter.value, _ATEN.scatter_add.default)
_REDUCING = {
    _ATEN.argmax.default: 1,
    _ATEN.argmin.default: 1,
    _ATEN.max.dim: 1,
    _ATEN.min.dim: 1,
    _ATEN.amax.default: 1,
    _ATEN.amin.default: 1,
    _ATEN.topk.default: 2,
    _ATEN.logsumexp.default: 1,
    _ATEN.sum.dim_IntList: 1,
    _ATEN.mean.dim: 1,
    _ATEN.gather.default: 1,
}
"""Ops on each row alone that make something smaller -> which argument is the dimension."""
_PLACED = (_ATEN.slice_backward.default, _ATEN.select_backward.default)
_DEEPEST = 64
"""Maximum number of recipes that depend on each other: a tile calls one inside of another."""
_ZEROS = (_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default)


def recipe_for(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Recipe | None:
    """The recipe of the result of an op that reads results of recipes; None if it cannot run on tiles. `args`: as `seen` gives
    them. An op that writes to its first argument has the recipe of the op that makes a new tensor instead.
    """
    given = seen_in((*args, *kwargs.values()))
    first = given[0]
    if not all(s.has_rows and (s.rows, s.recipe.columns) == (first.rows, first.recipe.columns) for s in given):
        return None
    if kwargs.get("device") not in (None, device) or any(
        t.layout != torch.strided for t in tensors_in((*args, *kwargs.values()))
    ):
        return None
    writes = func._schema.is_mutable
    made_by = _making_a_new_tensor(func) if writes else func
    if made_by is None or (writes and (args[0] is not first or not first.is_whole)):
        return None
    kind = _kind(made_by, args, given)
    if kind is None:
        return None
    try:
        like = made_by(*(meta(a) for a in args), **{k: meta(v) for k, v in kwargs.items() if k != "device"})
    except Exception:  # the op refuses its arguments, or does not know this device: it runs as it is
        return None
    if not isinstance(like, torch.Tensor) or not like.is_contiguous() or like.size(-1) != first.recipe.columns:
        return None
    if writes and like.dtype != first.recipe.like.dtype:
        return None
    made = kind(made_by, args, kwargs, device, like)
    return made if made.depth <= _DEEPEST and (made.rows == first.rows or isinstance(made, Placed)) else None


def _kind(func: OpOverload, args: Sequence[Any], given: Sequence[Seen]) -> Kind | None:
    if func is _ATEN._log_softmax.default:
        return LogSoftmax if _is_last(args[1], given[0]) else None
    if func is _ATEN._log_softmax_backward_data.default and len(given) == 2 and given[1].is_whole:
        return LogSoftmaxGradient if _is_last(args[2], given[0]) else None
    if func is _ATEN.nll_loss_backward.default:
        return LossGradient if may_be_lost(args[1:]) and len(given) == 1 else None
    if func in _PLACED:
        return Placed if args[2] % len(args[1]) < len(args[1]) - 1 and args[1][-1] == given[0].recipe.columns else None
    if func in _ROWWISE:
        return partial(Rowwise, _ROWWISE[func]) if _is_along_rows(args, _ROWWISE[func], given[0]) else None
    if func in _SCATTERS:
        return partial(Scatter, 1) if _is_along_rows(args, 1, given[0]) else None
    return Pointwise if _is_pointwise(func) else None


def reducing(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Which argument is the dimension, if the op makes something smaller of each row; None for other ops."""
    at = _REDUCING.get(func)
    first = args[0] if args else None
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()) or seen_in(kwargs.values()):
        return None
    if at is None or type(first) is not Seen or not first.has_rows or len(args) <= at:
        return None
    return at if _is_along_rows(args, at, first) else None


def _is_along_rows(args: Sequence[Any], dim_at: int, first: Seen) -> bool:
    """Whether an op works along the last dimension of its arguments, and all have the same other dimensions."""
    others = [a.size if type(a) is Seen else tuple(a.size()) for a in args if type(a) is Seen or _is_matrix(a)]
    return _is_last(args[dim_at], first) and all(size[:-1] == first.size[:-1] for size in others)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_last(dim: Any, of: Seen) -> bool:
    return dim in (-1, len(of.size) - 1, [-1], [len(of.size) - 1])


def name_of(func: OpOverload, values: Iterable[Any] = ()) -> str:
    """The name by which an op on these arguments (`seen`) is compared with tiles: that of the op that makes a new tensor, and
    what may choose another kernel: the rows that it reads, their dtype, and numbers (`numbers_of`).
    """
    made = _making_a_new_tensor(func) if func._schema.is_mutable else None
    values = tuple(values)
    reads = "".join(f" {dtype_name(s.recipe)}{s.which}" for s in seen_in(values))
    return (made or func)._name + reads + (numbers_of(func, values) if _is_pointwise(func) else "")


def name_of_product(product: Recipe) -> str:
    """The name by which the product that makes logits is compared with tiles."""
    return f"{name_of(product.func)} {dtype_name(product)} of {product.args[-2].size(1)}"


def _making_a_new_tensor(func: OpOverload) -> OpOverload | None:
    """The op that makes a new tensor of what this one writes to its first argument; None if there is none."""
    name = func._overloadpacket.__name__
    packet = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, None)


def may_be_lost(args: Sequence[Any]) -> bool:
    """Whether the arguments of a negative log-likelihood, from the scores on, are those of one that runs on tiles: a target for
    each row, and no weights of classes.
    """
    scores, target, weight = args[:3]
    return (
        type(scores) is Seen
        and len(scores.size) == 2
        and weight is None
        and isinstance(target, torch.Tensor)
        and target.dtype == torch.int64
    )


def _is_pointwise(func: OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return torch.Tag.pointwise in func.tags or func._overloadpacket.__name__ in _POINTWISE


def meta(value: Any) -> Any:
    """An argument (`seen`) on the meta device."""
    if type(value) is Seen:
        return torch.empty_strided(value.size, value.stride, dtype=value.recipe.like.dtype, device="meta")
    if isinstance(value, torch.Tensor):
        return value if value.dim() == 0 and value.is_cpu else twin(value)
    if type(value) is list:
        return [meta(v) for v in value]
    return value


def product_for(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    """The recipe of a product of matrices that makes logits; None for other ops."""
    if func not in (_ATEN.mm.default, _ATEN.addmm.default):
        return None
    if any(t.dim() != 2 for t in args[-2:]) or (len(args) == 3 and args[0].dim() != 1):
        return None
    x, w = args[-2:]
    if not x.size(0):
        return None
    like = torch.empty(x.size(0), w.size(1), dtype=x.dtype, device="meta")
    return Product(func, args, kwargs, x.device, like)


def zeros_for(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], rows: Iterable[int], columns: int) -> Zeros | None:
    """The recipe of zeros that have so many columns, and one of these numbers of rows; None for other ops."""
    if func not in _ZEROS:
        return None
    size = args[-1].size() if isinstance(args[-1], torch.Tensor) else args[-1]
    if len(size) < 2 or size[-1] != columns or prod(size[:-1]) not in rows:
        return None
    if kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return None
    like = func(*map(meta, args), **{k: v for k, v in kwargs.items() if k != "device"} | {"device": "meta"})
    if not like.is_contiguous():
        return None
    given = kwargs.get("device")
    if given is None:
        device = args[0].device if isinstance(args[0], torch.Tensor) else torch.get_default_device()
    else:
        device = torch.device(given)
    return None if device == like.device else Zeros(func, (), {}, device, like)  # zeros on the meta device stay there


def device_in(values: Iterable[Any]) -> torch.device:
    """The device of an op: that of the first recipe's result among its arguments."""
    return next(s.recipe.device for s in seen_in(values))
