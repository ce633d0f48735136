"""The dispatch mode under which a loss head runs in tiles.

It is entered beneath all other modes when the module of the head is called, and left when the step is over. It sees each op
last, so recorders and modes of the user see the same ops as without tiles.

    op                                            what the mode does
    the head's product                            gives a hollow tensor (hollow.py) with a recipe
    reads hollow tensors, has a recipe            the same
    writes to a hollow tensor, has a recipe       gives the tensor another recipe
    is a view of a hollow tensor                  gives a hollow view
    is an exit (exits.py)                         runs in tiles
    reads hollow tensors otherwise                makes their bytes first, from tiles; says so once if no proof has seen it

What is made of a tensor that has got its bytes is still made in tiles: its recipe is known as long as the bytes are there and
nobody has written to them.

To *prove* tiles, each of these ops is compared with the whole op, bit by bit, when it is called (proof.py). A product that
makes logits is looked for in a step of which nothing is known yet: a step of this size may not fit as it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_memopt.record import Recorder, is_plain, numeric_flags, set_numeric_flags
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.modes import Outside
from lightning_memopt.record.rules import rule_of_call, written_by
from lightning_memopt.record.tensors import tensors_in
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.runtime.tiles.exits import Exit, exit_for
from lightning_memopt.runtime.tiles.hollow import fill, hollow, recipe_of, set_recipe, view_of
from lightning_memopt.runtime.tiles.kinds import Product
from lightning_memopt.runtime.tiles.proof import HELD, Proof, Sizes
from lightning_memopt.runtime.tiles.recipes import Recipe, seen, seen_in
from lightning_memopt.runtime.tiles.rules import device_in, name_of, name_of_product, product_for, recipe_for, zeros_for
from lightning_memopt.torch_private import OpOverload, free_weak, storage_id, weak_expired


@dataclass
class Outcome:
    """What a step in tiles came to.

    heads: how many products were not computed.
    read: op or access by which user code read what was not there -> the bytes that were made for it.
    unproven: those of these ops that could run in tiles, but were not compared: the loop has another loss, for example.
    tokens: the number of rows of logits that were whole, because tiles were compared for another number; 0 if there were none.
    """

    heads: int = 0
    read: dict[str, int] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)
    tokens: int = 0


class _Known:
    """Storages that have bytes, as long as they live, and the recipes of these bytes, if they have any."""

    def __init__(self) -> None:
        # with a weak reference, so that the address is not used again
        self._recipes: dict[int, tuple[Recipe | None, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._recipes)

    def __contains__(self, t: torch.Tensor) -> bool:
        return storage_id(t) in self._recipes

    def __del__(self) -> None:
        if hasattr(self, "_recipes"):  # else its making was interrupted
            self.clear()

    def add(self, storage: int, reference: int, recipe: Recipe | None) -> None:
        """A storage has the result of the recipe. `reference`: a weak reference to it, which is freed here."""
        self._free(storage)
        self._recipes[storage] = (recipe, reference)

    def get(self, t: torch.Tensor) -> Recipe | None:
        """The recipe of the storage of `t`; None if it has none."""
        if not (is_plain(t) and _has_storage(t)) or t not in self:
            return None
        return self._recipes[storage_id(t)][0]

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """The storages of these tensors have other bytes."""
        for t in filter(_has_storage, tensors):
            self._free(storage_id(t))

    def purge(self) -> None:
        """Forget storages that are freed, and what their recipes hold."""
        for storage, (_, reference) in list(self._recipes.items()):
            if weak_expired(reference):
                self._free(storage)

    def clear(self) -> None:
        for storage in list(self._recipes):
            self._free(storage)

    def _free(self, storage: int) -> None:
        if storage in self._recipes:
            free_weak(self._recipes.pop(storage)[1])


class TileMode(Outside):
    """Runs a loss head in tiles of some sizes, or proves that tiles give its bits.

    work: the sizes, or the proof; None while no product is known that should run in tiles.
    inside: whether the module of the head runs, so that the next product with `classes` columns is the head's.
    flags: the numeric settings of the forward.
    took: whether the last op made or read a tensor with a recipe: it must not run again by itself.
    outcome: what this step has come to so far.
    recorder: is told of each storage that gets its bytes. A weak reference: the step of a recorder may end before this one.

    Many methods: one for each way in which an op, or a reader that is no op, can meet a tensor in tiles.
    """

    sees_last = True

    def __init__(self, classes: int, work: Sizes | Proof | None, notes: bool, begins: Begins = lambda product: None) -> None:
        """`notes`: the gradient of the classes' vectors will be asked for. `begins`: asked about each product with so many
        classes as long as there is no work.
        """
        super().__init__()
        self._classes = classes
        self.work = work
        self._begins_with = begins
        self._notes = notes
        self.inside = self.took = False
        self.flags = numeric_flags()
        self.outcome = Outcome()
        self.recorder: weakref.ref[Recorder] | None = None
        self._rows = set[int]()
        """The numbers of rows of what has recipes."""
        self._sources: set[int] = set()
        """Storages of the tensors that recipes read."""
        self._recipes: weakref.WeakSet[Recipe] = weakref.WeakSet()
        """Those of hollow tensors."""
        self._known = _Known()
        self._exposed = _Known()
        """Storages of which somebody has an array: they may be written to unseen."""

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.took = False
        named = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        if self._known:
            self._known.purge()
        if self._sources and func._schema.is_mutable:
            self._writes(func, args, named)
        read = [t for t in tensors_in((*args, *named.values())) if self.recipe_of(t) is not None]
        if not read:
            return self._begins(func, args, named)
        self.took = True
        return self._defer(func, args, named, read)

    # -- ops that read nothing with a recipe -------------------------------------------------------

    def _begins(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        recipe: Recipe | None = None
        if self._rows:
            recipe = zeros_for(func, args, kwargs, self._rows, self._classes)
        if recipe is None and self.inside:
            recipe = self._product(func, args, kwargs)
        name = name_of_product(recipe) if isinstance(recipe, Product) else name_of(func)
        if recipe is None or not self._may(name):
            if recipe is not None:
                self._is_unproven(name)
            return func(*args, **kwargs)
        self.took = True
        return self._made(recipe, name, func)

    def _product(self, func: OpOverload, args: tuple, kwargs: dict) -> Recipe | None:
        recipe = product_for(func, args, kwargs) if all(map(is_plain, tensors_in(args))) else None
        if recipe is None or recipe.columns != self._classes or any(t in self._exposed for t in recipe.tensors):
            return None
        if self.work is None:
            self.work = self._begins_with(recipe)
        if self.work is None or not self.work.rows:
            return None
        if isinstance(self.work, Sizes) and recipe.rows != self.work.tokens:
            self.outcome.tokens = recipe.rows
            return None
        self.outcome.heads += 1
        return recipe

    def _may(self, name: str) -> bool:
        """Whether an op may run in tiles: in a proof, all may."""
        return not isinstance(self.work, Sizes) or name in self.work.ops

    def _made(self, recipe: Recipe, name: str, func: OpOverload) -> torch.Tensor:
        """The result of an op that has a recipe."""
        proven = self._proven(recipe, name, name_of(func))
        if isinstance(proven, torch.Tensor):
            return proven
        self._rows.add(proven.rows)
        self._follow(proven)
        return hollow(proven)

    def _proven(self, recipe: Recipe, name: str, reader: str) -> Recipe | torch.Tensor:
        """See `Proof.recipe`; of tiles that were proven, the recipe."""
        return self.work.recipe(recipe, name, reader) if isinstance(self.work, Proof) else recipe

    def _follow(self, recipe: Recipe) -> None:
        self._recipes.add(recipe)
        self._sources.update(storage_id(t) for t in recipe.tensors)

    # -- ops that do -------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """See `record.protocols.Tiles`."""
        return self.work is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left that has no bytes."""
        return all(recipe.address is None for recipe in list(self._recipes))

    def knows(self, t: torch.Tensor) -> bool:
        """See `record.protocols.Tiles`."""
        return self.recipe_of(t) is not None

    def recipe_of(self, t: torch.Tensor) -> Recipe | None:
        """The recipe of a tensor's bytes; None if it has none."""
        recipe: Recipe | None = recipe_of(t)
        return self._known.get(t) if recipe is None and self._known else recipe

    def _how(self, func: OpOverload, args: tuple, kwargs: dict) -> tuple[Exit | None, Recipe | None, str]:
        """How an op that reads what has recipes can run in tiles: as an exit, or by a recipe of its own; and its name."""
        known = [seen(a, self.recipe_of) for a in args]
        named = {k: seen(v, self.recipe_of) for k, v in kwargs.items()}
        values = (*known, *named.values())
        name = name_of(func, values)
        if _is_view(func) or not all(s.recipe.is_here for s in seen_in(values)):
            return None, None, name
        exit = exit_for(func, known, named)
        recipe = recipe_for(func, known, named, device_in(values)) if exit is None else None
        if recipe is None or self._may(name):
            return exit, recipe, name
        self._is_unproven(name_of(func))
        return None, None, name

    def _defer(self, func: OpOverload, args: tuple, kwargs: dict, read: Sequence[torch.Tensor]) -> Any:
        reader = name_of(func)
        if _is_view(func):
            view = view_of(args[0], func, args, kwargs) if args and recipe_of(args[0]) is not None else None
            if view is not None:
                return view
        else:
            exit, recipe, name = self._how(func, args, kwargs)
            if exit is not None:
                reader = exit.key
                if isinstance(self.work, Proof):
                    return self.work.exit(exit)
                if self._may(exit.proven_as):
                    return self._leaves(exit)
                self._is_unproven(reader)
            if recipe is not None and not func._schema.is_mutable:
                return self._made(recipe, name, func)
            if recipe is not None and recipe_of(args[0]) is not None:
                proven = self._proven(recipe, name, reader)
                if not isinstance(proven, torch.Tensor):
                    self._follow(proven)
                    set_recipe(args[0], proven)
                    return args[0]
        self._make([r for t in read if (r := recipe_of(t)) is not None], reader)
        result = func(*args, **kwargs)
        self._overwritten(func, args, kwargs)
        return result

    def _overwritten(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """An op has run: what it has written to has other bytes than those of a recipe."""
        if self._known and func._schema.is_mutable:
            self._known.drop(_written(func, args, kwargs))

    def _is_unproven(self, reader: str) -> None:
        """This op could run in tiles, and may not. Where a proof has compared it, it is known that it reads whole tensors."""
        if isinstance(self.work, Sizes) and reader not in self.work.assembled:
            self.outcome.unproven.add(reader)

    def _leaves(self, exit: Exit) -> Any:
        """The result of an exit."""
        assert isinstance(self.work, Sizes)
        rows, columns = self.work.rows, self.work.columns
        if exit.columns:
            return exit.run(columns, rows)
        return exit.run(rows, rows if self._notes and columns else 0)

    def _writes(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """An op is about to write. If recipes read what it writes, they are made first."""
        self.leaving(_written(func, args, kwargs), func._name)

    def _make(self, recipes: Sequence[Recipe], reader: str) -> None:
        """Make the bytes of these recipes, because `reader` asks for them."""
        with below_autograd():
            for recipe in recipes:
                address = recipe.address
                if address is not None:
                    self._known.add(address, fill(recipe, partial(self._whole, recipe, reader)), recipe)
                    recorder = None if self.recorder is None else self.recorder()
                    if recorder is not None:
                        recorder.filled(address)

    def _whole(self, recipe: Recipe, reader: str) -> torch.Tensor:
        """The bytes of a recipe, which `reader` reads."""
        if isinstance(self.work, Proof):
            return self.work.assembled(recipe, reader)
        assert self.work is not None
        if reader not in self.work.assembled:
            self.outcome.read[reader] = self.outcome.read.get(reader, 0) + recipe.like.nbytes
        return recipe.assembled(self.work.rows)

    def _make_all(self, reader: str) -> None:
        """What recipes read is about to change: make what is alive."""
        self._make(list(self._recipes), reader)
        self._known.clear()

    @uncompiled
    def asked(self, t: torch.Tensor, name: str) -> None:
        """Somebody reads `t` by a method that is no op."""
        recipe = recipe_of(t)
        if recipe is not None:
            self._make([recipe], f"Tensor.{name}()")
        self._known.drop([t])  # it may be written to unseen

    @uncompiled
    def exposed(self, t: torch.Tensor, address: bool) -> None:
        """Somebody takes the raw memory of `t`, to read or to write it."""
        self.asked(t, "data_ptr")
        if not address and _has_storage(t):
            self._exposed.purge()
            reference: int = t.untyped_storage()._weak_ref()  # type: ignore[assignment]
            self._exposed.add(storage_id(t), reference, None)
        self.leaving([t], "raw memory")

    @uncompiled
    def opened(self, storage: torch.UntypedStorage) -> None:
        """Somebody reads a storage without a tensor."""
        self._make([r for r in list(self._recipes) if r.address == storage._cdata], "a storage's reader")

    @uncompiled
    def leaving(self, memory: Iterable[torch.Tensor], reader: str) -> None:
        """This memory is about to be freed, resized or written to by `reader`. If recipes read it, they are made first."""
        storages = {storage_id(t) for t in memory if _has_storage(t)}
        if self._sources.isdisjoint(storages):
            return
        # those of recipes that are gone may be freed, and their addresses used again
        self._sources = {storage_id(t) for recipe in list(self._recipes) for t in recipe.tensors}
        if not self._sources.isdisjoint(storages):
            self._make_all(reader)

    @uncompiled
    def settings_changed(self) -> None:
        """A numeric setting was set: what is not made yet is made by those of the forward."""
        now = numeric_flags()
        if now != self.flags:
            set_numeric_flags(self.flags)
            try:
                self._make_all("another numeric setting")
            finally:
                set_numeric_flags(now)

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Around a run of generated code, which reads memory itself."""
        self._make_all("compiled code")
        yield

    def end(self) -> None:
        """Weights are about to change: make what somebody still holds."""
        self._make_all(HELD)
        self._rows.clear()
        self._sources.clear()


Begins = Callable[[Recipe], Proof | None]
"""Whether tiles are to be proven, from this product on, in a step of which nothing is known."""


def _has_storage(t: torch.Tensor) -> bool:
    """Whether a tensor is on a storage: a sparse one is not."""
    return t.layout == torch.strided


def _written(func: OpOverload, args: tuple, kwargs: dict) -> Iterable[torch.Tensor]:
    """The tensors to which an op writes."""
    return written_by(func, rule_of_call(func, args, kwargs), args, kwargs)


def _is_view(func: OpOverload) -> bool:
    return bool(func.is_view) or func._name == "aten::_unsafe_view"
