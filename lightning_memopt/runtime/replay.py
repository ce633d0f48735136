"""The replay engine: what autograd holds instead of tensors, and how it gets them back.

A pack hook answers with a `Handle` on a slot of the tape (or `Kept`, the tensor itself, for what is not ours). When backward
asks, the handle's slot has a value, or gets one: the recorded calls run again, down to values that are held.

`Engine` is what every policy shares: on-demand rebuilding, liveness by handles, checks. Two policies derive from it:
`ObservingEngine` (runtime/observe.py) keeps everything it may, evicts near the budget and verifies recipes;
`PlannedEngine` (runtime/planned.py) does what a Schedule says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

from lightning_memopt.record import Call, Recorder, Slot, Tape, View, detached, is_plain, storage_id
from lightning_memopt.runtime.execute import below_autograd, flags_of, modified, run

_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def version_guard(t: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares `t`'s version counter: it sees in-place changes of what was dropped."""
    key = (t.dtype, t.device)
    empty = _EMPTY.get(key)
    with torch._C._DisableTorchDispatch():
        if empty is None:
            empty = _EMPTY[key] = torch.empty(0, dtype=t.dtype, device=t.device)
        guard = t.detach()
        guard.data = empty
    return guard


class Kept:
    """The tensor itself, with the version it had: hooks switch autograd's own check off."""

    __slots__ = ("t", "version")

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t if t.grad_fn is None else detached(t)
        self.version = t._version

    def get(self) -> torch.Tensor:
        if self.t._version != self.version:
            raise modified(f"[{self.t.type()} {list(self.t.shape)}]", self.t._version, self.version)
        return self.t


class Handle:
    """What autograd holds of a slot: a view and its engine. Its end is how we learn that a node has let go."""

    __slots__ = ("engine", "save", "unpacked", "version", "view")

    def __init__(self, engine: Engine, save: int, view: View, version: int) -> None:
        self.engine: Engine | None = engine
        self.save = save
        self.view = view
        self.version = version
        self.unpacked = 0
        view.slot.handles += 1

    def get(self) -> torch.Tensor:
        assert self.engine is not None
        return self.engine.request(self)

    def __del__(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            self.view.slot.handles -= 1
            engine.released(self)


class Engine:
    """One recorded forward pass and its backward. Holds the tape; the tape's handles hold it."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.recorder: Recorder | None = None
        self.lock = threading.RLock()
        self.saves = 0
        self.replayed: list[int] = []
        self.epoch = 0

    # -- while the forward is recorded -------------------------------------------------------------

    def recorded(self, func: OpOverload, reads: tuple[Slot, ...], made: list[tuple[Slot, torch.Tensor]]) -> None:
        raise NotImplementedError

    def wants_state(self) -> bool:
        return True

    def overwrites(self, slot: Slot) -> None:
        """Rule 5: an op writes over memory that recipes start from; they keep a copy of what it was."""
        if slot.value is not None:
            with below_autograd():
                bytes_ = slot.value.untyped_storage().clone()
                copy = torch.empty(0, dtype=slot.value.dtype, device=slot.value.device)
                slot.value = copy.set_(bytes_, 0, (bytes_.nbytes() // copy.element_size(),), (1,))
            slot.version = slot.value._version

    def save_of(self, slot: Slot) -> int:
        """The number of the save that is being packed."""
        self.saves += 1
        return self.saves - 1

    def keeps(self, slot: Slot, t: torch.Tensor) -> bool:
        """Whether autograd's tensor stays as it is."""
        raise NotImplementedError

    def pack(self, t: torch.Tensor) -> Kept | Handle:
        recorder = self.recorder
        if recorder is None or not is_plain(t):
            return Kept(t)
        slot = recorder.of_storage.get(storage_id(t))
        if slot is None:
            return Kept(t)
        save = self.save_of(slot)
        if self.keeps(slot, t):
            return Kept(t)
        if slot.guard is None:
            slot.guard = version_guard(t)
            slot.version = t._version
        return Handle(self, save, View(slot, t), t._version)

    @staticmethod
    def unpack(packed: Any) -> Any:
        return packed.get()

    # -- in backward -------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        """The tensor of a handle, rebuilt if need be. Idempotent; may come on any thread (Rule 11)."""
        with self.lock:
            slot = handle.view.slot
            self.check(handle)
            if slot.value is None:
                self.materialise([slot])
            value = slot.value
            assert value is not None
            with below_autograd():
                return handle.view.on(value)

    def check(self, handle: Handle) -> None:
        guard = handle.view.slot.guard
        if guard is not None and guard._version != handle.version:
            raise modified(f"[{guard.type()} {list(handle.view.size)}]", guard._version, handle.version)

    def released(self, handle: Handle) -> None:
        """A node let go of a handle. Never raises: it runs inside a destructor."""
        with self.lock:
            slot = handle.view.slot
            if slot.handles == 0:
                slot.value = None

    def closure(self, targets: Iterable[Slot]) -> list[Call]:
        """The calls to run, in op order, to give every target a value (Rule 6: iteratively)."""
        calls: dict[int, Call] = {}
        wanted = [slot for slot in targets if slot.value is None]
        seen = {slot.id for slot in wanted}
        while wanted:
            slot = wanted.pop()
            if self.revive(slot):
                continue
            call = slot.call
            assert call is not None, f"slot {slot.id} has neither a value nor a recipe ({slot.why})"
            if call.op in calls:
                continue
            calls[call.op] = call
            for source in call.reads:
                if source.value is None and source.id not in seen:
                    seen.add(source.id)
                    wanted.append(source)
        return [calls[op] for op in sorted(calls)]

    def revive(self, slot: Slot) -> bool:
        """Rule 7: the user still holds the storage, unchanged: use it instead of a rebuild."""
        if slot.guard is None or slot.stale:
            return False
        storage = slot.alive()
        if storage is None or slot.guard._version != slot.version:
            return False
        with below_autograd():
            empty = torch.empty(0, dtype=slot.dtype, device=slot.device)
            slot.value = empty.set_(storage, 0, (storage.nbytes() // empty.element_size(),), (1,))
        return True

    def materialise(self, targets: list[Slot]) -> None:
        """Give every target a value on demand; keep on the way what live handles still need, free the rest at last use."""
        calls = self.closure(targets)
        slots = self.tape.slots
        wanted = {slot.id for slot in targets}
        last = {source.id: call.op for call in calls for source in call.reads}
        fresh: set[int] = set()

        def needed(slot: Slot) -> bool:
            return slot.id in wanted or slot.handles > 0 or last.get(slot.id, -1) > op

        with below_autograd(), flags_of(self.tape):
            for call in calls:
                op = call.op
                made = [i for _, i in call.made] + [i for _, i in call.mutates]
                fresh.update(i for i in made if slots[i].value is None)
                run(call, slots, lambda slot: slot.id not in fresh or needed(slot))
                self.replayed.append(op)
                for i in made + [source.id for source in call.reads]:
                    if i in fresh and not needed(slots[i]):
                        slots[i].value = None
