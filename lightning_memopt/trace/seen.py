"""Tensors, ops and saves of a step that is being observed. At the end the tracer makes those of the graph from them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from lightning_memopt.graph.model import BEFORE, Kind, Phase


@dataclass(slots=True)
class SeenTensor:
    """One version of a storage. Fields are those of `graph.Tensor`, but `freed_at` is None while it is in memory.

    windows: the windows that are over.
    open_at: the first point of the present window; None if the weight is not gathered, or the tensor has no windows.
    """

    name: str
    nbytes: int
    kind: Kind
    storage: int
    born_at: int
    freed_at: int | None = None
    dtype: str = ""
    size: tuple[int, ...] = ()
    windows: tuple[tuple[int, int], ...] = ()
    open_at: int | None = None

    def opens(self, point: int) -> None:
        """A window begins at this point. May be repeated."""
        if self.open_at is None:
            self.open_at, self.freed_at = point, None

    def closes(self, point: int) -> None:
        """A window ends with this point."""
        assert self.open_at is not None
        if self.open_at <= point:
            self.windows = (*self.windows, (self.open_at, point))
        self.open_at, self.freed_at = None, self.windows[-1][1] if self.windows else BEFORE

    def intervals(self, end: int) -> tuple[tuple[int, int], ...]:
        """All windows of a step whose last point is `end`."""
        if self.open_at is None or self.open_at > end:
            return self.windows
        return *self.windows, (self.open_at, end if self.freed_at is None else self.freed_at)


@dataclass(slots=True)
class SeenOp:
    """One op. Fields are those of `graph.Op`, with ids of storage versions."""

    name: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[tuple[int, int], ...]
    seconds: float
    workspace_nbytes: int
    flops: int
    scope: str
    heavy: bool
    recomputable: bool
    state_nbytes: int
    at: int
    unrebuilt: tuple[int, ...] = ()


@dataclass(slots=True)
class SeenSave:
    """One save of autograd.

    tensor: id of the saved tensor.
    op: number of ops before the save.
    line: line of user code that made the save.
    unpacked_at: points at which autograd asked for it.
    released_at: point at which autograd released it; None before.
    """

    tensor: int
    op: int
    line: str
    unpacked_at: list[int] = field(default_factory=list)
    released_at: int | None = None

    def first_needed_at(self, end: int) -> int:
        """The point at which autograd first asks for the save or, if it never does, releases it; `end` if it does neither."""
        if self.unpacked_at:
            return self.unpacked_at[0]
        return end if self.released_at is None else self.released_at


def never_asked(saves: Iterable[SeenSave], end: int, written: Collection[int]) -> dict[int, int]:
    """Tensor -> last point at which autograd holds it, for tensors that are saved but never asked for (a head without a loss).

    No plan covers these tensors, so they are kept. `end`: last point of the step. `written`: tensors that were overwritten.
    """
    saves = list(saves)
    asked = {save.tensor for save in saves if save.unpacked_at}
    held_until: dict[int, int] = {}
    for save in saves:
        if save.tensor not in asked and save.tensor not in written:
            released_at = end if save.released_at is None else save.released_at
            held_until[save.tensor] = max(held_until.get(save.tensor, -1), released_at)
    return held_until


def gone(tensors: Mapping[int, SeenTensor], saves: Iterable[SeenSave]) -> frozenset[int]:
    """The tensors that are not in memory any more, by the ids that the graph has: there, one that was freed at the last point
    looks like one that stays.
    """
    held = {save.tensor for save in saves if save.released_at is None}
    return frozenset(i for i, id in enumerate(sorted(tensors)) if tensors[id].freed_at is not None and id not in held)


class Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with its key. So its callback needs no closure, which the garbage collector would visit.

    key: the key of the storage in the tracer.
    """

    __slots__ = ("key",)
    key: int
