"""What the recorder writes down: slots (versions of storages), views on them, and the calls that made them.

A `Tape` is one forward pass. References point one way only: a handle that autograd holds -> its tape -> calls and slots.
Nothing on a tape refers to handles or to the recorder, so it dies with the last handle, without the garbage collector.
Storages are recognised by their live object: a weak reference keeps the storage's address from being used again while
the recorder may still meet it; it does not keep its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from lightning_memopt.record.settings import numeric_flags
from lightning_memopt.record.uncompiled import uncompiled

UNKNOWN = -1
"""No version: the counter has not been read yet."""
UNSHARED = -2
"""No version: views of the storage count for themselves."""

storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


class AwayCopy(Protocol):
    """A slot's bytes where they are away (runtime/away.py)."""

    exact: bool
    lossy: bool
    gone: bool
    spent: bool
    noted: int

    def wait_gone(self) -> None: ...
    def begin(self) -> None: ...
    def put_off(self) -> None: ...
    def spend(self) -> None: ...
    def value(self) -> torch.Tensor: ...
    def in_order(self, shown: torch.Tensor) -> None: ...


class Slot:
    """One version of one storage.

    `value` is a tensor on the storage where something of ours holds its bytes, else None. `ok`: it can be made again from
    what is held (or is held itself). `version` is what the version counter said when it was first read.
    `noted` is what that of `value` must still say: as when it was read, when the forward ended, or when it was rebuilt.
    `counted`: the counter while the op that wrote over the storage was under way. `parameter`: it was met as one.
    `id` numbers slots in order of first sight. `stale`: a later version, with the id `next`, has overwritten it. `read`: a
    recorded op starts from it. `exposed`: its memory was handed out. `asked`: what was saved of an earlier version may be read
    from it, where no version counter moves; `pinned`: and is, so that it stays. `plan`: the tensor of the plan's graph that it
    is, once matched. `stream`: on CUDA, the stream in whose order a rebuild made or last read its bytes. `away`: a copy
    elsewhere or in another form; `shown`: what came back of it where that has not the very bits, for autograd alone.
    """

    __slots__ = (
        "asked",
        "away",
        "call",
        "counted",
        "device",
        "empty",
        "exposed",
        "external",
        "handles",
        "id",
        "index",
        "nbytes",
        "next",
        "noted",
        "ok",
        "parameter",
        "pinned",
        "plan",
        "read",
        "shown",
        "stale",
        "stream",
        "value",
        "version",
        "weak",
        "why",
    )

    def __init__(self, id: int, t: torch.Tensor, tape: Tape) -> None:
        storage = t.untyped_storage()
        self.id = id
        self.nbytes = storage.nbytes()
        self.device = t.device
        self.weak = tape.weak(storage)
        self.version = t._version
        self.call: Call | None = None
        self.index = 0
        self.value: torch.Tensor | None = None
        self.away: AwayCopy | None = None
        self.shown: torch.Tensor | None = None
        self.plan: int | None = None
        self.next: int | None = None
        self.handles = 0
        self.noted = UNKNOWN
        self.counted: int | None = None
        self.stream: Any = None
        self.ok = self.empty = self.external = self.exposed = self.read = self.stale = self.pinned = self.asked = False
        self.parameter = False
        self.why = ""

    def alive(self) -> torch.UntypedStorage | None:
        """The storage itself while anybody holds it."""
        found = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return found if isinstance(found, torch.UntypedStorage) else None


class View:
    """A strided window on the slot with the id `slot`: how one tensor argument is found again."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "slot", "stride")

    def __init__(self, slot: int, t: torch.Tensor) -> None:
        self.slot = slot
        self.size = t.size()
        self.stride = t.stride()
        self.offset = t.storage_offset()
        self.dtype = dtype = t.dtype
        self.conj = dtype.is_complex and t.is_conj()
        self.neg = t.is_neg()

    def same(self, t: torch.Tensor) -> bool:
        """Whether `t` is the same window on whatever it is on."""
        return (
            t.size() == self.size
            and t.stride() == self.stride
            and t.storage_offset() == self.offset
            and t.dtype is self.dtype
            and t.is_neg() is self.neg
            and (self.dtype.is_complex and t.is_conj()) is self.conj
        )

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """This window on `base`, a tensor on the slot's bytes. Call below autograd, with dispatch modes off."""
        if base.dtype is self.dtype and not base.is_conj() and not base.is_neg():
            found = torch.as_strided(base, self.size, self.stride, self.offset)
        else:
            empty = torch.empty(0, dtype=self.dtype, device=base.device)
            found = empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            found = torch._conj(found)
        if self.neg:
            found = torch._neg_view(found)
        return found


class Call:
    """One recorded op: enough to run it again. Slots are named by their ids on the tape, so that steps can share a call.

    `args` and `kwargs` hold a `View` where a tensor was; `reads` are the slots among them. `made` pairs the position of an
    output with its slot, `mutates` the slot it overwrote with the slot it made. `rng` is (generator, its state
    before). `repeats`: running it again gives the same bits; not so for a random op whose state nobody wanted. `op` orders
    calls by when they ran.
    """

    __slots__ = ("args", "func", "grad", "kwargs", "made", "mutates", "op", "reads", "repeats", "rng")

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


class Tape:
    """One recorded forward pass: its slots by id, and the numeric settings it ran under.

    A slot that is matched to a tensor of a plan is found under that tensor's id too (`Slot.plan`).
    """

    __slots__ = ("__weakref__", "_weak", "flags", "slots")

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.flags = numeric_flags()
        self._weak: list[int] = []

    def weak(self, storage: torch.UntypedStorage) -> int:
        """A weak reference to a storage that lasts as long as the tape: its address is not used again before."""
        found: int = storage._weak_ref()  # type: ignore[assignment]
        self._weak.append(found)
        return found

    @uncompiled
    def __del__(self) -> None:
        weak = getattr(self, "_weak", None)  # interrupted before it was made, there is none
        while weak:
            torch.UntypedStorage._free_weak_ref(weak.pop())
