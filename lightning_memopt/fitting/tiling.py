"""Steps that are recorded with their loss head in tiles: by the mode that runs them (`runtime/tiles`), without any bytes.

Bits can only be compared where ops are computed. So all tiles are taken to give those of the whole ops, in the smallest sizes
that a run tries. On the card, a run may find that it needs larger ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.cards import Card
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.graph import Graph
from lightning_memopt.plan import TiledHead
from lightning_memopt.plan.logits import head_of
from lightning_memopt.record import uncompiled
from lightning_memopt.record.tensors import tensors_in
from lightning_memopt.runtime.tiles import Sizes, TileMode
from lightning_memopt.runtime.tiles.hollow import recipe_of
from lightning_memopt.runtime.tiles.recipes import Recipe
from lightning_memopt.session.loss_head import NO_HEAD, NO_LOSS, parts, tiled_head
from lightning_memopt.session.tiling import Tiling, assuming
from lightning_memopt.torch_private import OpOverload, dispatch_key, set_excluded_keys, storage_id
from lightning_memopt.trace.flops import Flops

_PRODUCT = "aten::mm"
_BY_ROWS, _BY_COLUMNS = " by rows", " by columns"
"""What is in the names of ops that read the gradient of logits in tiles; without it, they read it whole."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _reads_gradient(name: str) -> bool:
    """Whether the op of this name reads the gradient of logits in tiles."""
    return _BY_ROWS in name or _BY_COLUMNS in name


class Cost(NamedTuple):
    """What the seconds of an op on a card depend on."""

    flops: int
    nbytes: int
    dtype: str
    name: str


class _All(frozenset[str]):
    """All names of ops and exits, but for those that read the gradient of logits if that is `whole`.

    asked: the names that were looked for.
    """

    whole: bool
    asked: set[str]

    def __new__(cls, whole: bool) -> _All:
        made = super().__new__(cls)
        made.whole, made.asked = whole, set()
        return made

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return not (self.whole and _reads_gradient(str(name)))


