"""Which sizes of tiles give the bits of the whole ops: compared in a step that runs whole, where the bits are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """What a step finds out about tiles. At each exit, sizes are compared from small to large until one gives its bits.

    rows, columns: the sizes, from small to large.
    rounding: whether tiles are accepted that differ by rounding.
    ops: names of the ops that have recipes.
    exits: how many exits have been compared.
    wrong: the last op whose smallest tiles had other bits, for the message.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    rounding: bool = False
    ops: set[str] = field(default_factory=set)
    exits: int = 0
    wrong: str = ""
    _first: dict[str, int] = field(default_factory=dict)
    """Key of an exit -> position of the first size that has given its results each time; the number of sizes if none has."""
    _rounded: set[tuple[str, int]] = field(default_factory=set)
    """Key of an exit, and position of a size that gives its results with other bits."""
    _by_columns: set[str] = field(default_factory=set)
    """Keys of exits that run in tiles of columns."""
    _products: set[str] = field(default_factory=set)
    """Keys of exits that are products in tiles of rows."""
    _readers: set[str] = field(default_factory=set)
    """Names of ops that read whole tensors."""

    def compare(self, exit: Exit, whole: torch.Tensor, result: Any) -> None:
        """An exit has run as it is on `whole`, and gave `result`: compare it with tiles."""
        self.exits += 1
        key = exit.key
        if exit.columns:
            self._by_columns.add(key)
        elif isinstance(exit, Product):
            self._products.add(key)
        self._try(key, self.columns if exit.columns else self.rows, lambda size, alike: exit.gives(size, result, alike), key)
        if self._first[key] or exit.columns:  # the gradient that is read by columns may be made whole instead
            self._assembles(exit.reads, whole, key)

    def read(self, seen: Seen, whole: torch.Tensor, name: str) -> None:
        """An op reads a view of a recipe's result, and cannot run in tiles: compare the tensor with what tiles of rows make."""
        self._readers.add(name)
        self._assembles(seen, whole, name)

    def _assembles(self, seen: Seen, whole: torch.Tensor, name: str) -> None:
        recipe = seen.recipe
        matrix = whole.as_strided((recipe.rows, recipe.columns), (recipe.columns, 1), 0)

        def gives(size: int, alike: _Alike) -> bool:
            return all(alike(tiles([recipe.all], span)[0], span.of(matrix)) for span in spans(recipe.rows, size))

        self._try(_ASSEMBLED, self.rows, gives, name)

    def _try(self, key: str, sizes: Sequence[int], gives: Callable[[int, _Alike], bool], name: str) -> None:
        at = self._first.get(key, 0)
        while at < len(sizes) and not self._gives(key, at, partial(gives, sizes[at])):
            self.wrong = name
            at += 1
        self._first[key] = at if sizes else 1

    def _gives(self, key: str, at: int, gives: Callable[[_Alike], bool]) -> bool:
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
            self._rounded.add((key, at))
        return given

    def again(self) -> Proof | None:
        """The proof of another step: of larger tiles, where the smallest ones did not give the bits of some exit and larger
        ones did. None if there is nothing to gain.
        """
        by_rows = self._first.keys() - self._by_columns
        rows, columns = (
            max((at for key in keys if (at := self._first[key]) < len(sizes)), default=0)
            for keys, sizes in ((by_rows, self.rows), (self._by_columns, self.columns))
        )
        return Proof(self.rows[rows:], self.columns[columns:], self.rounding) if rows or columns else None

    def anew(self) -> Proof:
        """The same proof of another step, because other ranks need one."""
        return Proof(self.rows, self.columns, self.rounding)

    def results(self, tokens: int) -> list[Sizes]:
        """The ways in which the step may run, in the smallest tiles, with more memory and fewer products first.

        tokens: the number of rows of the logits.
        """
        if not self.rows or not self._first or self._first.get(_ASSEMBLED, 0):
            return []
        whole = {key for key, at in self._first.items() if at}
        products = self._products | self._by_columns
        if whole & products or _PRODUCT in self._readers:  # a gradient that is whole for one product is whole for both
            whole |= products
        least = self._sizes(tokens, whole)
        if not (self._products and self._by_columns) or products & whole:
            return [least]
        return [self._sizes(tokens, whole | products), least]

    def _sizes(self, tokens: int, whole: set[str]) -> Sizes:
        """`whole`: keys of the exits that read whole tensors."""
        tiled = self._first.keys() - whole
        return Sizes(
            rows=self.rows[0],
            columns=self.columns[0] if tiled & self._by_columns else 0,
            tokens=tokens,
            ops=frozenset(self.ops | (tiled - {_ASSEMBLED})),
            assembled=frozenset(whole | self._readers),
            rounded=frozenset(key for key in tiled if (key, 0) in self._rounded),
        )


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
