"""The dispatch mode under which a loss head runs in tiles.

It is entered beneath all other modes when the module of the head is called, and left when the step is over. It sees each op
last, so recorders and modes of the user see the same ops as without tiles.

    op                                            what the mode does
    the head's product                            gives a hollow tensor (hollow.py) with a recipe
    reads hollow tensors, has a recipe            the same
    is a view of a hollow tensor                  gives a hollow view
    is an exit (exits.py)                         runs in tiles
    reads hollow tensors otherwise                makes their bytes first, and says so once

To *prove* tiles, all ops run as they are. Their results get recipes, and at each exit the tiles are compared with the result,
bit by bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_memopt.record import is_plain, numeric_flags, set_numeric_flags
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.modes import Outside
from lightning_memopt.record.rules import rule_of_call, written_by
from lightning_memopt.record.tensors import tensors_in
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.runtime.tiles.exits import Loss, Product, exit_for, spans
from lightning_memopt.runtime.tiles.hollow import fill, hollow, recipe_of, view_of
from lightning_memopt.runtime.tiles.recipes import Recipe, device_in, product_for, recipe_for, run_whole, seen
from lightning_memopt.torch_private import OpOverload, free_weak, storage_id


@dataclass
class Proof:
    """Which sizes of tiles give the bits of the whole ops.

    rows, columns: the sizes that have done so at every exit so far.
    ops: names of the ops that ran in tiles.
    exits: how many exits have been compared.
    by_columns: whether any of them ran in tiles of columns.
    wrong: the op at which the last size failed, for the message.
    """

    rows: list[int]
    columns: list[int]
    ops: set[str] = field(default_factory=set)
    exits: int = 0
    by_columns: bool = False
    wrong: str = ""

    def compare(self, exit: Loss | Product, func: OpOverload, result: Any) -> None:
        """An exit has run as it is, and gave `result`: run it in tiles of each size, and drop sizes that give other bits."""
        self.exits += 1
        self.by_columns = self.by_columns or exit.columns
        sizes = self.columns if exit.columns else self.rows
        for size in list(sizes):
            try:
                same = _gives(exit, size, result)
            except Exception:  # of a combination of ops that the rules do not foresee: it never runs in tiles
                same = False
            if not same:
                sizes.remove(size)
                self.wrong = func._name


def _gives(exit: Loss | Product, size: int, result: Any) -> bool:
    if isinstance(exit, Loss):
        return all(map(_equal, exit.run(size, notes=True), result))
    exit.note()
    for span in spans(exit.n, size, exit.columns):
        whole = result[span.first : span.end]
        part = torch.empty_like(whole)
        exit.into(part, span)
        if not _equal(part, whole):
            return False
    return True


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    words = _WORDS[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an entry -> integers of that size."""


@dataclass(frozen=True)
class Sizes:
    """Tiles that were proven.

    rows, columns: the size of tiles of rows, and of columns.
    tokens: the number of rows of the logits. With another one, the head is whole.
    ops: names of the ops that may run in tiles.
    checked: each exit also runs whole, and its bits are compared: tiles were proven on another machine.
    """

    rows: int
    columns: int
    tokens: int
    ops: frozenset[str]
    checked: bool = False


@dataclass
class Outcome:
    """What a step in tiles came to.

    heads: how many products were not computed.
    unmade_nbytes: bytes of the largest result that was never made.
    read: op or access by which user code read what was not there -> the bytes that were made for it.
    wrong: an op whose tiles have other bits than the whole op (`Sizes.checked`); "" if there is none.
    tokens: the number of rows of logits that were whole, because tiles were compared for another number; 0 if there were none.
    """

    heads: int = 0
    unmade_nbytes: int = 0
    read: dict[str, int] = field(default_factory=dict)
    wrong: str = ""
    tokens: int = 0


