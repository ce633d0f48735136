"""The ops that read the tiles of a loss head and make what leaves it: losses, metrics, and gradients.

Each result is made tile by tile, with the bits of the op on whole tensors: what belongs to rows by rows; the gradient of the
classes' vectors by columns, because a sum over tiles of rows rounds in another order; and the loss by running the op itself
once, on the scores at the targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_memopt.record.tensors import tensors_in
from lightning_memopt.runtime.tiles.kinds import LogSoftmax, Noting, alone, on_rows
from lightning_memopt.runtime.tiles.recipes import (
    Recipe,
    Seen,
    Span,
    around,
    digest,
    dtype_name,
    run_whole,
    seen_in,
    spans,
    tiles,
)
from lightning_memopt.runtime.tiles.rules import may_be_lost, meta, reducing
from lightning_memopt.torch_private import OpOverload

_ATEN = torch.ops.aten


class Exit:
    """An op that reads tiles.

    key: its name, for proofs and messages.
    columns: whether it reads tiles of columns.
    reads: the view that it reads in tiles.
    """

    columns = False

    def __init__(self, func: OpOverload, args: Sequence[Any], reads: Seen, kwargs: dict[str, Any] | None = None) -> None:
        self._func = func
        self._args = tuple(args)
        self._kwargs = kwargs or {}
        self.reads = reads

    @property
    def key(self) -> str:
        return self._func._name + self.reads.which

    @property
    def proven_as(self) -> str:
        """What a proof must have compared before it may run in tiles: of rows, an op on this dtype; of columns, the exit of
        these very recipes, because only their tiles of rows are compared one by one.
        """
        return f"{self.key} of {digest(self.reads.recipe) if self.columns else dtype_name(self.reads.recipe)}"

    @property
    def all_reads(self) -> list[Seen]:
        """The views of recipes' results that it reads, one for each time."""
        return seen_in(self._args)

    def run(self, size: int, noting: int, rows: int | None = None) -> Any:
        """The results of the op, in tiles of `size` rows or columns, on all rows or on the first `rows`. `noting`: what a
        gradient by columns needs of each row is noted in tiles of so many rows; 0: there will be no such gradient.
        """
        raise NotImplementedError

    def whole(self, made: dict[int, torch.Tensor]) -> Any:
        """The results of the op on whole tensors. `made`: see `run_whole`."""
        return run_whole(self._func, self._args, self._kwargs, made)

    def part(self, rows: int) -> Any:
        """The results of the op on the first rows, as flat as tiles are."""
        return self.run(rows, noting=0, rows=rows)

    def gives(self, result: Any, rows: int | None, noting: int, size: int, alike: Any) -> bool:
        """Whether tiles of this size give this result, of `whole` or of `part(rows)`. `alike`: compares two tensors."""
        return all(map(alike, tensors_in(self.run(size, noting, rows)), tensors_in(result)))


class Loss(Exit):
    """The negative log-likelihood of the targets: `nll_loss_forward`.

    It also notes what tiles of columns need of each row.
    """

    def run(self, size: int, noting: int, rows: int | None = None) -> Any:
        scores, target, weight, reduction, ignored = self._args
        recipe: Recipe = scores.recipe
        n = scores.rows if rows is None else rows
        if noting and isinstance(recipe, LogSoftmax) and scores.is_whole and not recipe.is_noted:
            recipe.expect()
        first = torch.where(target == ignored, 0, target)[:, None]
        picked = torch.empty(n, 1, dtype=recipe.like.dtype, device=recipe.device)
        for span in spans(n, size):
            span.of(picked).copy_(tiles([scores], span)[0].gather(1, span.of(first)))
        return self._func(picked, alone(target, ignored)[:n], weight, reduction, ignored)

    def part(self, rows: int) -> Any:
        scores, target, *others = self._args
        return self._func(tiles([scores], Span(0, rows))[0], target[:rows], *others)


