"""The recorder: a dispatch mode below autograd that notes every op, what it read and which storage version it wrote.

It decides nothing: its `Owner` and its `Observer` are told (record/protocols.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from lightning_memopt.record.modes import Outside
from lightning_memopt.record.protocols import Observer, OpRecord, Owner
from lightning_memopt.record.rules import may_replay, rule_of_call, written_by
from lightning_memopt.record.settings import numeric_flags
from lightning_memopt.record.tape import UNKNOWN, UNSHARED, Call, Slot, Tape, View, storage_id
from lightning_memopt.record.tensors import (
    PLAIN,
    conjugating,
    count_versions,
    covers,
    detached,
    device_of,
    generator_of,
    is_foreign,
    is_plain,
    tensors_in,
)
from lightning_memopt.record.uncompiled import uncompiled

_DETACH = torch.ops.aten.detach.default
_EMPTY_STRIDED = torch.ops.aten.empty_strided.default


class Recorder(Outside):
    """Records one forward pass onto a tape. Enter it around the forward only; `forget()` when the forward is over."""

    def __init__(self, tape: Tape, owner: Owner, observer: Observer | None = None) -> None:
        super().__init__()
        self.tape = tape
        self.owner = owner
        self.observer = observer
        self.writes: Callable[[torch.Tensor], None] | None = None
        """Told of a tensor whose memory an op is about to write, also after the forward."""
        self.capturing = True
        self.elsewhere = False
        self.fixed: frozenset[int] = frozenset()
        """Ops, by their number, that are not replayed: what they read is overwritten before a rebuild may need them."""
        self.hidden: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Around what is allocated for a rebuild, and the step alone would not."""
        self.op = 0
        self.next_slot = 0
        self.of_storage: dict[int, Slot] = {}
        self._beneath: dict[int, list[Slot]] = {}
        self.thread = threading.get_ident()

    def forget(self) -> None:
        """Drop the map from storages: it must not outlive the forward pass."""
        self.of_storage.clear()
        self._beneath.clear()

    def recognise(self, slot: Slot) -> None:
        """The slot's bytes were made again, maybe in a new storage: ops that read it read this slot."""
        known = self.of_storage.get(storage_id(slot.value)) if slot.value is not None else slot
        if known is slot or (known is not None and slot.stale):
            return
        assert slot.value is not None
        self.tape.weak(slot.value.untyped_storage())  # keeps the address from being used again
        self.of_storage[storage_id(slot.value)] = slot
        if slot.alive() is None:  # else ops may still read the old one
            slot.version = slot.value._version

    def adopt(self, t: torch.Tensor, why: str = "made outside of the recorded forward") -> Slot:
        """The slot of a tensor that no recorded op made: it is held, never dropped (R4)."""
        known = self.of_storage.get(storage_id(t))
        if known is not None:
            return known
        slot = self._new(t)
        slot.external = True
        slot.ok = True
        slot.version = t._version
        slot.why = why
        slot.parameter = isinstance(t, torch.nn.Parameter) or isinstance(t._base, torch.nn.Parameter)
        # R4: what starts from it is kept, and may be started from. Weights that were loaded so are not written to.
        slot.exposed = not slot.parameter and is_foreign(t)
        if self._starts():
            slot.value = detached(t)  # never the tensor itself: its `.data` may become another memory
        return slot

    def _starts(self) -> bool:
        """Whether rebuilds may start from what is read now."""
        return self.capturing

    def _current(self, slot: Slot, t: torch.Tensor, reads: bool = True) -> Slot:
        """The slot, or a new one where its version counter moved unseen: a compiled region, another thread, an extension.
        `reads`: an op reads it, from which rebuilds may start.
        """
        if reads and slot.external and slot.value is None and self._starts():
            slot.value = detached(t)
        if slot.version == UNKNOWN and not (slot.counted is not None and t._version > slot.counted + 1):
            slot.version = t._version
            if slot.value is not None:
                slot.value = detached(t)  # with the counter that was read
        elif slot.version != t._version and slot.version != UNSHARED and self.capturing:
            return self._replaced(slot, t, "changed by what the recorder does not see")
        return slot

    def _replaced(self, slot: Slot, t: torch.Tensor, why: str) -> Slot:
        """A new slot for the storage of `slot`, whose bytes are no longer what was recorded."""
        slot.value = None if slot.call is not None and slot.ok else slot.value
        del self.of_storage[storage_id(t)]
        slot.stale = True
        new = self.adopt(t, why)
        new.exposed, new.parameter = slot.exposed, slot.parameter
        new.asked = slot.asked or slot.handles > 0
        slot.next = new.id
        earlier = self._beneath.pop(slot.id, [])
        self._beneath[new.id] = [*earlier, slot] if slot.value is not None else earlier
        return new

    def packs(self, t: torch.Tensor) -> Slot | None:
        """The slot of a tensor that autograd saves; None where it is not recorded, or its bytes changed unseen."""
        if type(t) not in PLAIN or t.layout is not torch.strided:  # what is not plain otherwise has no slot
            return None
        slot = self.of_storage.get(storage_id(t))
        if slot is None or (slot.version != t._version and slot is not self._current(slot, t, reads=False)):
            return None
        return slot

    def _new(self, t: torch.Tensor, id: int | None = None) -> Slot:
        if id is None:
            id = self.next_slot
            self.next_slot += 1
        slot = Slot(id, t, self.tape)
        self.of_storage[storage_id(t)] = slot
        if self.capturing:
            self.tape.slots[slot.id] = slot
        return slot

    def _capture(self, value: Any, reads: list[Slot], plain: list[bool]) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                plain[0] = False
                return None
            slot = self.of_storage.get(storage_id(value))
            slot = self.adopt(value) if slot is None else self._current(slot, value)
            reads.append(slot)
            return View(slot.id, value)
        if type(value) in (list, tuple):
            return [self._capture(v, reads, plain) for v in value]
        return value

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.record(func, args, kwargs or {})

    def record(self, func: OpOverload | HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        """Run the op, note it, tell owner and observer."""
        if not isinstance(func, OpOverload):  # R9: `cond`, `scan`, as compiled modules
            return func(*args, **kwargs)
        observer = self.observer
        rule = rule_of_call(func, args, kwargs)
        run = conjugating(func) if rule.conjugates else func._op
        if not self.capturing and observer is None:
            return run(*args, **kwargs)
        if func is _DETACH:
            return self._detach(*args)
        op = self._number()
        reads: list[Slot] = []
        plain = [True]
        held_args = tuple([self._capture(a, reads, plain) for a in args])
        held_kwargs = {k: self._capture(v, reads, plain) for k, v in kwargs.items()} if kwargs else {}
        targets = written_by(func, rule, args, kwargs)
        replayable = (
            self.capturing
            and plain[0]
            and not self.elsewhere
            and op not in self.fixed
            and rule.handling != "opaque"
            and may_replay(func, device_of((slot.device for slot in reads), kwargs).type)
        )
        record = OpRecord(func, rule, held_args, held_kwargs, (), [], [], None, replayable)
        if replayable and rule.handling != "empty":
            record.call = self._call(op, record, args, kwargs, reads, targets)
            record.replayable = record.call is not None
        record.reads = tuple(dict.fromkeys(reads))
        if self.capturing:
            for t in targets:
                self._overwrites(self.of_storage[storage_id(t)])
        if self.writes is not None:
            for t in targets:
                self.writes(t)
        before = [(storage_id(t), t._version) for t in targets]
        if observer is not None:
            observer.begin(func)
        out = run(*args, **kwargs)
        if observer is not None:
            observer.ran()
        if targets and func._name.startswith("aten::_foreach_"):
            count_versions(targets, [v for _, v in before])
        if rule.handling == "empty" and self.capturing and isinstance(out, torch.Tensor) and is_plain(out):
            # it reads no bytes: the replay needs the form of the result, not what the form was taken from
            like = {"dtype": out.dtype, "device": out.device}
            record.call = Call(op, _EMPTY_STRIDED, (out.size(), out.stride()), like, (), False)
            record.replayable = True
        record.made = self._outputs(out, record)
        targets = [t for t, (id, _) in zip(targets, before, strict=True) if storage_id(t) == id]  # `set_` writes no bytes
        mutates = self._mutated(targets, record, reads) if self.capturing else []
        if rule.rewrite is None:  # else running statistics: written once, by the user's own pass, and no replay reads them
            record.mutates = mutates
        if observer is not None:
            observer.end(record, args, kwargs, out)
        if self.capturing:
            self._recorded(record)
        return out

    def _number(self) -> int:
        """The number of the call that is being recorded; rising."""
        self.op += 1
        return self.op - 1

    def _recorded(self, record: OpRecord) -> None:
        self.owner.recorded(record)

    def _detach(self, t: torch.Tensor) -> torch.Tensor:
        """Not an op: the same bytes. torch calls it by itself on what a factory made, but only if somebody else holds that."""
        out = torch.ops.aten.detach.default(t)
        slot = self.of_storage.get(storage_id(t)) if self.capturing and is_plain(t) else None
        if slot is not None and slot.value is not None and slot.call is None and not slot.external:
            slot.value = detached(out)  # it has a version counter of its own: the one that the user's tensor has
        return out

    def _call(
        self, op: int, record: OpRecord, args: tuple, kwargs: dict, reads: list[Slot], targets: list[torch.Tensor]
    ) -> Call | None:
        """The recipe of this op, or None where its results cannot be made again. Takes out of `reads` what it leaves out."""
        func, rule, held_args, held_kwargs = record.func, record.rule, record.args, record.kwargs
        if rule.rewrite is not None and targets:
            # the running statistics are written, but no output depends on them: the replay leaves them out
            func, held_args, held_kwargs = rule.rewrite(func, held_args, held_kwargs)
            statistics = {id(self.of_storage[storage_id(t)]) for t in targets}
            reads[:] = [slot for slot in reads if id(slot) not in statistics]
            targets = []
        mutated = {id(self.of_storage[storage_id(t)]) for t in targets}
        for slot in reads:
            if slot.exposed:
                return None  # R4: what is in it when a replay would read it may be something else
            if slot.empty:
                # R4: content of `empty` is nobody's, unless this op overwrites all of it
                whole = rule.whole and id(slot) in mutated and len(targets) == 1 and covers(targets[0])
                if not whole:
                    return None
            elif slot.call is None and id(slot) in mutated:
                return None  # memory of somebody else: its new content is theirs
            else:
                slot.read = True
        ids = tuple(dict.fromkeys(slot.id for slot in reads))
        call = Call(op, func, held_args, held_kwargs, ids, torch.is_grad_enabled())
        if rule.handling == "random":
            call.repeats = self.owner.wants_state()
            if call.repeats:
                generator = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
                generator = generator or generator_of(device_of((slot.device for slot in reads), kwargs))
                if generator is None:
                    return None
                with self.hidden():
                    call.rng = (generator, generator.get_state())
        return call

    def _mutated(
        self, targets: list[torch.Tensor], record: OpRecord, reads: list[Slot]
    ) -> list[tuple[Slot, Slot, torch.Tensor]]:
        rule, call = record.rule, record.call
        ok = call is not None and call.repeats and all(s.ok or s.value is not None or s.empty for s in reads)
        found = []
        for t in targets:
            old = self.of_storage.get(storage_id(t))
            if old is not None:
                new = self._overwritten(old, t, self._new(t), call if rule.rewrite is None else None, ok)
                new.why = new.why or rule.why
                if call is not None and rule.rewrite is None:
                    call.mutates = (*call.mutates, (old.id, new.id))
                found.append((old, new, t))
        return found

    def _overwrites(self, old: Slot) -> None:
        """The bytes of a slot are about to change."""
        for earlier in self._beneath.pop(old.id, ()):  # the same bytes, if but another counter was met (that of `.data`)
            if earlier.version < 0 or (earlier.value is not None and earlier.value._version == earlier.version):
                self._overwrites(earlier)
        if old.call is not None and old.ok:
            old.value = None  # an alias of the memory that is about to change: its recipe makes the bytes again
        elif old.read:
            self.owner.overwrites(old)

    def _overwritten(self, old: Slot, t: torch.Tensor, new: Slot, call: Call | None, ok: bool) -> Slot:
        """`new`, the slot of what an op has just written over `old`, through `t`."""
        new.version = UNSHARED if old.version == UNSHARED else UNKNOWN  # autograd moves the counter after the op, by one
        new.counted = t._version
        new.asked = old.asked or old.handles > 0
        old.stale = True
        old.next = new.id
        if call is None:
            new.external = new.ok = old.external
            new.exposed, new.parameter = old.exposed, old.parameter
            new.why = "overwritten in place by an op that is not replayed"
            if old.external and self._starts():
                new.value = detached(t)
        else:
            new.ok = ok
            new.call = call
        if (old.handles or old.pinned) and not (new.ok and new.call is not None):
            # autograd reads these bytes where the version counter of what it saved does not move
            new.value = detached(t)
            new.pinned = True
        return new

    def _outputs(self, out: Any, record: OpRecord) -> list[tuple[Slot, torch.Tensor]]:
        """Slots for the new storages among the results."""
        rule, call, startable = record.rule, record.call, record.startable
        made = []
        for index, t in enumerate((out,) if isinstance(out, torch.Tensor) else tensors_in(out)):
            if not is_plain(t):
                continue
            known = self.of_storage.get(storage_id(t))
            if known is not None:
                if rule.unshared:
                    known.version = UNSHARED
                continue
            slot = self._new(t)
            slot.index = index
            slot.empty = rule.handling == "empty"
            if call is not None:
                slot.ok = startable and record.remakes(slot)
                slot.call = call
                call.made = (*call.made, (index, slot.id))
            else:
                slot.why = rule.why or "made from what cannot be made again"
            made.append((slot, t))
        return made

    @property
    def _begun(self) -> bool:
        return self.op > 0

    def settings_changed(self) -> None:
        """R6: rebuilds run under the numeric settings that the forward began with; what runs under others is kept.

        It begins with its first op: a precision may be chosen inside of what is recorded (Lightning's "bf16-true").
        """
        if not self._begun:
            self.tape.flags = numeric_flags()
        self.elsewhere = numeric_flags() != self.tape.flags

    def resizing(self, t: torch.Tensor) -> None:
        """The storage of `t` is about to get another size: what it holds goes, and may be put back unseen (R4)."""
        if self.writes is not None:
            self.writes(t)
        slot = self.of_storage.get(storage_id(t)) if self.capturing else None
        if slot is not None:
            self.owner.resizes(slot)
            self._overwrites(slot)
            new = self._replaced(slot, t, "its storage was resized")
            new.exposed = True
            new.version = UNKNOWN

    def resized(self, t: torch.Tensor) -> None:
        """The storage of `t` has another size now."""
        slot = self.of_storage.get(storage_id(t))
        if slot is not None:
            slot.nbytes = t.untyped_storage().nbytes()

    def expose(self, t: torch.Tensor, address: bool = False) -> None:
        """Somebody takes the raw memory of `t`: from now on it may change unseen, so no replay starts from it (R4).

        The mere `address` of a parameter is exempt: kernels take it to read, and a copy of each would cost what is saved.
        """
        if not self.capturing or not is_plain(t):
            return
        slot = self.of_storage.get(storage_id(t))
        if slot is None and threading.get_ident() != self.thread:
            return
        slot = slot or self.adopt(t)
        if slot.exposed or (address and slot.parameter):
            return
        if slot.read and not (slot.call is not None and slot.ok):
            self.owner.overwrites(slot)
        new = self._replaced(slot, t, "its memory was handed out (data_ptr, numpy or dlpack)")
        new.exposed = True
        new.version = UNKNOWN
