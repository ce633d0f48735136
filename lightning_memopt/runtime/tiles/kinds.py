"""The kinds of recipes: how each makes a tile.

Rows are independent of each other in every op here. Columns are not: a softmax needs its whole row. What a tile of columns
needs of the rest of the row are three numbers: the row's maximum, the logarithm of its sum of exponentials, and the sum of its
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_memopt.runtime.tiles.recipes import Make, Recipe, Seen, Span, rows_at, spans, tiles
from lightning_memopt.torch_private import OpOverload

_PAD = 16
"""Columns added to a tile for what belongs to the other columns of the row. Kernels work on vectors of at most so many."""
_INDEX_PARTS = 16
"""Tiles of columns need at least so many columns for each entry of a row that is written."""
_NEGLIGIBLE = -1e9
"""A log-probability whose exponential is 0."""


class Product(Recipe):
    """Logits: `x @ w`, or `bias + x @ w`."""

    __slots__ = ()

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        *bias, x, w = self.args
        if span.columns:
            return self._on([span.of(b[None])[0] for b in bias], x, span.of(w))
        return self._on(bias, span.of(x), w)

    def _on(self, bias: Sequence[torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.func(*bias, x, w, **self.kwargs)
        return result


class Whole(Recipe):
    """The result of a recipe that is there, and of which tiles are taken."""

    __slots__ = ("_result",)

    def __init__(self, recipe: Recipe, result: torch.Tensor) -> None:
        super().__init__(recipe.func, (), {}, recipe.device, recipe.like)
        self._result = result
        self.by_columns = True

    def computed(self, made: dict[int, torch.Tensor]) -> Any:
        return self._result

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        return span.of(self._result.view(self.rows, self.columns))


class Zeros(Recipe):
    """Zeros, into which an op will write. It keeps no arguments."""

    __slots__ = ()

    def computed(self, made: dict[int, torch.Tensor]) -> Any:
        return torch.zeros(self.like.size(), dtype=self.like.dtype, device=self.device)

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        size = (self.rows, span.n) if span.columns else (span.n, self.columns)
        return torch.zeros(size, dtype=self.like.dtype, device=self.device)


class Pointwise(Recipe):
    """An op that works on each entry alone: a cast, a copy, a scale, soft-capping."""

    __slots__ = ()

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        def part(value: Any) -> Any:
            if type(value) is Seen:
                return make(value)
            if isinstance(value, torch.Tensor) and value.dim():
                return span.across(value, self.like.size())
            return value

        result: torch.Tensor = self.func(*map(part, self.args), **{k: part(v) for k, v in self.kwargs.items()})
        return result


class Rowwise(Recipe):
    """An op that works on each row alone: a softmax, the gradient of one, a scatter."""

    __slots__ = ("_dim_at",)

    def __init__(self, dim_at: int, *given: Any) -> None:
        """`dim_at`: which argument is the dimension."""
        super().__init__(*given)
        self._dim_at = dim_at
        self.by_columns = False

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        result: torch.Tensor = on_rows(self.func, self.args, self.kwargs, self._dim_at, make, span)
        return result


def on_rows(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], dim_at: int, make: Make, span: Span) -> Any:
    """The results of an op along the rows, for a tile of rows. `dim_at`: which argument is the dimension."""

    def part(value: Any) -> Any:
        if type(value) is Seen:
            return make(value)
        if isinstance(value, torch.Tensor) and value.dim():
            return span.across(value, value.size())
        return value

    given = [part(a) for a in args]
    given[dim_at] = [1] if type(args[dim_at]) is list else 1
    return func(*given, **{k: part(v) for k, v in kwargs.items()})


class Scatter(Rowwise):
    """An op that writes to some entries of each row, or adds to them: a scatter."""

    __slots__ = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        to, _, index = self.args[:3]
        reads_only_it = type(to) is Seen and len(self.reads) == 1
        # a tile of columns takes an index of all rows
        self.by_columns = reads_only_it and to.recipe.by_columns and index.size(-1) * _INDEX_PARTS <= self.columns

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        if not span.columns:
            return super().tile(make, span)
        to, _, index, values = self.args
        if isinstance(values, torch.Tensor) and values.dim():
            values = values.flatten(0, -2)
        result: torch.Tensor = self.func(_widened(make(to), 0), 1, _places(index.flatten(0, -2), span), values, **self.kwargs)
        return result[:, : span.n]


class Noting(Recipe):
    """A recipe whose tiles of columns need numbers of each row, which are noted before."""

    __slots__ = ()

    @property
    def is_noted(self) -> bool:
        """Whether the numbers of all rows are known."""
        raise NotImplementedError

    def note(self, size: int) -> None:
        """Note them, in tiles of `size` rows."""
        raise NotImplementedError

    def _numbers(self) -> torch.Tensor:
        """A number for each row, to be written; as (rows, 1)."""
        return torch.empty(self.rows, 1, dtype=self.like.dtype, device=self.device)


class LogSoftmax(Noting):
    """The logarithm of the softmax over the columns.

    top, log_sum: per row, the maximum, and the logarithm of the sum of exponentials, as (rows, 1); None until `expect`. They
    are noted while all tiles of rows are made.
    """

    __slots__ = ("_next", "log_sum", "top")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.by_columns = self.by_columns and _is_exact(self)
        self.top: torch.Tensor | None = None
        self.log_sum: torch.Tensor | None = None
        self._next = self.rows  # the first row without numbers

    def expect(self) -> None:
        """Tiles of all rows are about to be made, one by one: note their numbers."""
        self.top, self.log_sum = self._numbers(), self._numbers()
        self._next = 0

    @property
    def is_noted(self) -> bool:
        return self.top is not None and self._next == self.rows

    def note(self, size: int) -> None:
        self.expect()
        for span in spans(self.rows, size):
            tiles([self.all], span)

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        if span.columns:
            return self.padded(make, span)[:, : span.n]
        x = make(self.reads[0])
        result: torch.Tensor = self.func(x, 1, *self.args[2:], **self.kwargs)
        if span.first == self._next < self.rows and span.chosen is None:
            self._note(span, x, result)
        return result

    def _note(self, span: Span, x: torch.Tensor, result: torch.Tensor) -> None:
        assert self.top is not None
        assert self.log_sum is not None
        at = x.argmax(1, keepdim=True)
        span.of(self.top).copy_(x.gather(1, at))
        torch.mul(result.gather(1, at), -1, out=span.of(self.log_sum))  # unlike `neg`, it keeps the sign of nan
        self._next = span.end

    def padded(self, make: Make, span: Span) -> torch.Tensor:
        """A tile of columns, followed by columns that have no probability."""
        assert self.is_noted, "the rows have run before"
        made = torch.empty(self.rows, span.n + _PAD, dtype=self.like.dtype, device=self.device)
        made[:, span.n :] = _NEGLIGIBLE
        # as the kernel computes it, in this order
        made[:, : span.n].copy_(make(self.reads[0])).sub_(self.top).sub_(self.log_sum)  # type: ignore[arg-type]
        return made


class LossGradient(Recipe):
    """The gradient of the negative log-likelihood of each row's target: one number a row, and zeros."""

    __slots__ = ()

    def computed(self, made: dict[int, torch.Tensor]) -> Any:
        def unread(_: Seen) -> torch.Tensor:
            raise AssertionError("it reads no scores")

        return self.tile(unread, Span(0, self.rows))

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        if span.columns:
            return self.padded(span)[:, : span.n]
        gradient, _, target, weight, reduction, ignored, total = self.args
        if gradient.dim():
            gradient = span.of(gradient)
        shape = self._shape(span.n, self.columns)
        result: torch.Tensor = self.func(gradient, shape, span.of(target), weight, reduction, ignored, total)
        return result

    def padded(self, span: Span) -> torch.Tensor:
        """A tile of columns, followed by columns of which the first one has the gradients of targets in other columns."""
        target = self.args[2]
        made = torch.zeros(self.rows, span.n + _PAD, dtype=self.like.dtype, device=self.device)
        return made.scatter_(1, _places(target, span)[:, None], self.of_targets())

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
    def reads(self) -> list[Seen]:
        return []


