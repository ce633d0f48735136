"""The replay engine: what autograd holds instead of tensors, and how it gets them back.

A pack hook answers with a `Handle` on a slot of the tape (or `Kept`, the tensor itself, for what is not ours). When backward
asks, the handle's slot has a value, or gets one: the recorded calls run again, down to values that are held.

`Engine` is what every policy shares: on-demand rebuilding, liveness by handles, checks. Two policies derive from it:
`ObservingEngine` (runtime/observing.py) keeps everything it may, evicts near the budget and verifies recipes;
`PlannedEngine` (runtime/planned.py) does what a Schedule says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from lightning_memopt.errors import ModifiedError, UnsupportedError
from lightning_memopt.record import UNKNOWN, Call, OpRecord, Recorder, Slot, Tape, View, in_transform, is_plain, uncompiled
from lightning_memopt.record.interrupts import raise_deferred
from lightning_memopt.runtime.execute import (
    StartChangedError,
    below_autograd,
    checksum,
    flags_of,
    in_order,
    intact,
    mismatch,
    missing,
    run,
)
from lightning_memopt.runtime.naming import Names, modified, of_kept, of_saved, of_start

_EMPTY: dict[torch.dtype, torch.Tensor] = {}
"""CPU tensors without memory, by type."""


def alias(t: torch.Tensor) -> torch.Tensor:
    """`detached`, where autograd asks: outside of a dispatch mode's handler the version counter is shared as it is."""
    with torch._C._DisableTorchDispatch():
        return t.detach()


