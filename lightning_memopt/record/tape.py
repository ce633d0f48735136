"""The record of a forward: storage versions, views on them, and the calls that made them.

A `Tape` is one forward pass. References point one way only: a handle that autograd holds -> its tape -> calls and storage
versions. Nothing on a tape refers to handles or to the recorder, so the tape is freed with the last handle, without the garbage
collector. Storages are recognised by the address of their object. A weak reference keeps that address from being used again
while the recorder may still meet the storage; it does not keep the storage's bytes.
"""

from __future__ import annotations

import abc
import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from lightning_memopt.record.settings import numeric_flags
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import OpOverload, conjugate, free_weak, negative, storage_id, storage_of_weak

UNKNOWN = -1
"""Instead of a count: the version counter has not been read yet."""
UNSHARED = -2
"""Instead of a count: views of the storage have their own version counters."""
OUTSIDE = "made outside of the recorded forward"
OVERWRITTEN = "overwritten in place by an op that does not run again"
"""Reasons why a storage version cannot be rebuilt."""


class Origin(enum.Enum):
    """How a storage version came to be."""

    RECORDED = "a recorded op made it"
    EMPTY = "a recorded op made it without any content (`empty`)"
    EXTERNAL = "no recorded op made it: it was there before the forward, or something that is not seen wrote it"


class HeldBytes(Protocol):
    """The bytes that the owner of a tape holds of a storage version. The recorder never reads this."""

    value: torch.Tensor | None
    """A tensor on the bytes, or None if the owner does not hold them."""


H = TypeVar("H", bound=HeldBytes)


class StorageVersion(Generic[H]):
    """The bytes of a storage between two writes. Where the native engine is loaded, the fields are those of its own class, with
    the methods of this one (`Tape.version`).

    id: numbers versions in order of first sight.
    nbytes: size of the storage.
    device: where the storage is.
    weak: a weak reference to the storage.
    origin: how the bytes came to be.
    call: the call that makes the bytes when it runs again; None if there is no such call.
    index: which of the call's results the bytes are.
    counter: the version counter when it was first read (`UNKNOWN`, `UNSHARED`).
    counter_in_op: the version counter while the op that wrote over the storage ran; None if no op did.
    next: id of the version that has overwritten this one; None while there is none.
    parameter: whether it was met as a parameter.
    exposed: whether its raw memory was handed out, so that it may change unseen (R4).
    read: whether a recorded op reads it, so that a rebuild may start from it.
    why: why it cannot be rebuilt; "" if it can.
    holding: what the owner of the tape holds of it.
    """

    __slots__ = (
        "call",
        "counter",
        "counter_in_op",
        "device",
        "exposed",
        "holding",
        "id",
        "index",
        "nbytes",
        "next",
        "origin",
        "parameter",
        "read",
        "weak",
        "why",
    )

    def __init__(self, id: int, t: torch.Tensor, tape: Tape[H], origin: Origin = Origin.RECORDED) -> None:
        storage = t.untyped_storage()
        self.id = id
        self.nbytes = storage.nbytes()
        self.device = t.device
        self.weak = tape.weak(storage)
        self.origin = origin
        self.call: Call | None = None
        self.index = 0
        self.counter = t._version
        self.counter_in_op: int | None = None
        self.next: int | None = None
        self.parameter = self.exposed = self.read = False
        self.why = ""
        self.holding: H = tape.holding()

    @property
    def external(self) -> bool:
        """Whether no recorded op made it."""
        return self.origin is Origin.EXTERNAL

    @property
    def empty(self) -> bool:
        """Whether it has no content yet."""
        return self.origin is Origin.EMPTY

    @property
    def stale(self) -> bool:
        """Whether a later version has overwritten it."""
        return self.next is not None

    def alive(self) -> torch.UntypedStorage | None:
        """The storage itself while anybody holds it."""
        storage = storage_of_weak(self.weak)
        return storage if isinstance(storage, torch.UntypedStorage) else None


def recount(targets: Sequence[torch.Tensor], of_storage: Mapping[int, StorageVersion]) -> None:
    """Take over the counters that torch has moved for an op that has not run yet (`Rule.counted_first`): no bytes have changed.

    Only if a counter has moved by exactly these writes. Otherwise something wrote before the op, unseen.

    targets: what the op writes. of_storage: address of a storage -> its version.
    """
    own = Counter(map(storage_id, targets))
    for t in targets:
        version = of_storage.get(storage_id(t))
        before = t._version - own[storage_id(t)]
        if version is None or before < 0:
            continue
        in_op = version.counter_in_op
        if version.counter == before or (version.counter == UNKNOWN and in_op is not None and before <= in_op + 1):
            version.counter = t._version


