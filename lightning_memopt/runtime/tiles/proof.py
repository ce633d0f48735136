"""Which sizes of tiles give the bits of the whole ops: compared in a step that runs whole, where the bits are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_memopt.runtime.tiles.exits import Exit, Product
from lightning_memopt.runtime.tiles.recipes import Seen, spans, tiles

HELD = "the loop that holds them"
"""The reader of tensors that the loop still holds when weights change."""
_ASSEMBLED = "assembled"
_PRODUCT = "aten::mm"
"""The product by columns, where these cannot be made in tiles."""
_ROUNDINGS = 8
"""With `rounding`, tiles may differ by so many roundings of the largest value."""


@dataclass(frozen=True)
class Sizes:
    """Tiles that were proven.

    rows, columns: the size of tiles of rows, and of columns.
    tokens: the number of rows of the logits. With another one, the head is whole.
    ops: names of the ops that may run in tiles, and keys of exits.
    assembled: keys of exits and names of other ops that read whole tensors, which are assembled from tiles of rows.
    rounded: keys of exits whose tiles differ by rounding.
    checked: each exit also runs whole, and its bits are compared: tiles were proven on another machine.
    """

    rows: int
    columns: int
    tokens: int
    ops: frozenset[str]
    assembled: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()
    checked: bool = False


@dataclass
class Proof:
    """What a step has found out about tiles.

    rows, columns: the sizes that are tried.
    rounding: whether tiles are accepted that differ by rounding.
    ops: names of the ops that have recipes.
    exits: how many exits have been compared.
    wrong: the last op whose tiles had other bits, for the message.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    rounding: bool = False
    ops: set[str] = field(default_factory=set)
    exits: int = 0
    wrong: str = ""
    _failed: dict[str, set[int]] = field(default_factory=dict)
    """Key of an exit -> the sizes that do not give its results."""
    _rounded: dict[str, set[int]] = field(default_factory=dict)
    """Key of an exit -> the sizes that give its results with other bits."""
    _by_columns: set[str] = field(default_factory=set)
    """Keys of exits that run in tiles of columns."""
    _products: set[str] = field(default_factory=set)
    """Keys of exits that are products in tiles of rows."""
    _readers: set[str] = field(default_factory=set)
    """Names of ops that read whole tensors."""

    def compare(self, exit: Exit, whole: torch.Tensor, result: Any) -> None:
        """An exit has run as it is on `whole`, and gave `result`: compare it with tiles of each size."""
        self.exits += 1
        key = exit.key
        if exit.columns:
            self._by_columns.add(key)
        elif isinstance(exit, Product):
            self._products.add(key)
        failed = self._failed.setdefault(key, set())
        for size in self.columns if exit.columns else self.rows:
            if size not in failed and not self._try(key, size, partial(exit.gives, size, result)):
                failed.add(size)
                self.wrong = key
        if failed or exit.columns:  # the gradient that is read by columns may be made whole instead
            self.read(exit.reads, whole, key)

    def read(self, seen: Seen, whole: torch.Tensor, name: str) -> None:
        """An op reads a view of a recipe's result, and cannot run in tiles: compare the tensor with what tiles of rows make."""
        if name not in self._failed:
            self._readers.add(name)
        recipe = seen.recipe
        matrix = whole.as_strided((recipe.rows, recipe.columns), (recipe.columns, 1), 0)

        def gives(size: int, alike: _Alike) -> bool:
            return all(alike(tiles([recipe.all], span)[0], span.of(matrix)) for span in spans(recipe.rows, size))

        failed = self._failed.setdefault(_ASSEMBLED, set())
        for size in self.rows:
            if size not in failed and not self._try(_ASSEMBLED, size, partial(gives, size)):
                failed.add(size)
                self.wrong = name

    def _try(self, key: str, size: int, gives: Callable[[_Alike], bool]) -> bool:
        differs = False

        def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
            nonlocal differs
            if equal(a, b):
                return True
            differs = True
            return self.rounding and _is_near(a, b)

        try:
            given = gives(alike)
        except Exception:  # of a combination of ops that the rules do not foresee: it never runs in tiles
            return False
        if differs:
            self._rounded.setdefault(key, set()).add(size)
        return given

    def results(self, tokens: int) -> list[Sizes]:
        """The ways in which the step may run, with more memory and fewer products first.

        tokens: the number of rows of the logits.
        """
        least = self.result(tokens) if self.exits or self._readers else None
        if least is None:
            return []
        products = self._products | self._by_columns
        if not (self._products and self._by_columns) or products & least.assembled:
            return [least]
        rounded = least.rounded - products
        whole = replace(least, columns=0, ops=least.ops - products, assembled=least.assembled | products, rounded=rounded)
        return [whole, least]

    def result(self, tokens: int) -> Sizes | None:
        """The smallest tiles with which the fewest ops read whole tensors; None if there are none.

        tokens: the number of rows of the logits.
        """
        sizes = [size for size in self.rows if size not in self._failed.get(_ASSEMBLED, ())]
        if not sizes:
            return None
        rows = min(sizes, key=lambda size: (len(self._whole(self._products_and_others, size)), size))
        whole = self._whole(self._products_and_others, rows)
        columns = [size for size in self.columns if not self._whole(self._by_columns, size)]
        if not columns or whole & self._products or _PRODUCT in self._readers:
            columns = []  # a gradient that is whole for one product is whole for both
            whole |= self._by_columns | self._products
        chosen = {key: columns[-1] if key in self._by_columns else rows for key in self._failed if key not in whole}
        return Sizes(
            rows=rows,
            columns=columns[-1] if columns and self._by_columns else 0,
            tokens=tokens,
            ops=frozenset(self.ops | (chosen.keys() - {_ASSEMBLED})),
            assembled=frozenset(whole | self._readers),
            rounded=frozenset(key for key, size in chosen.items() if size in self._rounded.get(key, ())),
        )

    @property
    def _products_and_others(self) -> set[str]:
        return self._failed.keys() - self._by_columns - {_ASSEMBLED}

    def _whole(self, keys: set[str], size: int) -> set[str]:
        """Which of these exits this size does not give."""
        return {key for key in keys if size in self._failed[key]}


_Alike = Callable[[torch.Tensor, torch.Tensor], bool]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    words = _WORDS[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by a few roundings of their largest values at most."""
    if a.dtype != b.dtype or a.size() != b.size() or not a.is_floating_point():
        return False
    most = b.abs().amax() * torch.finfo(a.dtype).eps * _ROUNDINGS
    return bool(((a - b).abs() <= most).all())


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an entry -> integers of that size."""