class Reduction(Exit):
    """An op that makes something smaller of each row: a maximum, a sum, the score of a class."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], dim_at: int) -> None:
        super().__init__(func, args, args[0], kwargs)
        self._dim_at = dim_at

    def run(self, size: int, noting: int, rows: int | None = None) -> Any:
        def make(seen: Seen) -> torch.Tensor:
            return tiles([seen], span)[0]

        parts = []
        for span in spans(self.reads.rows if rows is None else rows, size):
            parts.append(tensors_in(on_rows(self._func, self._args, self._kwargs, self._dim_at, make, span)))
        results = [torch.cat(each) for each in zip(*parts, strict=True)]
        if rows is not None:
            return results
        like = self._func(*map(meta, self._args), **self._kwargs)
        results = [each.view(t.size()) for each, t in zip(results, tensors_in(like), strict=True)]
        return results[0] if isinstance(like, torch.Tensor) else tuple(results)


class Gradient(Exit):
    """A gradient that is made slice by slice, one for each tile of the gradient of the logits.

    n: the number of rows of its result: rows or columns of what it reads.
    """

    n: int

    @property
    def key(self) -> str:
        return f"{self._func._name} by {'columns' if self.columns else 'rows'}{self.reads.which}"

    def _empty(self, n: int) -> torch.Tensor:
        """A result of `n` rows that is not made yet."""
        raise NotImplementedError

    def _write(self, out: torch.Tensor, made: torch.Tensor) -> None:
        """Write the slice of the result that comes of a tile, which is made, to `out`."""
        raise NotImplementedError

    def into(self, out: torch.Tensor, span: Span) -> None:
        """Write the slice of the result that the tile at `span` makes to `out`."""
        (made,) = tiles([self.reads.recipe.all if self.columns else self.reads], span)
        self._write(out, made)

    def _note(self, size: int) -> None:
        """Note what tiles of columns need of each row, in tiles of `size` rows, where no loss has done so."""
        for recipe in around(self.reads.recipe) if self.columns else ():
            if isinstance(recipe, Noting) and not recipe.is_noted:
                recipe.note(size)

    def run(self, size: int, noting: int, rows: int | None = None) -> torch.Tensor:
        self._note(noting)
        n = self.n if rows is None else rows
        out = self._empty(n)
        for span in spans(n, size, self.columns):
            self.into(out[span.first : span.end], span)
        return out

    def gives(self, result: Any, rows: int | None, noting: int, size: int, alike: Any) -> bool:
        self._note(noting)
        for span in spans(self.n if rows is None else rows, size, self.columns):
            part = self._empty(span.n)
            self.into(part, span)
            if not alike(part, result[span.first : span.end]):
                return False
        return True


class Product(Gradient):
    """The product of a matrix that is made in tiles, or of its transpose, and another matrix."""

    def __init__(self, func: OpOverload, args: Sequence[Any]) -> None:
        super().__init__(func, args, args[0])
        self._other = args[1]
        self.columns = not args[0].has_rows
        self.n = args[0].size[0]

    @property
    def proven_as(self) -> str:
        return f"{super().proven_as} by {'x'.join(map(str, self._other.size()))} {self._other.dtype}"

    def _empty(self, n: int) -> torch.Tensor:
        return torch.empty(n, self._other.size(1), dtype=self.reads.recipe.like.dtype, device=self.reads.recipe.device)

    def _write(self, out: torch.Tensor, made: torch.Tensor) -> None:
        torch.mm(made.t() if self.columns else made, self._other, out=out)


class ColumnSum(Gradient):
    """The sum over all rows: the gradient of a bias."""

    columns = True

    def __init__(self, func: OpOverload, args: Sequence[Any]) -> None:
        super().__init__(func, args, args[0])
        self.n = args[0].size[-1]
        self._keeps_dims = len(args) > 2 and args[2]

    def _empty(self, n: int) -> torch.Tensor:
        like = self._func(meta(self.reads), [0])
        return torch.empty(n, dtype=like.dtype, device=self.reads.recipe.device)  # the sum of bools has integers

    def _write(self, out: torch.Tensor, made: torch.Tensor) -> None:
        out.copy_(self._func(made, [0]))

    def run(self, size: int, noting: int, rows: int | None = None) -> torch.Tensor:
        out = super().run(size, noting, rows)
        return out.view(*(1 for _ in self.reads.size[1:]), -1) if self._keeps_dims else out

    def gives(self, result: Any, rows: int | None, noting: int, size: int, alike: Any) -> bool:
        return super().gives(result.view(-1), rows, noting, size, alike)


def exit_for(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Exit | None:
    """How an op that reads results of recipes can run in tiles although its own result is whole; None if it cannot. `args`,
    `kwargs`: as `seen` gives them.
    """
    at = reducing(func, args, kwargs)
    if at is not None:
        return Reduction(func, args, kwargs, at)
    if kwargs:
        return None
    if func is _ATEN.nll_loss_forward.default and may_be_lost(args) and args[0].has_rows:
        return Loss(func, args, args[0])
    if func is _ATEN.mm.default and type(args[0]) is Seen and isinstance(args[1], torch.Tensor):
        by_columns = args[0].is_transposed and args[0].recipe.by_columns
        return Product(func, args) if by_columns or args[0].has_rows else None
    if func is _ATEN.sum.dim_IntList and type(args[0]) is Seen and _is_over_rows(args[0], args[1]):
        return ColumnSum(func, args) if args[0].is_whole and args[0].recipe.by_columns else None
    return None


def _is_over_rows(seen: Seen, dims: Any) -> bool:
    """Whether these are all dimensions but that of the classes."""
    last = len(seen.size) - 1
    return bool(dims) and sorted(dim % (last + 1) for dim in dims) == list(range(last))