class View(abc.ABC):  # noqa: B024 - abstract only so that the native engine's class counts as a subclass
    """A strided window on the storage version with the id `version`. A tape keeps it instead of a tensor argument. Where the
    native engine is loaded, it is of its own class, with the methods of this one (`Tape.view`).
    """

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride", "version")

    def __init__(self, version: int, t: torch.Tensor) -> None:
        self.version = version
        self.size = t.size()
        self.stride = t.stride()
        self.offset = t.storage_offset()
        self.dtype = dtype = t.dtype
        self.conj = dtype.is_complex and t.is_conj()
        self.neg = t.is_neg()

    def named(self, version: int) -> View:
        """The same window, on another version."""
        other: View = View.__new__(View)
        for name in View.__slots__:
            setattr(other, name, getattr(self, name))
        other.version = version
        return other

    def same(self, t: torch.Tensor) -> bool:
        """Whether `t` is the same window, perhaps on another storage."""
        return (
            t.size() == self.size
            and t.stride() == self.stride
            and t.storage_offset() == self.offset
            and t.dtype is self.dtype
            and t.is_neg() is self.neg
            and (self.dtype.is_complex and t.is_conj()) is self.conj
        )

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """This window on `base`, a tensor on the version's bytes. Call below autograd, with dispatch modes off."""
        if base.dtype is self.dtype and not base.is_conj() and not base.is_neg():
            window = torch.as_strided(base, self.size, self.stride, self.offset)
        else:
            empty = torch.empty(0, dtype=self.dtype, device=base.device)
            window = empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            window = conjugate(window)
        if self.neg:
            window = negative(window)
        return window


class Call:
    """One recorded op: enough to run it again. It names storage versions by their ids, so that steps can share a call. Where
    the native engine is loaded, it is of its own class (`Tape.call`).

    op: the number of the call, in the order in which calls ran.
    func: the overload.
    args, kwargs: its arguments, with a `View` where a tensor was.
    reads: ids of the versions among the arguments.
    grad: the grad mode it ran under.
    rng: (generator, its state before) of a random op, else None.
    made: (position among the results, id of the version) of what it makes.
    mutates: (id overwritten, id made) of what it writes in place.
    repeats: whether it gives the same bits when it runs again. A random op does not, if its state was not recorded.
    prepared: the native engine's form of it; None if it runs again in Python.
    """

    __slots__ = ("args", "func", "grad", "kwargs", "made", "mutates", "op", "prepared", "reads", "repeats", "rng")

    def __init__(
        self, op: int, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], reads: tuple[int, ...], grad: bool
    ) -> None:
        self.op = op
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.grad = grad
        self.rng: tuple[torch.Generator, torch.Tensor] | None = None
        self.made: tuple[tuple[int, int], ...] = ()
        self.mutates: tuple[tuple[int, int], ...] = ()
        self.repeats = True
        self.prepared: object = None


class Tape(Generic[H]):
    """One recorded forward pass.

    versions: its storage versions by id. A version that is matched to a tensor of a plan is also found by that tensor's id.
    flags: the numeric settings the forward ran under.
    holding: makes the (empty) record of what the owner holds of a new version.
    weak_references: weak references to storages, released with the tape.
    native: the native engine, whose classes versions, views and calls are where it is loaded; None where Python's are.
    view: makes a `View` of (id of a version, tensor).
    call: makes a `Call`.
    """

    __slots__ = ("__weakref__", "call", "flags", "holding", "native", "versions", "view", "weak_references")

    def __init__(self, holding: Callable[[], H], native: Any = None) -> None:
        self.versions: dict[int, StorageVersion[H]] = {} if native is None else native.Versions()
        self.flags = numeric_flags()
        self.holding = holding
        self.weak_references: list[int] = []
        self.native = native
        self.view: type[View] = View if native is None else native.View
        self.call: type[Call] = Call if native is None else native.Call

    def version(self, id: int, t: torch.Tensor, origin: Origin = Origin.RECORDED) -> StorageVersion[H]:
        """A new version of the storage of `t`. It is not in `versions` yet."""
        if self.native is None:
            return StorageVersion(id, t, self, origin)
        made: StorageVersion[H] = self.native.version(id, t, origin)
        return made

    def weak(self, storage: torch.UntypedStorage) -> int:
        """Make a weak reference to a storage that lasts as long as the tape, so that its address is not used again before."""
        reference: int = storage._weak_ref()  # type: ignore[assignment]
        self.weak_references.append(reference)
        return reference

    @uncompiled
    def __del__(self) -> None:
        weak = getattr(self, "weak_references", None)  # None if `__init__` was interrupted
        while weak:
            free_weak(weak.pop())
