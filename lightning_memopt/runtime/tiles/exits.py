"""The ops that read the tiles of a loss head and make what leaves it: the loss, and the gradients of the product's inputs.

Each result is made tile by tile, with the bits of the op on whole tensors: the gradient of the rows' vectors by rows; the
gradient of the classes' vectors by columns, because a sum over tiles of rows rounds in another order; and the loss by running
the op itself once, on the scores at the targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_memopt.runtime.tiles.recipes import LogSoftmax, Recipe, Seen, Span, alone, around, may_be_lost, tiles
from lightning_memopt.torch_private import OpOverload

_ATEN = torch.ops.aten
_ROWS = 64
"""Number of rows of a tile, where the loss has run on whole tensors."""


def spans(n: int, size: int, columns: bool) -> Iterator[Span]:
    """Tiles of `size` rows or columns that cover `n`."""
    for first in range(0, n, size):
        yield Span(first, min(first + size, n), columns)


class Loss:
    """The negative log-likelihood of the targets: `nll_loss_forward`.

    It also notes what tiles of columns need of each row, if `notes`: a gradient will be made by columns.
    """

    columns = False

    def __init__(self, func: OpOverload, args: Sequence[Any]) -> None:
        self._func, self._args = func, args

    @property
    def n(self) -> int:
        """The number of rows."""
        return self._recipe.rows

    @property
    def _recipe(self) -> Recipe:
        recipe: Recipe = self._args[0].recipe
        return recipe

    def run(self, size: int, notes: bool) -> Any:
        """The results of the op, in tiles of `size` rows."""
        recipe, (_, target, weight, reduction, ignored) = self._recipe, self._args
        first = torch.where(target == ignored, 0, target)[:, None]
        picked = torch.empty(recipe.rows, 1, dtype=recipe.like.dtype, device=recipe.device)
        for span in spans(recipe.rows, size, columns=False):
            if notes and isinstance(recipe, LogSoftmax):
                x, scores = tiles([recipe.parents[0], recipe], span)
                recipe.note(span, x, scores)
                del x
            else:
                (scores,) = tiles([recipe], span)
            span.of(picked).copy_(scores.gather(1, span.of(first)))
            del scores  # before the next tile is made
        return self._func(picked, alone(target, ignored), weight, reduction, ignored)


class Product:
    """The product of a matrix that is made in tiles, or of its transpose, and another matrix."""

    def __init__(self, func: OpOverload, args: Sequence[Any]) -> None:
        self._func, (first, self._other) = func, args
        self._recipe: Recipe = first.recipe
        self.columns: bool = first.is_transposed

    @property
    def n(self) -> int:
        """The number of rows of the result: rows or columns of the matrix in tiles."""
        return self._recipe.columns if self.columns else self._recipe.rows

    def into(self, out: torch.Tensor, span: Span) -> None:
        """Write the part of the result that this tile makes to `out`."""
        (made,) = tiles([self._recipe], span)
        torch.mm(made.t() if self.columns else made, self._other, out=out)

    def note(self) -> None:
        """Note what tiles of columns need of each row, where no loss has done so."""
        for recipe in around(self._recipe) if self.columns else ():
            if isinstance(recipe, LogSoftmax) and recipe.top is None:
                for span in spans(recipe.rows, _ROWS, columns=False):
                    recipe.note(span, *tiles([recipe.parents[0], recipe], span))

    def run(self, size: int) -> torch.Tensor:
        """The result, in tiles of `size` rows or columns."""
        self.note()
        out = torch.empty(self.n, self._other.size(1), dtype=self._recipe.like.dtype, device=self._recipe.device)
        for span in spans(self.n, size, self.columns):
            self.into(out[span.first : span.end], span)
        return out


def exit_for(func: OpOverload, args: Sequence[Any]) -> Loss | Product | None:
    """How an op that reads results of recipes can run in tiles although its own result is whole; None if it cannot. `args`: as
    `seen` gives them.
    """
    if func is _ATEN.nll_loss_forward.default and may_be_lost(args) and args[0].is_whole:
        return Loss(func, args)
    if func is _ATEN.mm.default and type(args[0]) is Seen and isinstance(args[1], torch.Tensor):
        by_rows = args[0].is_whole and len(args[0].size) == 2
        return Product(func, args) if by_rows or args[0].is_transposed else None
    return None
