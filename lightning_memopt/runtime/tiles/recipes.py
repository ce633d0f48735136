"""How tensors of a loss head are computed: whole, or for a tile of rows or of columns.

A recipe has an op and its arguments, of which some are results of other recipes. Its result has as many rows as there are
tokens and as many columns as there are classes, whatever the sizes of its leading dimensions. Computing a tile runs the ops of
all recipes on which it depends, on that tile. The kernels are those of the whole op, so an entry usually gets the same bits;
`Proof` (mode.py) compares them before tiles are used.

Rows are independent in every op here. Columns are not: a softmax needs its whole row. What a tile of columns needs of the rest
of the row are three numbers: the row's maximum, the logarithm of its sum of exponentials, and the sum of its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from lightning_memopt.runtime.tiles.hollow import twin
from lightning_memopt.torch_private import OpOverload

_ATEN = torch.ops.aten
_PAD = 16
"""Columns added to a tile for the sum of the gradients of the other columns. Kernels work on vectors of at most so many."""
_NEGLIGIBLE = -1e9
"""A log-probability whose exponential is 0."""


class Span(NamedTuple):
    """A tile: some rows with all columns, or some columns with all rows.

    first, end: the rows or columns `first .. end - 1`.
    columns: whether they are columns.
    """

    first: int
    end: int
    columns: bool = False

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The part of a matrix."""
        return t[:, self.first : self.end] if self.columns else t[self.first : self.end]


class Seen(NamedTuple):
    """An argument that is a view of a recipe's result, as the op got it."""

    recipe: Recipe
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_whole(self) -> bool:
        """Whether it has the columns of the result as its last dimension, and all its rows in order."""
        if not self.size or self.size[-1] != self.recipe.columns or self.offset:
            return False
        return prod(self.size) == self.recipe.rows * self.recipe.columns and self.stride == _contiguous(self.size)

    @property
    def is_transposed(self) -> bool:
        """Whether it is the transposed matrix."""
        r = self.recipe
        return (self.size, self.stride, self.offset) == ((r.columns, r.rows), (1, r.columns), 0)


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = list[int](), 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def seen(value: Any, of: Callable[[torch.Tensor], Recipe | None]) -> Any:
    """The argument of an op, with `Seen` instead of each tensor that has a recipe. `of`: gives the recipe of a tensor."""
    if isinstance(value, torch.Tensor):
        recipe = of(value)
        if recipe is None:
            return value
        return Seen(recipe, tuple(value.size()), tuple(value.stride()), int(value.storage_offset()))
    if type(value) in (list, tuple):
        return [seen(v, of) for v in value]
    return value


def seen_in(values: Iterable[Any]) -> list[Seen]:
    """The views of recipes' results among arguments."""
    found = []
    for value in values:
        if type(value) is Seen:
            found.append(value)
        elif type(value) is list:
            found += seen_in(value)
    return found


class Recipe:
    """The result of an op, not computed.

    func, args, kwargs: the op and its arguments (`seen`).
    rows, columns: the sizes of the result as a matrix.
    like: a tensor of its sizes, strides and dtype, on the meta device.
    device: the device of its bytes.
    address: that of the storage that has no bytes yet; None if there is none, or none any more.
    """

    __slots__ = ("__weakref__", "address", "args", "columns", "device", "func", "kwargs", "like", "rows")

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device, like: Any) -> None:
        self.func = func
        self.args = tuple(args)
        self.kwargs = kwargs
        self.device = device
        self.like = like
        self.columns = int(like.size(-1))
        self.rows = like.numel() // max(1, self.columns)
        self.address: int | None = None

    @property
    def parents(self) -> list[Recipe]:
        """The recipes whose results it reads, once for each time that it reads one."""
        return [s.recipe for s in seen_in((*self.args, *self.kwargs.values()))]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with bytes among its arguments."""
        return [t for t in (*self.args, *self.kwargs.values()) if isinstance(t, torch.Tensor)]

    def whole(self) -> torch.Tensor:
        """All of its bytes, on a storage of their own. Call below autograd."""
        result = run_whole(self.func, self.args, self.kwargs)
        assert isinstance(result, torch.Tensor)
        return result

    def tile(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        """The tile `span` as a matrix. `make` gives the same tile of a parent."""
        raise NotImplementedError


def run_whole(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op on whole tensors, which are made for it. Call below autograd."""
    made: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if type(value) is list:
            return [real(v) for v in value]
        if type(value) is not Seen:
            return value
        if id(value.recipe) not in made:
            made[id(value.recipe)] = value.recipe.whole()
        return made[id(value.recipe)].as_strided(value.size, value.stride, value.offset)

    return func(*map(real, args), **{k: real(v) for k, v in kwargs.items()})


class Product(Recipe):
    """Logits: `x @ w`, or `bias + x @ w`."""

    __slots__ = ()

    def tile(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        *bias, x, w = self.args
        if span.columns:
            return self._on([span.of(b[None])[0] for b in bias], x, span.of(w))
        return self._on(bias, span.of(x), w)

    def _on(self, bias: Sequence[torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.func(*bias, x, w, **self.kwargs)
        return result


class Pointwise(Recipe):
    """An op that works on each entry alone: a cast, a copy, a scale, soft-capping."""

    __slots__ = ()

    def tile(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        def part(value: Any) -> Any:
            if type(value) is Seen:
                return make(value.recipe)
            if isinstance(value, torch.Tensor) and value.dim():
                return span.of(value.expand(self.like.size()).reshape(self.rows, self.columns))
            return value

        result: torch.Tensor = self.func(*map(part, self.args), **{k: part(v) for k, v in self.kwargs.items()})
        return result


class LogSoftmax(Recipe):
    """The logarithm of the softmax over the columns.

    top, log_sum: per row, the maximum, and the logarithm of the sum of exponentials, as (rows, 1); None until `note` has run.
    """

    __slots__ = ("log_sum", "top")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.top: torch.Tensor | None = None
        self.log_sum: torch.Tensor | None = None

    def note(self, span: Span, x: torch.Tensor, result: torch.Tensor) -> None:
        """Note the numbers of these rows. `x`, `result`: the tile that the op reads, and the one that it makes."""
        if self.top is None or self.log_sum is None:
            self.top, self.log_sum = (torch.empty(self.rows, 1, dtype=result.dtype, device=self.device) for _ in range(2))
        at = x.argmax(1, keepdim=True)
        span.of(self.top).copy_(x.gather(1, at))
        torch.neg(result.gather(1, at), out=span.of(self.log_sum))

    def tile(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        if not span.columns:
            result: torch.Tensor = self.func(make(self.parents[0]), 1, *self.args[2:], **self.kwargs)
            return result
        return self.padded(make, span)[:, : span.end - span.first]

    def padded(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        """A tile of columns, followed by columns that have no probability."""
        assert self.top is not None and self.log_sum is not None, "the rows have run before"
        n = span.end - span.first
        made = torch.empty(self.rows, n + _PAD, dtype=self.like.dtype, device=self.device)
        made[:, n:] = _NEGLIGIBLE
        made[:, :n].copy_(make(self.parents[0])).sub_(self.top).sub_(self.log_sum)  # as the kernel computes it, in this order
        return made


class LossGradient(Recipe):
    """The gradient of the negative log-likelihood of each row's target: one number a row, and zeros."""

    __slots__ = ()

    def tile(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        gradient, _, target, weight, reduction, ignored, total = self.args
        if span.columns:
            padded = torch.zeros(self.rows, span.end - span.first + _PAD, dtype=self.like.dtype, device=self.device)
            at = target - span.first
            inside = (at >= 0) & (at < span.end - span.first)
            at = torch.where(inside, at, span.end - span.first)
            return padded.scatter_(1, at[:, None], self.of_targets())
        if gradient.dim():
            gradient = span.of(gradient)
        shape = self._shape(span.end - span.first, self.columns)
        result: torch.Tensor = self.func(gradient, shape, span.of(target), weight, reduction, ignored, total)
        return result

    def of_targets(self) -> torch.Tensor:
        """The gradient at each row's target, as (rows, 1): the op on matrices of one column."""
        gradient, _, target, weight, reduction, ignored, total = self.args
        shape = self._shape(self.rows, 1)
        result: torch.Tensor = self.func(gradient, shape, alone(target, ignored), weight, reduction, ignored, total)
        return result

    def _shape(self, rows: int, columns: int) -> torch.Tensor:
        """Scores of these sizes: the op reads nothing else of them."""
        return torch.empty(1, 1, dtype=self.like.dtype, device=self.device).expand(rows, columns)

    @property
    def parents(self) -> list[Recipe]:
        return []


class LogSoftmaxGradient(Recipe):
    """The gradient of what `LogSoftmax` reads."""

    __slots__ = ()

    def tile(self, make: Callable[[Recipe], torch.Tensor], span: Span) -> torch.Tensor:
        gradient, scores, _, dtype = self.args
        # for a tile of columns: the kernel adds up the gradients of a row, and those of other columns are in the padding
        of_scores = scores.recipe.padded(make, span) if span.columns else make(scores.recipe)
        result: torch.Tensor = self.func(make(gradient.recipe), of_scores, 1, dtype)
        return result[:, : span.end - span.first] if span.columns else result


def alone(target: torch.Tensor, ignored: int) -> torch.Tensor:
    """The targets in a matrix that has only the column of each row's target: 0, or `ignored`."""
    return torch.where(target == ignored, target, 0)


def around(recipe: Recipe) -> list[Recipe]:
    """The recipe, and all on which it depends."""
    found, waiting = dict[int, Recipe](), [recipe]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += [s.recipe for s in seen_in((*each.args, *each.kwargs.values()))]
    return list(found.values())


class _Tiles:
    """One tile of several recipes. What no op needs any more is freed at once."""

    def __init__(self, wanted: Sequence[Recipe], span: Span) -> None:
        self._span = span
        self._left = Counter(map(id, wanted))
        self._made: dict[int, torch.Tensor] = {}
        known, waiting = set[int](), list(wanted)
        while waiting:
            recipe = waiting.pop()
            if id(recipe) not in known:
                known.add(id(recipe))
                self._left.update(map(id, recipe.parents))
                waiting += recipe.parents

    def make(self, recipe: Recipe) -> torch.Tensor:
        made = self._made.get(id(recipe))
        if made is None:
            made = self._made[id(recipe)] = recipe.tile(self.make, self._span)
        self._left[id(recipe)] -= 1
        if not self._left[id(recipe)]:
            del self._made[id(recipe)]
        return made


def tiles(wanted: Sequence[Recipe], span: Span) -> list[torch.Tensor]:
    """This tile of these recipes, as matrices."""
    made = _Tiles(wanted, span)
    return [made.make(recipe) for recipe in wanted]


_POINTWISE = {"_to_copy", "clone"}
"""Ops on each entry alone that do not have torch's tag for it."""


def recipe_for(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Recipe | None:
    """The recipe of the result of an op that reads results of recipes; None if it cannot run on tiles. `args`: as `seen` gives
    them.
    """
    given = seen_in((*args, *kwargs.values()))
    first = given[0].recipe
    if not all(s.is_whole and (s.recipe.rows, s.recipe.columns) == (first.rows, first.columns) for s in given):
        return None
    if func is _ATEN._log_softmax.default:
        kind: type[Recipe] | None = LogSoftmax if args[1] in (-1, len(given[0].size) - 1) else None
    elif func is _ATEN._log_softmax_backward_data.default:
        both = len(given) == 2 and isinstance(given[0].recipe, LossGradient) and isinstance(given[1].recipe, LogSoftmax)
        kind = LogSoftmaxGradient if both and args[2] in (-1, len(given[0].size) - 1) else None
    elif func is _ATEN.nll_loss_backward.default:
        kind = LossGradient if may_be_lost(args[1:]) and len(given) == 1 else None
    else:
        padded = any(isinstance(s.recipe, LossGradient) for s in given)  # its tiles of columns are padded
        kind = Pointwise if _is_pointwise(func) and not padded else None
    if kind is None:
        return None
    like = func(*(_meta(a) for a in args), **{k: _meta(v) for k, v in kwargs.items() if k != "device"})
    if not isinstance(like, torch.Tensor) or not like.is_contiguous() or like.size(-1) != first.columns:
        return None
    made = kind(func, args, kwargs, device, like)
    return made if made.rows == first.rows else None


def may_be_lost(args: Sequence[Any]) -> bool:
    """Whether the arguments of a negative log-likelihood, from the scores on, are those of one that runs on tiles: a target for
    each row, and no weights of classes.
    """
    scores, target, weight = args[:3]
    return type(scores) is Seen and len(scores.size) == 2 and weight is None and isinstance(target, torch.Tensor)


def _is_pointwise(func: OpOverload) -> bool:
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return torch.Tag.pointwise in func.tags or func._overloadpacket.__name__ in _POINTWISE


def _meta(value: Any) -> Any:
    if type(value) is Seen:
        return torch.empty_strided(value.size, value.stride, dtype=value.recipe.like.dtype, device="meta")
    if isinstance(value, torch.Tensor):
        return value if value.dim() == 0 and value.is_cpu else twin(value)
    if type(value) is list:
        return [_meta(v) for v in value]
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


def device_in(values: Iterable[Any]) -> torch.device:
    """The device of an op: that of the first recipe's result among its arguments."""
    return next(s.recipe.device for s in seen_in(values))
