"""Which sizes of tiles give the bits of the whole ops: compared in a step that runs in tiles, op by op.

Each op is run whole, beside its tiles, on what the ops before it have given, whose tiles have given these bits. So at most an
op's arguments and its result are whole at a time, never what a step as it is has of logits. If even these do not fit into the
device's memory, the op runs on as many rows as do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_memopt.runtime.tiles.exits import Exit, Gradient, Product
from lightning_memopt.runtime.tiles.kinds import Product as Logits
from lightning_memopt.runtime.tiles.kinds import Whole
from lightning_memopt.runtime.tiles.recipes import Recipe, Seen, Span, spans

HELD = "the loop that holds them"
"""The reader of tensors that the loop still holds when weights change."""
_PRODUCT = "aten::mm"
"""The product by columns, where these cannot be made in tiles."""
_ROUNDINGS = 8
"""With `rounding`, tiles may differ by so many roundings of the largest value."""
_TERMS = 8
"""At least so many numbers must be added up before the result is likely to depend on their order."""
_MAKING = 3
"""To make a tile takes the memory of about so many: those of an op, and of what it reads."""


@dataclass(frozen=True)
class Sizes:
    """Tiles that were proven.

    rows, columns: the size of tiles of rows, and of columns.
    tokens: the number of rows of the logits. With another one, the head is whole.
    ops: names of the ops that may run in tiles, keys of exits, and what these were `proven_as`.
    assembled: keys of exits and names of other ops that read whole tensors, which are assembled from tiles of rows.
    rounded: names of the ops whose tiles differ by rounding.
    """

    rows: int
    columns: int
    tokens: int
    ops: frozenset[str]
    assembled: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()


@dataclass
class Proof:
    """What a step finds out about tiles. For each op, sizes are compared from small to large until one gives its bits. An op
    whose smallest tiles do not is whole in this step, and so is what is made of it.

    rows, columns: the sizes, from small to large.
    rounding: whether tiles are accepted that differ by rounding.
    planned: the step runs by a plan in these tiles. What has other bits is whole, and the op is called as in the plan.
    room: gives the bytes that are left on the device; None where that is not known.
    logits: the sizes of the largest logits, and their bytes.
    wrong: the last op whose smallest tiles had other bits, for the message.
    compared: the smallest number of rows on which an op was compared, if one was not compared on all; else 0.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    rounding: bool = False
    planned: bool = False
    room: Callable[[], int | None] = lambda: None
    logits: tuple[tuple[int, ...], int] = ((), 0)
    wrong: str = ""
    compared: int = 0
    _first: dict[str, int] = field(default_factory=dict)
    """Name of an op, or key of an exit -> position of the first size that has given its results each time; the number of sizes
    if none has.
    """
    _rounded: set[tuple[str, int]] = field(default_factory=set)
    """Name of an op, and position of a size that gives its results with other bits."""
    _proven_as: dict[str, set[str]] = field(default_factory=dict)
    """Key of an exit -> what it was `proven_as` each time."""
    _by_columns: set[str] = field(default_factory=set)
    """Keys of exits that run in tiles of columns."""
    _products: set[str] = field(default_factory=set)
    """Keys of exits that are products in tiles of rows."""
    _readers: set[str] = field(default_factory=set)
    """Names of ops that read whole tensors."""
    _showed: dict[str, bool] = field(default_factory=dict)
    """Name or key of an op that adds up, and whose smallest tiles have given its bits -> whether that has shown anything."""
    _last: tuple[weakref.ref[Recipe], torch.Tensor] | None = None
    """The recipe that was compared last, with its result: the next op usually reads that. It is freed with the recipe, that is,
    when nothing can read it any more.
    """

    @property
    def exits(self) -> int:
        """How many exits have been compared."""
        return len(self._proven_as)

    @property
    def shows_nothing(self) -> str:
        """The name of an op whose comparison shows nothing, "" if there is none: it added up zeros or too few numbers, which
        has the same bits in any order. In later steps its tiles may have others.
        """
        return next(iter(self._blank), "")

    @property
    def _blank(self) -> list[str]:
        return [key for key, showed in self._showed.items() if not showed]

    @property
    def tiled(self) -> frozenset[str]:
        """Names of the ops, and keys of exits, whose smallest tiles have given the bits of the whole op in a comparison that
        shows something; and what these exits were `proven_as`.
        """
        keys = [key for key, at in self._first.items() if not at and self._showed.get(key, True)]
        return frozenset(keys).union(*(self._proven_as.get(key, ()) for key in keys))

    def recipe(self, recipe: Recipe, name: str, reader: str) -> Recipe | torch.Tensor:
        """An op has a recipe: compare it with tiles. Returns the recipe where tiles may make the result, else the result.

        name: by which it is compared. reader: by which it reads whole tensors if no tiles give its bits.
        """
        if isinstance(recipe, Logits) and recipe.like.nbytes > self.logits[1]:
            self.logits = (tuple(recipe.like.size()), recipe.like.nbytes)
        divides = recipe.keeps_rows and all(s.is_whole for s in recipe.reads)
        takes = [*recipe.reads, recipe.all]
        rows, whole = self._where_it_fits(recipe, takes, 1, divides, lambda rows: self._compared(recipe, name, rows))
        if not self._first[name]:
            if isinstance(recipe, Logits):
                self._shows(name, all(map(_varies, recipe.args[-2:])))
            self._last = (weakref.ref(recipe, self._gone), whole) if rows is None else None
            return recipe
        if self._first[name] == len(self.rows):
            self._readers.add(reader)
        self._last = None
        result: torch.Tensor = whole if rows is None else recipe.computed(self._made(recipe.reads, None))
        return Whole(recipe, result) if self.planned else result

    def _gone(self, reference: weakref.ref[Recipe]) -> None:
        if self._last is not None and self._last[0] is reference:
            self._last = None

    def _compared(self, recipe: Recipe, name: str, rows: int | None) -> torch.Tensor:
        """The result of a recipe by the whole op, or its first `rows`, compared with tiles."""
        made = self._made(recipe.reads, rows)

        def make(seen: Seen, span: Span) -> torch.Tensor:
            r = seen.recipe
            matrix = made[id(r)].as_strided((rows or r.rows, r.columns), (r.columns, 1), 0)
            return (span if seen.is_whole else seen.through(span)).of(matrix)

        def tile(span: Span) -> torch.Tensor:
            return recipe.tile(lambda seen: make(seen, span), span)

        whole: torch.Tensor = recipe.computed(made) if rows is None else tile(Span(0, rows))
        matrix = whole.view(-1, recipe.columns)

        def gives(size: int, alike: _Alike) -> bool:
            return all(alike(tile(span), span.of(matrix)) for span in spans(matrix.size(0), size))

        self._try(name, self.rows, gives, rows)
        return whole

    def exit(self, exit: Exit) -> Any:
        """An op reads tiles: its result, which is compared with that of tiles."""
        key = exit.key

        def compared(rows: int | None) -> Any:
            rows = None if rows is None else min(rows, exit.reads.rows)
            made = self._made(exit.all_reads, None) if rows is None else {}
            result = exit.part(rows) if rows is not None else exit.whole(made)
            shows = not isinstance(exit, Gradient) or self._is_telling(exit, result, made.get(id(exit.reads.recipe)))
            made.clear()
            self._last = None
            self._try(key, self.columns if exit.columns else self.rows, partial(exit.gives, result, rows, self.rows[0]), rows)
            if not self._first[key]:
                self._shows(key, shows)
            return result

        rows, result = self._where_it_fits(exit.reads.recipe, exit.all_reads, _MAKING, not exit.columns, compared)
        # not before: an exit whose comparison was interrupted may never be compared
        self._proven_as.setdefault(key, set()).add(exit.proven_as)
        if exit.columns:
            self._by_columns.add(key)
        elif isinstance(exit, Product):
            self._products.add(key)
        if rows is None:
            return result
        at = self._first[key]
        return exit.run(self.rows[at], self.rows[0]) if at < len(self.rows) else exit.whole(self._made(exit.all_reads, None))

    def _shows(self, key: str, shows: bool) -> None:
        """A comparison of an op that adds up shows something. One of several in a step is enough."""
        self._showed[key] = self._showed.get(key, False) or shows

    def _is_telling(self, exit: Gradient, result: torch.Tensor, read: torch.Tensor | None) -> bool:
        """Whether tiles that give this result will give later ones: it is made of integers, or some of its sums have several
        terms, whose order shows in the bits. `read`: the matrix that is read in tiles; None where that is not there.
        """
        if not result.is_floating_point():
            return True
        if not _varies(result):
            return False
        if read is None:
            return True
        recipe, terms = exit.reads.recipe, 0
        matrix = read.as_strided((recipe.rows, recipe.columns), (recipe.columns, 1), 0)
        enough = min(_TERMS, recipe.rows if exit.columns else recipe.columns)
        for span in spans(recipe.rows, self.rows[0]):
            counts = span.of(matrix) != 0
            terms = terms + int(counts.any(1).sum()) if exit.columns else max(terms, int(counts.sum(1).max()))
            if terms >= enough:
                return True
        return False

    def assembled(self, recipe: Recipe, reader: str) -> torch.Tensor:
        """The result of a recipe, for an op that reads it whole."""
        self._readers.add(reader)
        return recipe.assembled(self.rows[0])

    def _made(self, reads: Sequence[Seen], rows: int | None) -> dict[int, torch.Tensor]:
        """The results of the recipes that an op reads, by their ids, or their first rows."""
        made: dict[int, torch.Tensor] = {}
        for recipe in (s.recipe for s in reads):
            if self._last is not None and self._last[0]() is recipe:
                made[id(recipe)] = self._last[1]
            elif id(recipe) not in made:
                made[id(recipe)] = recipe.assembled(self.rows[0], rows)
        return made

    def _where_it_fits(
        self, like: Recipe, takes: Sequence[Seen], times: int, divides: bool, compare: Callable[[int | None], Any]
    ) -> tuple[int | None, Any]:
        """Compare on all rows if memory is left for it, else on as many as fit. Returns the number of rows, None for all, and
        what `compare` gives for it.

        like: has as many rows. takes: what must be there in whole, `times` times where it is a part of the rows. divides: a
        part of the rows may be compared.
        """
        rows = self._rows_for(like, takes, times) if divides else None
        least = 2 * self.rows[0]  # one tile shows nothing
        while True:
            try:
                result = compare(rows)
                break
            except torch.OutOfMemoryError:  # what is left is in pieces
                self._last = None
                if not divides or (rows or like.rows) // 2 < least:
                    raise
                rows = self._whole_tiles((rows or like.rows) // 2)
        if rows is not None:
            self.compared = min(self.compared or rows, rows)
        return rows, result

    def _rows_for(self, like: Recipe, takes: Sequence[Seen], times: int) -> int | None:
        left_nbytes = self.room()
        if left_nbytes is None:
            return None
        there = None if self._last is None else self._last[0]()
        nbytes = sum(r.like.nbytes for r in {s.recipe for s in takes} if r is not there)
        left_nbytes -= _MAKING * self.rows[0] * like.like.nbytes // like.rows
        if nbytes <= max(0, left_nbytes):  # also where nothing has to be made: all is there
            return None
        return min(max(self._whole_tiles(left_nbytes * like.rows // (times * nbytes)), 2 * self.rows[0]), like.rows)

    def _whole_tiles(self, rows: int) -> int:
        return rows // self.rows[0] * self.rows[0]

    def _try(self, key: str, sizes: Sequence[int], gives: Callable[[int, _Alike], bool], rows: int | None) -> None:
        """`rows`: only so many are compared."""
        at = self._first.get(key, 0)
        while at < len(sizes):
            if rows is not None and 2 * sizes[at] > rows:
                at = len(sizes)
                break
            if self._gives(key, at, partial(gives, sizes[at])):
                break
            self.wrong = key
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
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of a combination of ops that the rules do not foresee: it never runs in tiles
            return False
        if differs:
            self._rounded.add((key, at))
        return given

    def refutes(self, sizes: Sizes) -> str:
        """The name of an op that runs in tiles of these sizes, and whose tiles had other bits; "" if there is none. They are
        the smallest ones of this proof.
        """
        return next((key for key, at in self._first.items() if at and key in sizes.ops), "")

    def again(self, waits: bool = True) -> Proof | None:
        """The proof of another step: of larger tiles, where the smallest ones did not give the bits of some op and larger ones
        did, or of the same ones, where this step shows nothing, if one `waits` for a step that does. None if there is nothing
        to gain.
        """
        by_rows = self._first.keys() - self._by_columns
        rows, columns = (
            max((at for key in keys if (at := self._first[key]) < len(sizes)), default=0)
            for keys, sizes in ((by_rows, self.rows), (self._by_columns, self.columns))
        )
        if not (rows or columns or (waits and self.shows_nothing)):
            return None
        return replace(self.anew(), rows=self.rows[rows:], columns=self.columns[columns:])

    def anew(self) -> Proof:
        """The same proof of another step, because other ranks need one."""
        return Proof(self.rows, self.columns, self.rounding, room=self.room)

    def results(self, tokens: int) -> list[Sizes]:
        """The ways in which the step may run, in the smallest tiles, with more memory and fewer products first.

        tokens: the number of rows of the logits.
        """
        if not self._proven_as or not self._proven_as.keys() >= set(self._blank):
            return []
        whole = self._proven_as.keys() - self.tiled
        products = self._products | self._by_columns
        if whole & products or _PRODUCT in self._readers:  # a gradient that is whole for one product is whole for both
            whole |= products
        least = self._sizes(tokens, whole)
        if not (self._products and self._by_columns) or products & whole:
            return [least]
        return [self._sizes(tokens, whole | products), least]

    def _sizes(self, tokens: int, whole: set[str]) -> Sizes:
        """`whole`: keys of the exits that read whole tensors."""
        tiled = self.tiled - whole.union(*(self._proven_as.get(key, ()) for key in whole))
        return Sizes(
            rows=self.rows[0],
            columns=self.columns[0] if tiled & self._by_columns else 0,
            tokens=tokens,
            ops=tiled,
            assembled=frozenset(whole | self._readers),
            rounded=frozenset(key for key in tiled if (key, 0) in self._rounded),
        )


_Alike = Callable[[torch.Tensor, torch.Tensor], bool]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    words = _WORDS[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def _varies(t: torch.Tensor) -> bool:
    """Whether a tensor has two different numbers, and is free of nan."""
    if not t.numel():
        return False
    least, most = torch.aminmax(t)
    return bool(least < most)


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by a few roundings of their largest values at most."""
    if a.dtype != b.dtype or a.size() != b.size() or not a.is_floating_point():
        return False
    most = b.abs().amax() * torch.finfo(a.dtype).eps * _ROUNDINGS
    return bool(((a - b).abs() <= most).all())


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an entry -> integers of that size."""
