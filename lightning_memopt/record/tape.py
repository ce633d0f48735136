"""What the recorder writes down: slots (versions of storages), views on them, and the calls that made them.

A `Tape` is one forward pass. References point one way only: a handle that autograd holds -> its tape -> calls and slots.
Nothing on a tape refers to handles or to the recorder, so it dies with the last handle, without the garbage collector.
Storages are recognised by their live object: a weak reference keeps the storage's address from being used again while
the recorder may still meet it; it does not keep its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


class Slot:
    """One version of one storage.

    `value` is a tensor on the storage where something of ours holds its bytes, else None. `ok`: it can be made again from
    what is held (or is held itself). `version` is what the version counter said when it was recorded, for slots that come
    from outside. `id` numbers slots in order of first sight: the tensor ids of the graph. `stale`: a later version has
    overwritten it. `read`: a recorded op starts from it. `plan`: the tensor of the plan's graph that it is, once matched.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "device",
        "dtype",
        "empty",
        "external",
        "guard",
        "handles",
        "id",
        "index",
        "nbytes",
        "ok",
        "plan",
        "read",
        "stale",
        "value",
        "version",
        "weak",
        "why",
    )

    def __init__(self, id: int, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        self.id = id
        self.nbytes = storage.nbytes()
        self.dtype = t.dtype
        self.device = t.device
        self.weak: int | None = storage._weak_ref()  # type: ignore[assignment]
        self.call: Call | None = None
        self.index = 0
        self.value: torch.Tensor | None = None
        self.ok = False
        self.empty = False
        self.external = False
        self.read = False
        self.stale = False
        self.plan: int | None = None
        self.handles = 0
        self.version = 0
        self.guard: torch.Tensor | None = None
        self.why = ""

    def alive(self) -> torch.UntypedStorage | None:
        """The storage itself while anybody holds it."""
        if self.weak is None:
            return None
        found = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return found if isinstance(found, torch.UntypedStorage) else None

    def __del__(self) -> None:
        if self.weak is not None:
            torch.UntypedStorage._free_weak_ref(self.weak)
            self.weak = None


class View:
    """A strided window on a slot: how one tensor argument is found again."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "slot", "stride")

    def __init__(self, slot: Slot, t: torch.Tensor) -> None:
        self.slot = slot
        self.size = t.size()
        self.stride = t.stride()
        self.offset = t.storage_offset()
        self.dtype = t.dtype
        self.conj = t.dtype.is_complex and t.is_conj()
        self.neg = t.is_neg()

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


@dataclass(slots=True, eq=False)
class Call:
    """One recorded op: enough to run it again.

    `args` and `kwargs` hold a `View` where a tensor was. `made` pairs the position of an output with its slot id, `mutates`
    the slot it overwrote with the slot it made. `rng` is (generator or None, its state before).
    """

    op: int
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Slot, ...]
    grad: bool
    rng: tuple[torch.Generator | None, torch.Tensor] | None = None
    made: list[tuple[int, int]] = field(default_factory=list)
    mutates: list[tuple[Slot, int]] = field(default_factory=list)


class Tape:
    """One recorded forward pass: its slots by id, and the numeric settings it ran under."""

    __slots__ = ("__weakref__", "engine", "flags", "requests", "slots")

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.flags = numeric_flags()
        self.engine: Any = None
        self.requests: Any = None


def numeric_flags() -> tuple[Any, ...]:
    """Settings that change the bits an op returns (Rule 6): a replay runs under those of the forward pass."""
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.mkldnn.enabled if hasattr(torch.backends.mkldnn, "enabled") else True,
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )
