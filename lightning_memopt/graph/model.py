"""One training step as data: tensors, ops, saves of autograd, and the order in which everything happened.

The axis is `Graph.points`: every op, every time autograd asks for a saved tensor (*unpack*) and every time it lets go
of one (*release*), in the observed order. Lifetimes are closed intervals of indices on that axis: a tensor is in memory at the
points `born_at .. freed_at`. Bytes are ints, times are float seconds, ids are consecutive ints from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "update"]
Kind = Literal["parameter", "buffer", "input", "activation", "gradient", "optimizer_state", "temporary"]
PointKind = Literal["op", "unpack", "release"]
Lane = Literal["out", "in"]
Rest = Literal["weights", "gradient", "state"]

BEFORE = -1
"""`born_at` of tensors that exist when the step begins."""

OUTSIDE = "held outside of the step"
"""The name of a tensor that stands for bytes that existed before the step and do not belong to any tensor of it."""
UNRECORDED = "made by what is not recorded"
"""The name of a tensor that stands for bytes that no recorded op made, such as the number 2 of `x * 2` on the CPU."""
POOLS = "pools of FSDP2's streams"
"""The name of a tensor that stands for what a device's allocator keeps for the streams of a sharded model's collectives."""
HOOK = "fsdp::"
"""Prefix of the names of ops that stand for a hook of a sharded module, with its collectives."""
COMPILED = "compiled::code"
"""The name of an op that stands for one run of code that a compiler generated, forward or backward. The ops inside are not
seen.
"""
CALL = "memopt::call"
"""The name of an op that marks where a further call of the model in the same forward begins. In a planned step, what ran since
the previous call is not recorded. If ops of the call read results of that code, or of earlier calls, these count as results of
this op.
"""
LATE_HOOK = f"{HOOK}late"
"""The name of such an op if the buffers of its collectives may be freed only after the hook."""


class Point(NamedTuple):
    """One event of a step.

    kind: an op ran, or autograd asked for a save ("unpack"), or let go of it ("release").
    id: id of the op or of the save.
    occurrence: for an unpack, how often autograd had asked for this save before; 0 for other kinds.
    """

    kind: PointKind
    id: int
    occurrence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One version of one storage: the bytes that an op wrote. Views share the storage and are not tensors of their own.

    An in-place op makes a new version with the same `storage`; the lifetime of the old version ends before the op.

    id: index in `Graph.tensors`.
    name: scope and op that made it, or name of the parameter.
    nbytes: bytes on the training device.
    kind: what it is used for.
    storage: id of the first version of the same storage.
    born_at, freed_at: first and last point at which it is in memory *without any plan*, because user code, a gradient or the
        model holds it. Saves of autograd, which may hold it longer, are in `Graph.saves`.
    dtype: dtype of the tensor that fills the storage ("float32"); "" if none does.
    size: shape of that tensor; () if none does.
    windows: for a tensor whose bytes come and go without an op that makes them (a sharded weight that is gathered for a while):
        first and last point of every interval in which it is in memory. () if it is there from `born_at` to `freed_at`.
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
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last point of every interval in which it is in memory without any plan."""
        return self.windows or ((self.born_at, self.freed_at),)

    def there(self, point: int) -> bool:
        """Whether it is in memory at a point without any plan."""
        return any(first <= point <= last for first, last in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One dispatched operation.

    id: index in `Graph.ops`.
    name: overload, as "aten::addmm".
    phase: forward, backward or update.
    inputs: ids of the tensors that it read.
    outputs: ids of the tensors that it made.
    mutates: (overwritten version, new version) of each storage that it wrote in place.
    seconds: measured time.
    workspace_nbytes: most bytes that it allocates beyond its outputs.
    flops: floating-point operations; 0 if unknown.
    scope: the module that ran it, as "module.path#call".
    heavy: whether it is expensive to run again (a matrix product, a convolution).
    recomputable: whether running it again on the same inputs gives the same bits.
    state_nbytes: bytes of other state that running it again needs (of a random generator).
    at: index of its point in `Graph.points`.
    unrebuilt: outputs that running it again does not make, because its kernel does not write all of their bytes. A second run
        allocates them, and they are freed when it is over.
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
    unrebuilt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor that autograd packed for one node of backward.

    id: index in `Graph.saves`.
    tensor: the version that autograd reads. It is the packed one, or a later one that overwrote it without changing torch's
        version counter (the gates of an LSTM cell are parts of one storage).
    op: the op during which it was packed, or the next one (outputs are packed after their op has run).
    unpacked_at: points at which autograd asked for it.
    released_at: point at which autograd let go of it; the last point if it never did.
    """

    id: int
    tensor: int
    op: int
    unpacked_at: tuple[int, ...]
    released_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUpdate:
    """A parameter that may be updated in backward: the observed step did so, and freed its gradient.

    parameter: id of the tensor that is updated.
    at: its gradient is final after this point.
    nbytes: bytes of the gradient that an early update frees; 0 if other steps or a wrapper hold them anyway.
    since: the first point at which they are in memory only if the parameter is not updated early.
    until: the last point at which a step still has the gradient of the step before, if that one did not update early; `BEFORE`
        where the loop frees gradients before the next step begins.
    beside_nbytes: bytes that the update of this parameter alone takes in addition to weight, gradient and state.
    """

    parameter: int
    at: int
    nbytes: int
    since: int
    until: int = BEFORE
    beside_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy that every step makes, because what rests is parked meanwhile: weights, gradients, or optimizer state.

    what: what is copied.
    tensor: id of the first weight of a module, of a gradient, or of the parameter that has the state.
    lane: whether it is copied out of the device, or in.
    after: the copy begins after this point.
    before: it has ended before this point, or the step waits. Where this is the next point, the step waits for all of it.
    seconds: how long it takes.
    neighbour: id of the parameter whose early update is at the other point, beside that of its own; -1: there is none.
    """

    what: Rest
    tensor: int
    lane: Lane
    after: int
    before: int
    seconds: float
    neighbour: int = -1


def around(path: str) -> Iterator[str]:
    """The paths of a module and of those around it, from the inside; nothing for the model itself, whose path is empty."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def unpacks_of(saves: Iterable[Save]) -> list[tuple[int, Save]]:
    """(point, save) of every unpack of these saves, points rising."""
    unpacks = [(point, save.id, save) for save in saves for point in save.unpacked_at]
    return [(point, save) for point, _, save in sorted(unpacks, key=itemgetter(0, 1))]


@dataclass(frozen=True, eq=False)
class Graph:
    """A whole observed step.

    ops: in observed order, forward first; `ops[i].id == i`.
    tensors: `tensors[i].id == i`.
    saves: `saves[i].id == i`.
    points: the axis.
    device: type of the training device, "cpu" or "cuda".
    computed: whether the step was computed when it was recorded. If not (`memopt fit`), it has no workspaces and no measured
        times, and a few of its ops may have other names on the device.
    updates: the parameters that may be updated early, in the order in which their gradients are final. In this graph, all of
        them are.
    usual_nbytes: bytes that one update of all of them after backward takes in addition to weights, gradients and state.
    copies: those that the step makes in forward and backward of what rests.
    step_seconds: time of the unmodified step, measured or estimated from its ops.
    lines: id of a forward op -> line of user code that ran it. Not in files.
    save_lines: id of a save -> line of user code during which autograd packed it. Not in files.
    unbroken: modules that are called once in the forward: path -> (their first op, the op after their last). Not in files.
    gradients: name of a parameter -> (the tensor of its gradient, the point after which autograd has accumulated it for the
        first time). Not in files.
    asked: id of an op -> its requests to the device's allocator, in order: the bytes of an allocation, or -k if it freed its
        k-th one. Allocations that it did not free are its results. An op without an entry is one whose requests are not known.
        Not in files.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    saves: tuple[Save, ...]
    points: tuple[Point, ...]
    device: str = "cpu"
    computed: bool = True
    updates: tuple[EarlyUpdate, ...] = ()
    usual_nbytes: int = 0
    copies: tuple[Copy, ...] = ()
    step_seconds: float = 0.0
    lines: Mapping[int, str] = field(default_factory=dict, repr=False)
    save_lines: Mapping[int, str] = field(default_factory=dict, repr=False)
    unbroken: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    gradients: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    asked: Mapping[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def producers(self) -> dict[int, Op]:
        """Tensor id -> the op that made it. Tensors from before the step are not in it."""
        return {t: op for op in self.ops for t in op.outputs}

    @cached_property
    def rebuilders(self) -> dict[int, Op]:
        """Tensor id -> the op that makes it again when it runs again. Tensors that no op makes again are not in it."""
        return {t: op for op in self.ops if op.recomputable for t in op.outputs if t not in op.unrebuilt}

    @cached_property
    def consumers(self) -> dict[int, tuple[Op, ...]]:
        """Tensor id -> the ops that read it, in order."""
        readers: dict[int, list[Op]] = {}
        for op in self.ops:
            for t in dict.fromkeys(op.inputs):
                readers.setdefault(t, []).append(op)
        return {t: tuple(ops) for t, ops in readers.items()}

    @cached_property
    def saves_of(self) -> dict[int, tuple[Save, ...]]:
        """Tensor id -> its saves."""
        saves_by_tensor: dict[int, list[Save]] = {}
        for save in self.saves:
            saves_by_tensor.setdefault(save.tensor, []).append(save)
        return {t: tuple(saves) for t, saves in saves_by_tensor.items()}

    @cached_property
    def unpacks(self) -> list[tuple[int, Save]]:
        """(point, save) of every unpack of the step, points rising."""
        return unpacks_of(self.saves)

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Tensors that a later op overwrote in place: they cannot be kept, only rebuilt."""
        return frozenset(old for op in self.ops for old, _ in op.mutates)

    @cached_property
    def windowed(self) -> frozenset[int]:
        """Tensors whose bytes come and go, and that no op makes. An op that reads one can run again only in its windows."""
        return frozenset(t.id for t in self.tensors if t.windows)

    @cached_property
    def anchors(self) -> frozenset[int]:
        """Outputs of forward ops that no second run makes: rebuilds may start from them, but cannot make them."""
        return frozenset(t for op in self.forward for t in op.outputs if t not in self.rebuilders)

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward pass."""
        return tuple(op for op in self.ops if op.phase == "forward")

    @cached_property
    def runs_of_updates(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each update, early ones too: ops of updates that follow one another without another op between them. A
        step may have several (a GAN's two optimizers).
        """
        runs = groupby(self.ops, lambda op: op.phase)
        return tuple(tuple(ops) for phase, ops in runs if phase == "update")

    @cached_property
    def backward_begins(self) -> int:
        """The first point of the backward pass."""
        n = len(self.forward)
        return self.ops[n].at if n < len(self.ops) else len(self.points)

    @cached_property
    def biased(self) -> dict[int, int]:
        """Forward op that adds a bias to a product that nothing else holds -> the product. Without a dispatch mode, torch adds
        it in place (`linear` in ATen, for inputs that are not contiguous).
        """
        found = {}
        for op in self.forward:
            if op.name != "aten::add.Tensor" or len(op.inputs) != 2 or len(op.outputs) != 1:
                continue
            product, bias = op.inputs
            maker = self.producers.get(product)
            lone = self.tensors[product].freed_at <= op.at and product not in self.saves_of
            is_product = maker is not None and maker.name in ("aten::mm", "aten::bmm")
            if is_product and lone and self.tensors[bias].kind == "parameter":
                found[op.id] = product
        return found

    @cached_property
    def last_release(self) -> int:
        """The point at which autograd lets go of its last save; `BEFORE` if it saves nothing."""
        return max((s.released_at for s in self.saves), default=BEFORE)

    @cached_property
    def release_after(self) -> list[int]:
        """For every point, the first point from there on at which autograd releases a tensor that an op of the step made; the
        last point of the step if there is none.
        """
        releases = []
        next_release = len(self.points) - 1
        for p in range(len(self.points) - 1, -1, -1):
            if self.points[p].kind == "release" and self.asked_at(p) in self.producers:
                next_release = p
            releases.append(next_release)
        return releases[::-1]

    def packed(self, save: Save) -> int:
        """The version that autograd packed: `save.tensor`, or an earlier one that was overwritten before autograd read it."""
        tensor = save.tensor
        while tensor in self._written_over and self.producers[tensor].id >= save.op:
            tensor = self._written_over[tensor]
        return tensor

    @cached_property
    def _written_over(self) -> dict[int, int]:
        """New version -> the version that it overwrote."""
        return {new: old for op in self.ops for old, new in op.mutates}

    def ops_of(self, point: int) -> list[Op]:
        """The ops of the early update of a parameter whose gradient is final after this point."""
        ops = []
        for kind, id, _ in self.points[point + 1 :]:
            if kind != "op" or self.ops[id].phase != "update":
                break
            ops.append(self.ops[id])
        return ops

    def temporaries_of(self, point: int) -> list[int]:
        """The tensors that this update makes and frees before it is over."""
        ops = self.ops_of(point)
        made = (self.tensors[t] for op in ops for t in op.outputs)
        return [t.id for t in made if t.storage == t.id and t.freed_at <= ops[-1].at]

    def asked_at(self, point: int) -> int:
        """The tensor that autograd asks for, or lets go of, at an unpack or release point."""
        return self.saves[self.points[point].id].tensor

    def saved_until(self, tensor: int) -> int:
        """The last point at which autograd holds the tensor in the unmodified step; `BEFORE` if it never does."""
        return max((s.released_at for s in self.saves_of.get(tensor, ())), default=BEFORE)

    def reads(self, tensor: int) -> Iterator[tuple[int, int]]:
        """Intervals `(unpacked, released)` in which backward nodes use the tensor, in the order of their first unpacks."""
        for save in sorted(self.saves_of.get(tensor, ()), key=lambda s: s.unpacked_at[:1] or (1 << 60,)):
            if save.unpacked_at:
                yield save.unpacked_at[0], save.released_at