class _Mode(TileMode):
    """Runs the loss head of a step in tiles that have no bytes.

    spent: what ran in tiles. counted: the ops of the step for which it ran, as the recorded step has them.
    readers: names of ops that read whole tensors, which were made of tiles.
    """

    def __init__(self, head: TiledHead, sizes: Sizes, notes: bool, unfilled: Unfilled) -> None:
        super().__init__(head.classes, sizes, notes)
        self._unfilled = unfilled
        self._flops_of = Flops()
        self.spent, self.counted = Counter[Cost](), Counter[Cost]()
        self.readers = set[str]()

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named, ran = kwargs or {}, list[Cost]()
        with self._unfilled.beneath(lambda *call: ran.append(self._cost(*call))):
            made = super().__torch_dispatch__(func, types, args, named)
        if self.took and isinstance(func, OpOverload):
            self._hollow(tensors_in((*args, *named.values())), tensors_in(made))
            if not func.is_view:
                self.spent.update(ran)
                self.counted[self._cost(func, args, named, made)] += 1
        return made

    def _whole(self, recipe: Recipe, reader: str) -> torch.Tensor:
        self.readers.add(reader)
        with _dispatching(), self._unfilled:  # the caller has switched all modes off
            return super()._whole(recipe, reader)

    def _hollow(self, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Note that the bytes of hollow results are unknown, and on the card if those of what the op reads are."""
        for t in made:
            if recipe_of(t) is not None:
                self._unfilled.empties(t)
                if any(map(self._unfilled.is_on_device, read)):
                    self._unfilled.moves(t)

    def _cost(self, func: OpOverload, args: tuple, kwargs: dict, made: Any) -> Cost:
        tensors = [*tensors_in((*args, *kwargs.values())), *tensors_in(made)]
        nbytes = {storage_id(t): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}
        found = {t.dtype for t in tensors}
        dtype = next((name for each, name in _DTYPES.items() if each in found), "float32")
        return Cost(self._flops_of.of(func, args, kwargs, made), sum(nbytes.values()), dtype, func._schema.name)


@contextmanager
def _dispatching() -> Iterator[None]:
    """Within, modes see ops again (see `no_dispatch_modes`)."""
    with ExitStack() as stack:
        for name in ("Python", "PythonTLSSnapshot"):
            stack.enter_context(set_excluded_keys(dispatch_key(name), False))
        yield


class InTiles:
    """A step that is to be recorded in tiles, and how it was.

    whole: whether the gradient of the logits is made whole, once, for all products that read it.
    """

    def __init__(self, plain: Graph, whole: bool = False) -> None:
        """`plain`: the step as it is."""
        self.whole = whole
        self._plain = plain
        self._head: TiledHead | None = None
        self._mode: _Mode | None = None  # of the last step
        self._graph: Graph | None = None

    def assumed(self, unfilled: Unfilled) -> AbstractContextManager[None]:
        """Within, runs that are opened run in tiles. Opening one raises ConfigError with the reason if its model cannot."""
        return assuming(partial(self._assume, unfilled))

    def _assume(self, unfilled: Unfilled, tiling: Tiling, model: nn.Module) -> None:
        op = head_of(self._plain)
        head = None if op is None else tiled_head(self._plain, op, model)
        rows, columns = ((), ()) if head is None else (parts(head.rows)[:1], parts(head.columns)[:1])
        why = NO_HEAD if head is None else "" if rows else f"{head.rows} tokens are too few"
        if why or head is None:
            raise ConfigError(f"{why}. Set tile='off'")
        self.whole = self.whole or not columns

        def mode(notes: bool) -> TileMode:
            assert head is not None
            by_columns = notes and not self.whole
            self._head = replace(head, rows=rows[0], columns=columns[0] if by_columns else 0)
            sizes = Sizes(rows[0], self._head.columns, head.tokens, _All(self.whole), _All(whole=False))
            self._mode = _Mode(head, sizes, notes, unfilled)
            return self._mode

        tiling.assume(head, mode)

    def recorded(self, graph: Graph) -> None:
        """The step was recorded."""
        self._graph = graph

    @property
    def graph(self) -> Graph:
        """The recorded step."""
        assert self._graph is not None
        return self._graph

    @property
    def head(self) -> TiledHead:
        """The head, with the sizes of its tiles."""
        assert self._head is not None
        assert self._mode is not None
        products = {name for name in self._asked[0] if self.whole and _reads_gradient(name)}
        return replace(self._head, assembled=tuple(sorted(self._mode.readers | products)))

    @property
    def can_run(self) -> bool:
        """Whether something ran in tiles, in this way. A gradient that is whole for one product is whole for all."""
        return self._mode is not None and bool(self._mode.spent) and (self.whole or _PRODUCT not in self._asked[1])

    @property
    def other(self) -> InTiles | None:
        """The same step with a gradient that is whole; None if that is not another one."""
        exits, readers = self._asked
        both = all(any(way in name for name in exits) for way in (_BY_ROWS, _BY_COLUMNS))
        return None if self.whole or not (both or _PRODUCT in readers) else InTiles(self._plain, whole=True)

    @property
    def _asked(self) -> tuple[set[str], set[str]]:
        """Names that were looked for: of what may run in tiles, and of what reads whole tensors."""
        work = None if self._mode is None else self._mode.work
        if not isinstance(work, Sizes) or not isinstance(work.ops, _All) or not isinstance(work.assembled, _All):
            return set(), set()
        return work.ops.asked, work.assembled.asked

    def seconds(self, card: Card) -> float:
        """The seconds of the recorded step on a card, with those of tiles instead of those of the ops that they stand for."""
        assert self._mode is not None
        spent, counted = (
            sum(n * card.device.op_seconds(*cost) for cost, n in costs.items())
            for costs in (self._mode.spent, self._mode.counted)
        )
        return card.timed(self.graph).step_seconds + spent - counted


def recorded_in_tiles(plain: Graph, record: Callable[[InTiles], Graph]) -> list[InTiles]:
    """A step with its loss head in tiles, in each way in which it can run: with a gradient that is never whole, and with one
    that is. Raises ConfigError with the reason if there is none.
    """
    found: list[InTiles] = []
    tiles: InTiles | None = InTiles(plain)
    while tiles is not None:
        tiles.recorded(record(tiles))
        if tiles.can_run:
            found.append(tiles)
        tiles = tiles.other
    if not found:
        raise ConfigError(f"{NO_LOSS}. Set tile='off'")
    return found
