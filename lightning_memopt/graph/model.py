"""One training step as data: tensors, ops, what autograd saved, and the one total order of everything that happened.

The axis is `Graph.points`: every op, every request of autograd for a saved tensor (*unpack*) and every moment it lets one
go (*release*), in the order in which they were observed. All lifetimes are closed intervals of indices on that axis:
a tensor is in memory at the points `born_at .. freed_at`. Bytes are ints, times are float seconds, ids are dense ints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "update"]
Kind = Literal["parameter", "buffer", "input", "activation", "gradient", "optimizer_state", "temporary"]
PointKind = Literal["op", "unpack", "release"]

BEFORE = -1
"""`born_at` of what exists when the step begins."""


class Point(NamedTuple):
    """One thing that happened: an op ran, autograd asked for save `id` the `occurrence`-th time, or let it go."""

    kind: PointKind
    id: int
    occurrence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One version of one storage: what an op wrote. Views are no tensors of their own; they share the storage.

    `born_at .. freed_at` is the interval in which it is in memory *whatever the plan says*: because user code, a
    gradient in flight or the model itself holds it. What autograd holds beyond that is in the graph's saves.
    An in-place op makes a new version: same `storage`, `born_at` the op, and the old version's interval ends before it.
    `dtype` ("float32") and `size` are those of the tensor that fills the storage; empty where none does.
    """

    id: int
    name: str
    nbytes: int
    kind: Kind
    storage: int
    born_at: int
    freed_at: int
    dtype: str = ""
    size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One dispatched operation.

    `inputs` are the tensors it read, `outputs` those it made. `mutates` pairs the version it overwrote with the version it
    made. `workspace_nbytes` is what it allocates at its worst moment beyond its outputs. `recomputable` says that running
    it again on the same inputs gives the same bits; `state_nbytes` is what must be kept to do so (a generator's state).
    `whole` says that it overwrites what it mutates without reading it. `scope` is `module.path#call`.
    """

    id: int
    name: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    workspace_nbytes: int = 0
    flops: int = 0
    scope: str = ""
    heavy: bool = False
    recomputable: bool = False
    state_nbytes: int = 0
    at: int = 0
    """Its index in `Graph.points`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor packed by autograd for one node; `unpacked_at` and `released_at` index `Graph.points`.

    `op` is the op during which it was packed, or the one after it (what an op makes is packed when it has run). `tensor` is the
    version that autograd reads: what was packed, or what was written over it where no version counter moved (the gates
    of an LSTM cell are pieces of one storage). A save that the step never released has `released_at` at the last point.
    """

    id: int
    tensor: int
    op: int
    unpacked_at: tuple[int, ...]
    released_at: int


@dataclass(frozen=True, eq=False)
class Graph:
    """A whole observed step. `ops` are in observed order, forward first; `ops[i].id == i`, `tensors[i].id == i`."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    saves: tuple[Save, ...]
    points: tuple[Point, ...]
    device: str = "cpu"
    step_seconds: float = 0.0
    """Median time of the unmodified step, measured or estimated from its ops."""
    lines: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Forward op -> the line of user code that ran it. Known where the step was observed; files do not have them."""
    save_lines: Mapping[int, str] = field(default_factory=dict, repr=False)
    """The same of saves: the line during which autograd packed them."""

    @cached_property
    def producers(self) -> dict[int, Op]:
        """Tensor id -> the op that made it; what existed before the step has none."""
        return {t: op for op in self.ops for t in op.outputs}

    @cached_property
    def consumers(self) -> dict[int, tuple[Op, ...]]:
        """Tensor id -> the ops that read it, in order."""
        found: dict[int, list[Op]] = {}
        for op in self.ops:
            for t in dict.fromkeys(op.inputs):
                found.setdefault(t, []).append(op)
        return {t: tuple(ops) for t, ops in found.items()}

    @cached_property
    def saves_of(self) -> dict[int, tuple[Save, ...]]:
        """Tensor id -> what autograd saved of it."""
        found: dict[int, list[Save]] = {}
        for save in self.saves:
            found.setdefault(save.tensor, []).append(save)
        return {t: tuple(saves) for t, saves in found.items()}

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Tensors whose storage a later op overwrote in place: they cannot be kept, only rebuilt."""
        return frozenset(old for op in self.ops for old, _ in op.mutates)

    @cached_property
    def anchors(self) -> frozenset[int]:
        """What forward ops made that cannot run again: rebuilds may start from it, none can make it."""
        return frozenset(t for op in self.forward if not op.recomputable for t in op.outputs)

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.phase == "forward")

    @cached_property
    def backward_begins(self) -> int:
        """The first point of the backward pass."""
        n = len(self.forward)
        return self.ops[n].at if n < len(self.ops) else len(self.points)

    @cached_property
    def last_release(self) -> int:
        """The point at which autograd lets go of the last saved tensor; `BEFORE` when it saves none."""
        return max((s.released_at for s in self.saves), default=BEFORE)

    @cached_property
    def release_after(self) -> list[int]:
        """For every point the first one from there on at which autograd lets go of what an op of the step made; else the last
        point.
        """
        found, last = [], len(self.points) - 1
        for p in range(len(self.points) - 1, -1, -1):
            last = p if self.points[p].kind == "release" and self.asked_at(p) in self.producers else last
            found.append(last)
        return found[::-1]

    def packed(self, save: Save) -> int:
        """The version that was there when autograd packed: `save.tensor`, or one that was overwritten until it was read."""
        tensor = save.tensor
        while tensor in self._written_over and self.producers[tensor].id >= save.op:
            tensor = self._written_over[tensor]
        return tensor

    @cached_property
    def _written_over(self) -> dict[int, int]:
        return {new: old for op in self.ops for old, new in op.mutates}

    def asked_at(self, point: int) -> int:
        """The tensor that autograd asks for, or lets go of, at a point that is no op."""
        return self.saves[self.points[point].id].tensor

    def saved_until(self, tensor: int) -> int:
        """The last point at which autograd holds the tensor in the unmodified step; `BEFORE` if it never does."""
        return max((s.released_at for s in self.saves_of.get(tensor, ())), default=BEFORE)

    def reads(self, tensor: int) -> Iterator[tuple[int, int]]:
        """Intervals `(unpacked, released)` in which backward nodes use the tensor, in order of their first request."""
        for save in sorted(self.saves_of.get(tensor, ()), key=lambda s: s.unpacked_at[:1] or (1 << 60,)):
            if save.unpacked_at:
                yield save.unpacked_at[0], save.released_at