def version_guard(t: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares `t`'s version counter: it sees in-place changes of what was dropped."""
    empty = _EMPTY.get(t.dtype) if t.is_cpu else None
    with torch._C._DisableTorchDispatch():
        if empty is None:
            empty = torch.empty(0, dtype=t.dtype, device=t.device)
            if t.is_cpu:
                _EMPTY[t.dtype] = empty
        guard = t.detach()
        guard.data = empty
    return guard


class Kept:
    """The tensor itself, with the version it had: hooks switch autograd's own check off. `about`: who knows its name, and by
    what; it refers to no engine.
    """

    __slots__ = ("about", "t", "version")

    def __init__(self, t: torch.Tensor, about: tuple[Names, int] | None = None) -> None:
        self.about = about
        # only an ordinary tensor can be detached below the dispatch modes; inference tensors count no versions
        self.t = alias(t) if t.grad_fn is not None and is_plain(t) else t
        self.version = UNKNOWN if t.is_inference() else t._version

    def get(self) -> torch.Tensor:
        if self.version != UNKNOWN and self.t._version != self.version:
            raise modified(of_kept(self.t, self.about), self.t._version, self.version)
        return self.t


class Handle:
    """What autograd holds of a slot: a view, a guard that sees in-place changes, and the engine. Its end is how we learn that
    a node has let go.
    """

    __slots__ = ("engine", "guard", "save", "slot", "unpacked", "version", "view")

    def __init__(self, engine: Engine, save: int, slot: Slot, view: View, guard: torch.Tensor) -> None:
        self.save = save
        self.slot = slot
        self.view = view
        self.guard = guard
        self.version = guard._version
        self.unpacked = 0
        slot.handles += 1
        self.engine: Engine | None = engine  # last: a handle whose making was interrupted lets go of nothing

    def get(self) -> torch.Tensor:
        assert self.engine is not None
        try:
            return self.engine.request(self)
        except StartChangedError as error:
            raise self.engine.start_changed(error.slot) from None

    @uncompiled
    def __del__(self) -> None:
        try:
            engine, self.engine = self.engine, None
        except AttributeError:
            return
        if engine is not None:
            self.slot.handles -= 1
            engine.released(self)


class Engine:
    """One recorded forward pass and its backward. Holds the tape; the tape's handles hold it."""

    def __init__(self) -> None:
        raise_deferred()
        self.tape = Tape()
        self._recorder: Recorder | None = None
        self.lock = threading.RLock()
        self.saves = 0
        self.replayed: list[int] = []

    @property
    def names(self) -> Names | None:
        """Who knows what messages call things."""
        return None

    @property
    def recorder(self) -> Recorder | None:
        """What records the forward; None when it is over."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        if recorder is None and self._recorder is not None:
            self.forward_ended()
        self._recorder = recorder

    def forward_ended(self) -> None:
        """R5: what is held now must be what it is when a rebuild starts from it."""
        for slot in self.tape.slots.values():
            if slot.value is not None and slot.noted == UNKNOWN:  # else it came back, or was rebuilt, for a backward inside
                slot.noted = slot.value._version if slot.version < 0 else slot.version

    # -- while the forward is recorded -------------------------------------------------------------

    def make_recorder(self) -> Recorder:
        """The recorder of a forward under this engine."""
        return Recorder(self.tape, self)

    def recorded(self, record: OpRecord) -> None:
        raise NotImplementedError

    def wants_state(self) -> bool:
        return True

    def overwrites(self, slot: Slot) -> None:
        """R5: an op writes over memory that recipes start from; they keep a copy of what it was."""
        if slot.value is not None:
            with below_autograd():
                bytes_ = slot.value.untyped_storage().clone()
                copy = torch.empty(0, dtype=slot.value.dtype, device=slot.value.device)
                slot.value = copy.set_(bytes_, 0, (bytes_.nbytes() // copy.element_size(),), (1,))
            slot.version = slot.value._version

    def resizes(self, slot: Slot) -> None:
        """The storage of a slot is about to get another size; what is read of it next is another slot."""

    def save_of(self, slot: Slot) -> int:
        """The number of the save that is being packed."""
        self.saves += 1
        return self.saves - 1

    def keeps(self, slot: Slot, t: torch.Tensor, save: int) -> bool:
        """Whether autograd's tensor stays as it is; `save` is what `save_of` answered."""
        raise NotImplementedError

    def pack(self, t: torch.Tensor) -> Kept | Handle:
        recorder = self._recorder
        slot = recorder.packs(t) if recorder is not None and not in_transform() else None
        if slot is None:
            return Kept(t, self.about(slot))
        save = self.save_of(slot)
        if self.keeps(slot, t, save):
            return Kept(t, self.about(slot))
        return Handle(self, save, slot, View(slot.id, t), version_guard(t))

    def about(self, slot: Slot | None) -> tuple[Names, int] | None:
        """Who knows the name of a tensor that stays with autograd, and by what."""
        return None

    @staticmethod
    @uncompiled
    def unpack(packed: Any) -> Any:
        return packed.get()

    # -- in backward -------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        """The tensor of a handle, rebuilt if need be. Idempotent; may come on any thread (R11)."""
        with self.lock:
            raise_deferred()
            value = self.value_of(self.present(handle), handle)
            if handle.view.same(value):
                return value
            with torch._C._DisableTorchDispatch():  # the value has no history: a view of it needs no more than that
                return handle.view.on(value)

    def value_of(self, slot: Slot, handle: Handle) -> torch.Tensor:
        """What autograd reads of a slot."""
        if slot.value is None and not self.revive(slot, handle.guard):
            self.materialise([slot])
        value = slot.value
        assert value is not None
        in_order(slot)
        if not intact(slot):
            raise modified(self._called(handle), value._version, slot.noted)
        return value

    def present(self, handle: Handle) -> Slot:
        """The slot with the bytes that autograd would read. Raises where it would: the version counter has moved.

        Where it has not although the storage was overwritten (through `.data`, or as raw memory), that is a later slot.
        """
        if handle.guard._version != handle.version:
            raise modified(self._called(handle), handle.guard._version, handle.version)
        slot = handle.slot
        while slot.next is not None:
            slot = self.tape.slots[slot.next]
        return slot

    def _called(self, handle: Handle) -> str:
        return of_saved(handle.guard, list(handle.view.size), handle.slot, handle.save, self.names)

    def start_changed(self, slot: Slot) -> ModifiedError:
        """The error of a rebuild that would start from what was changed after the forward."""
        return of_start(slot, self.names)

    def released(self, handle: Handle) -> None:
        """A node let go of a handle. Never raises: it runs inside a destructor."""
        with self.lock:
            slot = handle.slot
            if slot.handles == 0:
                slot.value = None

    def closure(self, targets: Iterable[Slot]) -> list[Call]:
        """The calls to run, in op order, to give every target a value (R6: iteratively)."""
        calls: dict[int, Call] = {}
        wanted = [slot for slot in targets if missing(slot)]
        seen = {slot.id for slot in wanted}
        while wanted:
            slot = wanted.pop()
            call = slot.call
            if call is None or not call.repeats:
                raise UnsupportedError(
                    f"backward needs {slot.nbytes} bytes that were let go as the plan says and that "
                    + (f"{call.func.name()} cannot make again" if call else f"no op can make again ({slot.why})")
                    + ". Was backward run more often than in the observed steps? Observe such a step, or raise the budget."
                )
            if call.op in calls:
                continue
            calls[call.op] = call
            for id in call.reads:
                source = self.tape.slots[id]
                if source.id not in seen and missing(source):
                    seen.add(source.id)
                    wanted.append(source)
        return [calls[op] for op in sorted(calls)]

    def revive(self, slot: Slot, guard: torch.Tensor) -> bool:
        """R7: the user still holds the storage, unchanged: use it instead of a rebuild.

        Only to answer autograd, which would read these bytes too. A rebuild of something else does not start from them.
        """
        storage = slot.alive()
        if storage is None:
            return False
        with below_autograd():
            found = guard.detach()  # it has the right version counter
            whole = torch.empty(0, dtype=guard.dtype, device=guard.device)
            found.data = whole.set_(storage, 0, (storage.nbytes() // whole.element_size(),), (1,))
        slot.value = found
        slot.noted = found._version
        slot.stream = None
        return True

    @staticmethod
    def compare(slot: Slot, then: tuple[int, int] | None) -> None:
        """R8: what was rebuilt must have the bits that were dropped, of which `then` is the checksum."""
        if then is not None and slot.value is not None:
            with below_autograd():
                now = checksum(slot.value)
            if now != then:
                raise mismatch(slot.call.func.name() if slot.call is not None else "an op", slot.nbytes)

    def retains(self, slot: Slot) -> bool:
        """Whether what was made on the way to something else stays, beyond its last use there."""
        return slot.handles > 0

    def materialise(self, targets: list[Slot]) -> None:
        """Give every target a value on demand; keep on the way what live handles still need, free the rest at last use."""
        calls = self.closure(targets)
        slots = self.tape.slots
        wanted = {slot.id for slot in targets}
        last = {slots[id].id: call.op for call in calls for id in call.reads}
        fresh: set[int] = set()

        def needed(slot: Slot) -> bool:
            return slot.id in wanted or last.get(slot.id, -1) > op or self.retains(slot)

        with below_autograd(), flags_of(self.tape):
            for call in calls:
                op = call.op
                made = [slots[id] for _, id in (*call.made, *call.mutates)]
                fresh.update(slot.id for slot in made if slot.value is None)
                run(call, slots, lambda slot: slot.id not in fresh or needed(slot))
                self.replayed.append(op)
                for slot in made + [slots[id] for id in call.reads]:
                    if slot.id in fresh and not needed(slot):
                        slot.value = None