class LogSoftmaxGradient(Noting):
    """The gradient of what `LogSoftmax` reads: `g - exp(scores) * sum(g)`, where `g` is the gradient of the scores.

    sums: per row, the sum of `g`, as the kernel adds it up, as (rows, 1); None until `note`.
    """

    __slots__ = ("sums",)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        gradient, scores = (self.args[i].recipe for i in range(2))
        alike = gradient.like.dtype == scores.like.dtype == self.like.dtype
        noted = self._loss is not None or (alike and _is_exact(self))
        self.by_columns = self.by_columns and isinstance(scores, LogSoftmax) and noted
        self.sums: torch.Tensor | None = None

    @property
    def is_noted(self) -> bool:
        return self._loss is not None or self.sums is not None

    @property
    def _loss(self) -> LossGradient | None:
        """Where `g` comes from, if it is a loss of one target a row: then the padding of each tile has the rest of the sum."""
        gradient = self.args[0]
        return gradient.recipe if isinstance(gradient.recipe, LossGradient) and gradient.is_whole else None

    def note(self, size: int) -> None:
        gradient, _, _, dtype = self.args
        sums = self._numbers()
        for span in spans(self.rows, size):
            # where g is -0 and the score is 0, the result is the sum, negated. Adding -0 changes no number.
            wide = _widened(tiles([gradient], span)[0], -0.0)
            torch.mul(self.func(wide, torch.zeros_like(wide), 1, dtype)[:, -1:], -1, out=span.of(sums))  # keeps the sign of nan
        self.sums = sums

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        gradient, scores, _, dtype = self.args
        if not span.columns:
            of_rows: torch.Tensor = self.func(make(gradient), make(scores), 1, dtype)
            return of_rows
        if self._loss is not None:
            of_loss: torch.Tensor = self.func(self._loss.padded(span), scores.recipe.padded(make, span), 1, dtype)
            return of_loss[:, : span.n]
        assert self.sums is not None, "the sums were noted before"
        of_scores = _widened(make(scores), _NEGLIGIBLE)
        unit = torch.full_like(of_scores, -0.0)  # gradients whose sum is 1
        unit[:, -1] = 1
        # the exponentials as the kernel computes them, negated. It subtracts their products with the sums in one rounding.
        exponentials = self.func(unit, of_scores, 1, dtype)[:, : span.n]
        del of_scores, unit
        return torch.addcmul(make(gradient), exponentials, self.sums)


def _is_exact(recipe: Recipe) -> bool:
    """Whether the kernel computes in the type of its result. For bfloat16 it computes in float32: the numbers of a row that are
    noted in bfloat16 are others, which a proof on logits of zeros does not show.
    """
    return recipe.like.dtype in (torch.float32, torch.float64)


def _widened(tile: torch.Tensor, padding: float) -> torch.Tensor:
    """The tile, followed by columns of `padding`."""
    n = tile.size(1)
    wide = tile.new_full((tile.size(0), n + _PAD), padding)
    wide[:, :n] = tile
    return wide


def _places(index: torch.Tensor, span: Span) -> torch.Tensor:
    """Where columns are in a tile of columns; those of other columns are in its padding, behind it."""
    at = index - span.first
    return torch.where((at >= 0) & (at < span.n), at, span.n)


class Placed(Recipe):
    """The gradient of a tensor of which some rows were taken: their gradients, and zeros for the other rows.

    taken: which rows were taken, in order; on the host.
    """

    __slots__ = ("taken",)
    keeps_rows = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        _, size, dim, *how = self.args
        rows = torch.arange(self.rows).view(size[:-1])
        self.taken = _VIEWS[self.func](rows, dim % len(size), *how).reshape(-1)

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        gradient = self.args[0]
        if span.columns:
            made = torch.zeros(self.rows, span.n, dtype=self.like.dtype, device=self.device)
            made[self.taken.to(self.device)] = make(gradient)
            return made
        at = torch.full((self.rows,), -1)
        at[self.taken] = torch.arange(self.taken.numel())
        at = at[span.first : span.end] if span.chosen is None else at[span.chosen.cpu()]
        made = torch.zeros(span.n, self.columns, dtype=self.like.dtype, device=self.device)
        (inside,) = torch.where(at >= 0)
        if inside.numel():
            rows = gradient.through(rows_at(at[inside], gradient.recipe))
            made[inside.to(self.device)] = tiles([gradient.recipe.all], rows)[0]
        return made


_ATEN = torch.ops.aten
_VIEWS = {_ATEN.slice_backward.default: _ATEN.slice.Tensor, _ATEN.select_backward.default: _ATEN.select.int}
"""Gradient of a view -> the view."""


def alone(target: torch.Tensor, ignored: int) -> torch.Tensor:
    """The targets in a matrix that has only the column of each row's target: 0, or `ignored`."""
    return torch.where(target == ignored, target, 0)
