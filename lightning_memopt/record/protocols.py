"""The listeners of a recorder: the `Owner` of the forward and its `Holdings`, which decide what is held of every storage
version, an optional `Observer`, which is told when each op begins and ends, and optional `Tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_memopt.record.rules import Rule
from lightning_memopt.record.tape import Call, StorageVersion
from lightning_memopt.torch_private import OpOverload


@dataclass(slots=True)
class OpRecord:
    """One op as it was recorded.

    func: the overload that ran.
    rule: what is known of the op.
    args, kwargs: its arguments, with a `View` where an ordinary tensor was.
    reads: the storage versions it read, each once.
    made: the new storage versions, with a tensor on each.
    mutates: (version overwritten, new version, tensor) of what it wrote in place.
    call: how to run it again; None if that is impossible.
    recomputable: whether the op may run again at all.
    """

    func: OpOverload
    rule: Rule
    args: tuple
    kwargs: dict[str, Any]
    reads: tuple[StorageVersion, ...]
    made: list[tuple[StorageVersion, torch.Tensor]]
    mutates: list[tuple[StorageVersion, StorageVersion, torch.Tensor]]
    call: Call | None
    recomputable: bool

    def remakes(self, version: StorageVersion) -> bool:
        """Whether `call` makes the bytes of this new version when it runs again."""
        return not version.empty and version.index < self.rule.makes


class Observer(Protocol):
    """Is told of each op of a step (the tracer). `end` also gets the real arguments and results. `resized`: the size of a
    storage has changed, so version `new` follows `old`. `filled`: a storage without bytes has got them. `passes`: asked before
    each op; true if it wants to skip the op. `again`: memory was freed for the op, which had none left, and it runs again.
    `ops`: those in its graph so far; their number is the id of the next one.
    """

    passes: Callable[[], bool] | None

    @property
    def ops(self) -> Sized: ...

    def begin(self, func: OpOverload) -> None: ...
    def again(self) -> None: ...
    def ran(self) -> None: ...
    def end(self, record: OpRecord, args: tuple, kwargs: dict, out: Any) -> None: ...
    def resized(self, old: StorageVersion, new: StorageVersion) -> None: ...
    def filled(self, version: StorageVersion) -> None: ...


class Tiles(Protocol):
    """A loss head that runs in tiles (runtime/tiles). `took`: the last op made or read a tensor without bytes, so it cannot run
    again by itself. `works`: whether there is such a head in this step. `knows`: whether the tensor is one that is made in
    tiles, or compared with tiles: it is saved as it is.
    """

    took: bool

    @property
    def works(self) -> bool: ...

    def knows(self, t: torch.Tensor) -> bool: ...


class Holdings(Protocol):
    """Decides what is held of storage versions (the engine's). `t` is a tensor on the bytes of the version passed before it."""

    def met(self, version: StorageVersion) -> None:
        """The recorder met bytes that no recorded op made."""

    def read(self, version: StorageVersion, t: torch.Tensor) -> None:
        """An op reads bytes that no recorded op made; a rebuild may start from them."""

    def made(self, version: StorageVersion, reachable: bool) -> None:
        """An op made new memory. `reachable`: its call can make the bytes again, from bytes that are held or reachable."""

    def overwrites(self, version: StorageVersion) -> None:
        """The bytes of a version are about to change."""

    def overwritten(self, old: StorageVersion, new: StorageVersion, t: torch.Tensor, reachable: bool) -> None:
        """An op has just written `new` over `old`."""

    def replaced(self, old: StorageVersion, new: StorageVersion, t: torch.Tensor) -> bool:
        """`old` changed unseen, or may change unseen from now on; `new` has the present bytes.

        Returns whether bytes of `old` are held.
        """

    def recounted(self, version: StorageVersion, t: torch.Tensor) -> None:
        """The version counter of a version that an op wrote has become known: it is the counter of `t`."""

    def unchanged(self, version: StorageVersion) -> bool:
        """Whether the memory of an earlier version still has the bytes that are held of it."""

    def can_run(self, call: Call | None, reads: Sequence[StorageVersion]) -> bool:
        """Whether `call` gives the same bits when it runs again, and a rebuild can have the bytes of all versions it reads."""


class Owner(Protocol):
    """The owner of a forward (the engine)."""

    @property
    def holdings(self) -> Holdings:
        """What decides which bytes of the forward's storage versions are held."""

    def recorded(self, record: OpRecord) -> None:
        """An op ran, and all its versions are known."""

    def resizes(self, version: StorageVersion) -> None:
        """The storage of a version is about to be resized."""

    def gives_way(self) -> bool:
        """The device has no memory for an op: let go of bytes that can be rebuilt. Returns whether there were any."""

    def wants_state(self, name: str) -> bool:
        """Whether the generator's state must be recorded so that the next op, of this name, can run again."""
