"""Recipes: how tensors of a loss head are computed, whole or for a tile of rows or of columns.

A recipe has an op and its arguments, of which some are results of other recipes. Its result has a row for each token and a
column for each class, whatever the sizes of its leading dimensions. Computing a tile runs the ops of all recipes on which it
depends, on that tile. The kernels are those of the whole op, so an entry usually gets the same bits; a proof (proof.py)
compares them before tiles are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import torch

from lightning_memopt.device.backends import current_stream
from lightning_memopt.torch_private import OpOverload


class Span(NamedTuple):
    """A tile: some rows with all columns, or some columns with all rows.

    first, end: the rows or columns `first .. end - 1`.
    columns: whether they are columns.
    chosen: the rows, if they are not those from `first` on; on the device of the tile.
    """

    first: int
    end: int
    columns: bool = False
    chosen: torch.Tensor | None = None

    @property
    def n(self) -> int:
        """How many rows or columns it has."""
        return self.end - self.first

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The part of a matrix, or of a vector with an entry for each row."""
        if self.columns:
            return t[:, self.first : self.end]
        return t[self.first : self.end] if self.chosen is None else t[self.chosen]

    def across(self, t: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """The part of a tensor that is expanded to `size`, as a matrix. Copies no more than that."""
        wide = t.expand(tuple(size))
        if self.columns:
            return wide[..., self.first : self.end].flatten(0, -2)
        try:
            return self.of(wide.view(-1, wide.size(-1)))
        except RuntimeError:  # its rows are not at equal distances
            rows = torch.arange(self.first, self.end, device=t.device) if self.chosen is None else self.chosen
            return wide[torch.unravel_index(rows, tuple(size[:-1]))]


def spans(n: int, size: int, columns: bool = False) -> Iterator[Span]:
    """Tiles of `size` rows or columns that cover `n`."""
    for first in range(0, n, size):
        yield Span(first, min(first + size, n), columns)


class Seen(NamedTuple):
    """An argument that is a view of a recipe's result, as the op got it.

    plain: it has the dtype of the result, and no bit that says that it is negative or conjugate.
    """

    recipe: Recipe
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    plain: bool = True

    @property
    def rows(self) -> int:
        """How many rows it has, as a matrix."""
        return prod(self.size[:-1])

    @property
    def is_whole(self) -> bool:
        """Whether it has the columns of the result as its last dimension, and all its rows in order."""
        if not self.plain or not self.size or self.size[-1] != self.recipe.columns or self.offset:
            return False
        return self.rows == self.recipe.rows and self.stride == _contiguous(self.size)

    @property
    def has_rows(self) -> bool:
        """Whether it has the columns of the result as its last dimension, and some of its rows."""
        columns = self.recipe.columns
        if (
            not self.plain
            or 0 in self.size
            or len(self.size) < 2
            or self.size[-1] != columns
            or self.stride[-1] != 1
            or self.offset % columns
        ):
            return False
        return all(n == 1 or step % columns == 0 for n, step in zip(self.size[:-1], self.stride[:-1], strict=True))

    @property
    def is_transposed(self) -> bool:
        """Whether it is the transposed matrix."""
        r = self.recipe
        return self.plain and (self.size, self.stride, self.offset) == ((r.columns, r.rows), (1, r.columns), 0)

    @property
    def which(self) -> str:
        """Which part of the result it is: "" for all of it."""
        if self.is_whole or self.is_transposed:
            return ""
        return f" of {'x'.join(map(str, self.size))} at {self.offset} by {'x'.join(map(str, self.stride))}"

    def taken(self) -> torch.Tensor:
        """Which rows of the result it has, in order; on the host."""
        columns = self.recipe.columns
        steps = [step // columns for step in self.stride[:-1]]
        return torch.arange(self.recipe.rows).as_strided(self.size[:-1], steps, self.offset // columns).reshape(-1)

    def through(self, span: Span) -> Span:
        """The rows of the result that are these rows of the view."""
        taken = self.taken()
        return rows_at(taken[span.first : span.end] if span.chosen is None else taken[span.chosen.cpu()], self.recipe)


def rows_at(rows: torch.Tensor, recipe: Recipe) -> Span:
    """A tile of these rows of a recipe's result. `rows`: on the host."""
    first, n = int(rows[0]), rows.numel()
    if torch.equal(rows, torch.arange(first, first + n)):
        return Span(first, first + n)
    return Span(0, n, chosen=rows.to(recipe.device))


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
        plain = value.dtype == recipe.like.dtype and not value.is_neg() and not value.is_conj()
        return Seen(recipe, tuple(value.size()), tuple(value.stride()), int(value.storage_offset()), plain)
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


Make = Callable[[Seen], torch.Tensor]
"""Gives the tile of a view, for the rows or columns that are being made."""


class Recipe:
    """The result of an op, not computed.

    func, args, kwargs: the op and its arguments (`seen`).
    rows, columns: the sizes of the result as a matrix.
    like: a tensor of its sizes, strides and dtype, on the meta device.
    device: the device of its bytes.
    address: that of the storage that has no bytes yet; None if there is none, or none any more.
    stream: the one on which the op was called, and on which the bytes are made; None on the CPU.
    by_columns: whether it can be computed for tiles of columns, too.
    depth: how many recipes depend on each other, up to this one.
    keeps_rows: whether each row is made of the same row of what it reads.
    """

    __slots__ = (
        *("__weakref__", "address", "args", "by_columns", "columns", "depth", "device", "func", "kwargs", "like", "rows"),
        "stream",
    )
    keeps_rows = True

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device, like: Any) -> None:
        self.func = func
        self.args = tuple(args)
        self.kwargs = kwargs
        self.device = device
        self.stream = current_stream(device)
        self.like = like
        self.columns = int(like.size(-1))
        self.rows = like.numel() // max(1, self.columns)
        self.address: int | None = None
        self.by_columns: bool = all(s.recipe.by_columns for s in self.reads)
        self.depth: int = 1 + max((s.recipe.depth for s in seen_in((*self.args, *self.kwargs.values()))), default=0)

    @property
    def reads(self) -> list[Seen]:
        """The views of other recipes' results that it reads, one for each time."""
        return seen_in((*self.args, *self.kwargs.values()))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with bytes among its arguments."""
        return [t for t in (*self.args, *self.kwargs.values()) if isinstance(t, torch.Tensor)]

    @property
    def is_here(self) -> bool:
        """Whether this thread now queues work where the op was called."""
        return bool(self.stream == current_stream(self.device))

    @property
    def all(self) -> Seen:
        """A view of its whole result, as a matrix."""
        return Seen(self, (self.rows, self.columns), (self.columns, 1), 0)

    def computed(self, made: dict[int, torch.Tensor]) -> Any:
        """The result of its op on whole tensors. `made`: the recipes whose results are there already, by id."""
        return run_whole(self.func, self.args, self.kwargs, made)

    def assembled(self, size: int, rows: int | None = None) -> torch.Tensor:
        """All of its bytes, on a storage of their own, by tiles of `size` rows; or its first `rows`. Call below autograd."""
        shape = self.like.size() if rows is None else (rows, self.columns)
        result = torch.empty(shape, dtype=self.like.dtype, device=self.device)
        matrix = result.view(-1, self.columns)
        for span in spans(matrix.size(0), size):
            span.of(matrix).copy_(tiles([self.all], span)[0])
        return result

    def tile(self, make: Make, span: Span) -> torch.Tensor:
        """The tile `span` as a matrix."""
        raise NotImplementedError


def run_whole(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], made: dict[int, torch.Tensor]) -> Any:
    """The result of an op on whole tensors, which are made for it, each once. Call below autograd.

    made: the results that are there already, by the id of their recipe.
    """
    return func(*(_whole_of(a, made) for a in args), **{k: _whole_of(v, made) for k, v in kwargs.items()})


def _whole_of(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """An argument (`seen`), with tensors instead of `Seen`."""
    if type(value) is list:
        return [_whole_of(v, made) for v in value]
    if type(value) is not Seen:
        return value
    if id(value.recipe) not in made:
        made[id(value.recipe)] = value.recipe.computed(made)
    return made[id(value.recipe)].as_strided(value.size, value.stride, value.offset)


def around(recipe: Recipe) -> list[Recipe]:
    """The recipe, and all on which it depends."""
    found, waiting = dict[int, Recipe](), [recipe]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += [s.recipe for s in seen_in((*each.args, *each.kwargs.values()))]
    return list(found.values())


def digest(recipe: Recipe) -> str:
    """A digest of the ops of the recipe, and of all on which it depends, with what may choose their kernels: dtypes, numbers
    (`numbers_of`), and which part of which result each reads.
    """
    found = around(recipe)
    at = {id(each): i for i, each in enumerate(found)}

    def text(each: Recipe) -> str:
        values = (*each.args, *each.kwargs.values())
        reads = (f"{at[id(s.recipe)]}{s.which}" for s in seen_in(values))
        return f"{each.func._name} {each.like.dtype} {','.join(reads)}{numbers_of(each.func, values)}"

    return f"{crc32(';'.join(map(text, found)).encode()):08x}"


def numbers_of(func: OpOverload, values: Iterable[Any]) -> str:
    """The numbers and words among the arguments of an op, which may choose its kernel (an exponent, a kind of GELU); "" for ops
    in whose kernels they are operands.
    """
    if func._overloadpacket.__name__.removesuffix("_") in _OPERANDS:
        return ""
    return "".join(f" {value!r}" for value in values if isinstance(value, (int, float, str)))


def dtype_name(recipe: Recipe) -> str:
    """The name of a recipe's dtype."""
    return str(recipe.like.dtype).removeprefix("torch.")


_OPERANDS = {
    *("add", "sub", "rsub", "mul", "div", "masked_fill", "fill", "clamp", "clamp_min", "clamp_max", "threshold_backward"),
    *("eq", "ne", "lt", "le", "gt", "ge", "where", "_to_copy", "clone"),
}
"""Ops whose numbers are operands, like the entries of tensors."""


class _Tiles:
    """One tile of several recipes. What no op needs any more is freed at once."""

    def __init__(self, wanted: Sequence[Seen], span: Span) -> None:
        self._span = span
        self._left = Counter[int]()
        self._made: dict[int, torch.Tensor] = {}
        known, waiting = set[int](), list(wanted)
        while waiting:
            each = waiting.pop()
            if not span.columns and not each.is_whole:
                continue  # other rows than those of this tile
            recipe = each.recipe
            self._left[id(recipe)] += 1
            if id(recipe) not in known:
                known.add(id(recipe))
                if span.columns or recipe.keeps_rows:
                    waiting += recipe.reads

    def make(self, of: Seen) -> torch.Tensor:
        if self._span.columns:
            made = self._of(of.recipe)
            return made if of.is_whole else made[of.taken().to(made.device)]
        return self._of(of.recipe) if of.is_whole else tiles([of.recipe.all], of.through(self._span))[0]

    def _of(self, recipe: Recipe) -> torch.Tensor:
        made = self._made.get(id(recipe))
        if made is None:
            made = self._made[id(recipe)] = recipe.tile(self.make, self._span)
        self._left[id(recipe)] -= 1
        if not self._left[id(recipe)]:
            del self._made[id(recipe)]
        return made


def tiles(wanted: Sequence[Seen], span: Span) -> list[torch.Tensor]:
    """This tile of these views, as matrices."""
    made = _Tiles(wanted, span)
    return [made.make(each) for each in wanted]
