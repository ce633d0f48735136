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
from lightning_memopt.runtime.tiles.kinds import LogSoftmax, alone, on_rows
from lightning_memopt.runtime.tiles.recipes import Recipe, Seen, Span, around, run_whole, spans, tiles
from lightning_memopt.runtime.tiles.rules import may_be_lost, meta, reducing
from lightning_memopt.torch_private import OpOverload

_ATEN = torch.ops.aten
_ROWS = 64
"""Number of rows of a tile, where the loss has run on whole tensors."""


class Exit:
    """An op that reads tiles.

    key: its name, for proofs.
    columns: whether it reads tiles of columns.
    reads: the view that it reads in tiles.
    """

    columns = False

    def __init__(self, func: OpOverload, args: Sequence[Any], reads: Seen) -> None:
        self._func = func
        self._args = tuple(args)
        self.reads = reads

    @property
    def key(self) -> str:
        return self._func._name + self.reads.which

    def run(self, size: int, notes: bool) -> Any:
        """The results of the op, in tiles of `size` rows or columns. `notes`: a gradient will be made by columns."""
        raise NotImplementedError

    def whole(self) -> Any:
        """The results of the op on whole tensors, which are made for it."""
        return run_whole(self._func, self._args, {}, {})

    def gives(self, size: int, result: Any, alike: Any) -> bool:
        """Whether tiles of this size give this result. `alike`: compares two tensors."""
        return all(map(alike, tensors_in(self.run(size, notes=True)), tensors_in(result)))


class Loss(Exit):
    """The negative log-likelihood of the targets: `nll_loss_forward`.

    It also notes what tiles of columns need of each row.
    """

    def run(self, size: int, notes: bool) -> Any:
        scores, target, weight, reduction, ignored = self._args
        recipe: Recipe = scores.recipe
        if notes and isinstance(recipe, LogSoftmax) and scores.is_whole and not recipe.is_noted:
            recipe.expect()
        first = torch.where(target == ignored, 0, target)[:, None]
        picked = torch.empty(scores.rows, 1, dtype=recipe.like.dtype, device=recipe.device)
        for span in spans(scores.rows, size):
            span.of(picked).copy_(tiles([scores], span)[0].gather(1, span.of(first)))
        return self._func(picked, alone(target, ignored), weight, reduction, ignored)


class Reduction(Exit):
    """An op that makes something smaller of each row: a maximum, a sum, the score of a class."""

    def __init__(self, func: OpOverload, args: Sequence[Any], dim_at: int) -> None:
        super().__init__(func, args, args[0])
        self._dim_at = dim_at

    def run(self, size: int, notes: bool) -> Any:
        def make(seen: Seen) -> torch.Tensor:
            return tiles([seen], span)[0]

        parts = []
        for span in spans(self.reads.rows, size):
            parts.append(tensors_in(on_rows(self._func, self._args, {}, self._dim_at, make, span)))
        like = self._func(*map(meta, self._args))
        results = [torch.cat(each).view(t.size()) for each, t in zip(zip(*parts, strict=True), tensors_in(like), strict=True)]
        return results[0] if isinstance(like, torch.Tensor) else tuple(results)


class Product(Exit):
    """The product of a matrix that is made in tiles, or of its transpose, and another matrix."""

    def __init__(self, func: OpOverload, args: Sequence[Any]) -> None:
        super().__init__(func, args, args[0])
        self._other = args[1]
        self.columns: bool = not args[0].has_rows

    @property
    def key(self) -> str:
        return f"{self._func._name} by {'columns' if self.columns else 'rows'}{self.reads.which}"

    @property
    def n(self) -> int:
        """The number of rows of the result: rows or columns of the matrix in tiles."""
        return self.reads.size[0]

    def into(self, out: torch.Tensor, span: Span) -> None:
        """Write the part of the result that this tile makes to `out`."""
        (made,) = tiles([self.reads.recipe.all if self.columns else self.reads], span)
        torch.mm(made.t() if self.columns else made, self._other, out=out)

    def _note(self) -> None:
        """Note what tiles of columns need of each row, where no loss has done so."""
        for recipe in around(self.reads.recipe) if self.columns else ():
            if isinstance(recipe, LogSoftmax) and not recipe.is_noted:
                recipe.expect()
                for span in spans(recipe.rows, _ROWS):
                    tiles([recipe.all], span)

    def run(self, size: int, notes: bool) -> torch.Tensor:
        self._note()
        out = torch.empty(self.n, self._other.size(1), dtype=self.reads.recipe.like.dtype, device=self.reads.recipe.device)
        for span in spans(self.n, size, self.columns):
            self.into(out[span.first : span.end], span)
        return out

    def gives(self, size: int, result: Any, alike: Any) -> bool:
        self._note()
        for span in spans(self.n, size, self.columns):
            whole = result[span.first : span.end]
            part = torch.empty_like(whole)
            self.into(part, span)
            if not alike(part, whole):
                return False
        return True


def exit_for(func: OpOverload, args: Sequence[Any]) -> Exit | None:
    """How an op that reads results of recipes can run in tiles although its own result is whole; None if it cannot. `args`: as
    `seen` gives them.
    """
    if func is _ATEN.nll_loss_forward.default and may_be_lost(args) and args[0].has_rows:
        return Loss(func, args, args[0])
    if func is _ATEN.mm.default and type(args[0]) is Seen and isinstance(args[1], torch.Tensor):
        by_columns = args[0].is_transposed and args[0].recipe.by_columns
        return Product(func, args) if by_columns or args[0].has_rows else None
    at = reducing(func, args)
    return None if at is None else Reduction(func, args, at)