class TileMode(Outside):
    """Runs a loss head in tiles of some `sizes`, or proves that tiles give its bits.

    work: the sizes, or the proof.
    inside: whether the module of the head runs, so that the next product with `classes` columns is the head's.
    took: whether the last op made or read a hollow tensor: it must not run again by itself.
    outcome: what this step has come to so far.
    """

    sees_last = True

    def __init__(self, classes: int, work: Sizes | Proof, notes: bool) -> None:
        """`notes`: the gradient of the classes' vectors will be asked for."""
        super().__init__()
        self._classes = classes
        self.work = work
        self._notes = notes
        self.inside = self.took = False
        self._flags = numeric_flags()
        self.outcome = Outcome()
        self._sources: set[int] = set()
        """Storages of the tensors that recipes read."""
        self._recipes: weakref.WeakSet[Recipe] = weakref.WeakSet()
        self._proven: dict[int, Recipe] = {}
        """In a proof, storage -> the recipe of its bytes."""
        self._weak: list[int] = []
        """Weak references to these storages, so that their addresses are not used again."""

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.took = False
        named = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        read = [t for t in tensors_in((*args, *named.values())) if self.recipe_of(t) is not None]
        if self._recipes and func._schema.is_mutable:
            self._writes(func, args, named)
        if not read:
            return self._product(func, args, named) if self.inside else func(*args, **named)
        if isinstance(self.work, Proof):
            return self._prove(self.work, func, args, named)
        self.took = True
        return self._defer(self.work, func, args, named, read)

    def _product(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        recipe = product_for(func, args, kwargs) if all(map(is_plain, tensors_in(args))) else None
        if recipe is None or recipe.columns != self._classes:
            return func(*args, **kwargs)
        if isinstance(self.work, Sizes) and recipe.rows != self.work.tokens:
            self.outcome.tokens = recipe.rows
            return func(*args, **kwargs)
        self.outcome.heads += 1
        if isinstance(self.work, Proof):
            self.work.ops.add(func._name)
            return self._attached(func(*args, **kwargs), recipe)
        self.took = True
        return self._hollow(recipe)

    def _hollow(self, recipe: Recipe) -> torch.Tensor:
        self._recipes.add(recipe)
        self._sources.update(storage_id(t) for t in recipe.tensors)
        self.outcome.unmade_nbytes = max(self.outcome.unmade_nbytes, recipe.like.nbytes)
        return hollow(recipe)

    def _leaves(self, sizes: Sizes, exit: Loss | Product, func: OpOverload, args: Sequence[Any]) -> Any:
        """The result of an exit."""
        if isinstance(exit, Loss):
            result = exit.run(sizes.rows, self._notes)
        else:
            result = exit.run(sizes.columns if exit.columns else sizes.rows)
        if not sizes.checked:
            return result
        whole = run_whole(func, args, {})
        if not all(map(_equal, tensors_in(result), tensors_in(whole))):
            self.outcome.wrong = func._name
        return whole

    def knows(self, t: torch.Tensor) -> bool:
        """See `record.protocols.Tiles`."""
        return self.recipe_of(t) is not None

    def recipe_of(self, t: torch.Tensor) -> Recipe | None:
        """The recipe of a tensor's bytes; None if it has none."""
        if isinstance(self.work, Proof):
            return self._proven.get(storage_id(t)) if is_plain(t) else None
        return recipe_of(t)

    def _attached(self, t: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """`t`, which has the result of the recipe."""
        reference: int = t.untyped_storage()._weak_ref()  # type: ignore[assignment]
        self._weak.append(reference)
        self._proven[storage_id(t)] = recipe
        return t

    def _prove(self, proof: Proof, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        result = func(*args, **kwargs)
        known, named = self._seen(args, kwargs)
        exit = exit_for(func, known)
        if exit is not None:
            proof.ops.add(func._name)
            proof.compare(exit, func, result)
        elif isinstance(result, torch.Tensor) and is_plain(result) and self.recipe_of(result) is None:  # not a view
            recipe = recipe_for(func, known, named, result.device)
            if recipe is not None:
                proof.ops.add(func._name)
                self._attached(result, recipe)
            else:
                self.outcome.read.setdefault(func._name, 0)
        return result

    def _defer(self, sizes: Sizes, func: OpOverload, args: tuple, kwargs: dict, read: Sequence[torch.Tensor]) -> Any:
        if func.is_view or func._name == "aten::_unsafe_view":
            view = view_of(args[0], func, args, kwargs) if args and args[0] is read[0] else None
            if view is not None:
                return view
        elif func._name in sizes.ops:
            known, named = self._seen(args, kwargs)
            exit = exit_for(func, known)
            if exit is not None:
                return self._leaves(sizes, exit, func, known)
            recipe = recipe_for(func, known, named, device_in((*known, *named.values())))
            if recipe is not None:
                return self._hollow(recipe)
        self._make([r for t in read if (r := recipe_of(t)) is not None], func._name)
        return func(*args, **kwargs)

    def _seen(self, args: tuple, kwargs: dict) -> tuple[list[Any], dict[str, Any]]:
        return [seen(a, self.recipe_of) for a in args], {k: seen(v, self.recipe_of) for k, v in kwargs.items()}

    def _writes(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """An op is about to write. If recipes read what it writes, they are made first."""
        written = written_by(func, rule_of_call(func, args, kwargs), args, kwargs)
        if not self._sources.isdisjoint(map(storage_id, written)):
            self._make(list(self._recipes), func._name)

    def _make(self, recipes: Sequence[Recipe], reader: str) -> None:
        """Make the bytes of these recipes, because `reader` asks for them."""
        with below_autograd():
            for recipe in recipes:
                nbytes = fill(recipe)
                if nbytes:
                    self.outcome.read[reader] = self.outcome.read.get(reader, 0) + nbytes

    @uncompiled
    def asked(self, t: torch.Tensor, name: str) -> None:
        """Somebody reads `t` by a method that is no op."""
        recipe = recipe_of(t)
        if recipe is not None:
            self._make([recipe], f"Tensor.{name}()")

    @uncompiled
    def exposed(self, t: torch.Tensor, address: bool) -> None:
        """Somebody takes the raw memory of `t`, to read or to write it."""
        self.asked(t, "data_ptr")
        if self._recipes and storage_id(t) in self._sources:
            self._make(list(self._recipes), "raw memory")

    @uncompiled
    def leaving(self, memory: Iterable[torch.Tensor], reader: str) -> None:
        """This memory is about to be freed, or resized, by `reader`. If recipes read it, they are made first."""
        leaves = set(map(storage_id, memory))
        if isinstance(self.work, Proof):
            if any(storage_id(t) in leaves for recipe in self._proven.values() for t in recipe.tensors):
                self._proven.clear()  # what reads them later cannot be compared
        elif self._recipes and not self._sources.isdisjoint(leaves):
            self._make(list(self._recipes), reader)

    @uncompiled
    def settings_changed(self) -> None:
        """A numeric setting was set: what is not made yet is made by those of the forward."""
        now = numeric_flags()
        if self._recipes and now != self._flags:
            set_numeric_flags(self._flags)
            try:
                self._make(list(self._recipes), "another numeric setting")
            finally:
                set_numeric_flags(now)

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Around a run of generated code, which reads memory itself."""
        self._make(list(self._recipes), "compiled code")
        yield

    def end(self) -> None:
        """Weights are about to change: make what somebody still holds."""
        self._proven.clear()
        while self._weak:
            free_weak(self._weak.pop())
        self._make(list(self._recipes), "")
