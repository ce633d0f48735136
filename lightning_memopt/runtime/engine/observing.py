"""The engine of the first steps: everything is kept, until live bytes come near the budget.

Then what was packed is *evicted*: dropped with a checksum, to be rebuilt on demand. Which one goes is decided as in dynamic
tensor rematerialisation (Kirisame et al., 2021): largest bytes per second of rebuild and per op since last use. While it
keeps, it verifies: every recipe is run once in backward and compared, bit by bit, with the value kept (R8).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from lightning_memopt.errors import ModifiedError, UnsupportedError
from lightning_memopt.record import OpRecord, Slot, detached
from lightning_memopt.runtime.engine import Engine, Handle, Kept
from lightning_memopt.runtime.execute import below_autograd, checksum, flags_of, run
from lightning_memopt.runtime.naming import Names
from lightning_memopt.runtime.starts import Starts


class SaveEvents(Names, Protocol):
    """Who is told what autograd packs, asks for and lets go (the tracer)."""

    def packed(self, save: int, slot: Slot) -> None: ...
    def unpacked(self, save: int) -> None: ...
    def released(self, save: int) -> None: ...
    def autograd_asked(self) -> None: ...


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors' storages hold the same bytes."""

    def bits(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())

    return torch.equal(bits(a), bits(b))


class _Told(Kept):
    """What autograd keeps by itself. Whoever watches the step is told when autograd asks for it: that is a backward, too."""

    __slots__ = ("_engine",)

    def __init__(self, t: torch.Tensor, about: tuple[Names, int] | None, engine: ObservingEngine) -> None:
        super().__init__(t, about)
        self._engine = weakref.ref(engine)  # a tape dies with its handles, and this is none

    def get(self) -> torch.Tensor:
        engine = self._engine()
        if engine is not None and engine.events is not None:
            engine.events.autograd_asked()
        return super().get()


class ObservingEngine(Engine):
    """Keeps, evicts under pressure, verifies. `pressure` returns the bytes by which live memory exceeds the limit now."""

    def __init__(
        self, events: SaveEvents | None = None, pressure: Callable[[], int] | None = None, verify: bool = True
    ) -> None:
        super().__init__()
        self.events = events
        self.pressure = pressure
        self.verify = verify
        self.verified: set[int] = set()
        self.opaque_ops: dict[str, str] = {}
        self.starts = Starts(self.tape)
        self.evictable: dict[int, Slot] = {}
        self.sums: dict[int, tuple[int, int]] = {}
        self.evictions = 0
        self.packs = False
        self.clock = 0
        self.rebuilt: dict[int, Slot] = {}
        self.rebuilds: Callable[[Slot], None] = lambda _: None
        self.hidden: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Around what is allocated for rebuilds: the step alone would not."""
        self._room = 0
        self._retained: dict[int, bool] = {}

    def recorded(self, record: OpRecord) -> None:
        self.clock += 1
        if record.func.name() in self.opaque_ops:
            for slot in (*(slot for slot, _ in record.made), *(new for _, new, _ in record.mutates)):
                slot.call, slot.ok, slot.why = None, False, self.opaque_ops[record.func.name()]
        for slot, t in [*record.made, *((new, t) for _, new, t in record.mutates)]:
            if slot.call is None and not slot.empty:
                slot.value = detached(t)  # R4: recipes may start from it
                slot.ok = True
        self.relieve()

    def keeps(self, slot: Slot, t: torch.Tensor, save: int) -> bool:
        if slot.external or slot.stale:
            return True
        if slot.value is None:
            slot.value = detached(t)
        if slot.ok and slot.call is not None:
            self.evictable[slot.id] = slot
        return False

    def pack(self, t: torch.Tensor) -> object:  # type: ignore[override]
        packed = super().pack(t)
        self.packs = True
        if self.events is None:
            return packed
        if isinstance(packed, Kept):
            return _Told(t, packed.about, self)
        self.events.packed(packed.save, packed.slot)
        return packed

    @property
    def names(self) -> Names | None:
        return self.events

    def about(self, slot: Slot | None) -> tuple[Names, int] | None:
        return None if slot is None or self.events is None else (self.events, slot.id)

    def rebuilt_nbytes(self) -> int:
        """Bytes of what was rebuilt: the tracer does not see them."""
        return sum(slot.nbytes for slot in self.rebuilt.values() if slot.value is not None)

    # -- what rebuilds start from ------------------------------------------------------------------

    def forward_ended(self) -> None:
        super().forward_ended()
        self.starts.note()

    def writes(self, t: torch.Tensor) -> None:
        """The memory of `t` is about to change, and the forward is over: what rebuilds start from is copied before."""
        with self.lock:
            for slot in self.starts.taken(t):
                if slot.call is not None and slot.ok:
                    slot.value = None  # its recipe makes the bytes again
                elif slot.value is not None:
                    self.overwrites(slot)
                    slot.noted = slot.version
                    self.rebuilt[slot.id] = slot
                if slot.handles > 0 and slot.next is None:
                    self._shows(slot, t)

    def resizes(self, slot: Slot) -> None:
        if slot.handles > 0 or not (slot.call is not None and slot.ok):
            self.starts.lose(slot)

    def _shows(self, slot: Slot, t: torch.Tensor) -> None:
        """Autograd, which saved the slot, reads the bytes that come; whether it may, the version of what it saved says."""
        later = Slot(-1 - slot.id, t, self.tape)
        later.value = detached(t)
        later.why = "written over after the forward"
        self.tape.slots[later.id] = later
        slot.next = later.id

    # -- eviction ----------------------------------------------------------------------------------

    def relieve(self, spare: Slot | None = None) -> None:
        """Evict until live memory is below the limit again, or nothing is left to evict."""
        if self.pressure is None:
            return
        excess = self.pressure()
        while excess > 0 and self.evictable:
            slot = max((s for s in self.evictable.values() if s is not spare), key=self._merit, default=None)
            if slot is None:
                return
            self.evict(slot)
            excess = self.pressure()

    def _merit(self, slot: Slot) -> float:
        assert slot.call is not None
        return slot.nbytes * (self.clock - slot.call.op + 1) / (1.0 + self._depth(slot))

    def _depth(self, slot: Slot) -> int:
        """How many calls a rebuild would take now; counted up to a bound, as an estimate of its cost."""
        count, wanted, seen = 0, [slot], {slot.id}
        while wanted and count < 64:
            call = wanted.pop().call
            count += 1
            if call is not None:
                for id in call.reads:
                    source = self.tape.slots[id]
                    if source.value is None and source.id not in seen and source.call is not None:
                        seen.add(source.id)
                        wanted.append(source)
        return count

    def evict(self, slot: Slot) -> None:
        self.evictable.pop(slot.id, None)
        value = slot.value
        if value is None:
            return
        if slot.id not in self.sums:
            with below_autograd(), self.hidden():
                self.sums[slot.id] = checksum(value)
        slot.value = None
        self.evictions += 1

    # -- backward ----------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        with self.lock:
            slot = self.present(handle)
            if self.events is not None:
                self.events.unpacked(handle.save)
            if slot.value is None and not self.revive(slot, handle.guard):
                self.relieve()
                with self.hidden():
                    self.materialise([slot])
                    self.compare(slot, self.sums.get(slot.id))
                self.relieve(spare=slot)
            elif self.verify and slot.ok and slot.call is not None and slot.id not in self.verified:
                try:
                    with self.hidden():
                        self._verify(slot)
                except (ModifiedError, UnsupportedError):  # it cannot be made again, and is here: nothing is wrong
                    self.starts.changed_unseen()
                    self.evictable.clear()
            return super().request(handle)

    def materialise(self, targets: list[Slot]) -> None:
        first = len(self.replayed)
        self._room = 1 << 62 if self.pressure is None else -self.pressure() - sum(slot.nbytes for slot in targets)
        self._retained.clear()
        super().materialise(targets)
        calls = {slot.id for slot in targets}
        ran = set(self.replayed[first:])
        for slot in self.tape.slots.values():
            if slot.call is not None and slot.call.op in ran and slot.value is not None:
                self.rebuilt[slot.id] = slot
                self.rebuilds(slot)
                if slot.handles > 0 and slot.ok and slot.id not in calls:
                    self.evictable[slot.id] = slot

    def retains(self, slot: Slot) -> bool:
        """What other handles wait for stays while there is room; a long rebuild must not fill what evictions freed."""
        if slot.handles == 0:
            return False
        stays = self._retained.get(slot.id)
        if stays is None:
            stays = self._retained[slot.id] = slot.nbytes <= self._room
            self._room -= slot.nbytes if stays else 0
        return stays

    def _verify(self, slot: Slot) -> None:
        """Rebuild a kept slot from what is held and compare. A mismatch makes its op opaque; the value kept is used."""
        kept = slot.value
        assert kept is not None and slot.call is not None
        self.verified.add(slot.id)
        if self.pressure is not None and self.pressure() + self._needed_nbytes(slot) > 0:
            return
        slot.value, noted = None, slot.noted
        before = list(self.replayed)
        held = [s for s in self.tape.slots.values() if s.value is not None]
        try:
            self._rebuild_once(slot)
            with below_autograd():
                if not same_bits(self._made(slot), kept):
                    self._distrust(slot)
        finally:
            slot.value, slot.noted = kept, noted
            self.replayed[:] = before
            keep = {s.id for s in held} | {slot.id}
            for s in self.tape.slots.values():
                if s.id not in keep:
                    s.value = None

    def _needed_nbytes(self, slot: Slot) -> int:
        """What a rebuild of a slot beside its value takes: all that its calls make, and a copy to be compared."""
        kept, slot.value = slot.value, None
        try:
            calls = self.closure([slot])
        finally:
            slot.value = kept
        made = {i for call in calls for _, i in (*call.made, *call.mutates)}
        return slot.nbytes + sum(self.tape.slots[i].nbytes for i in made)

    @staticmethod
    def _made(slot: Slot) -> torch.Tensor:
        assert slot.value is not None
        return slot.value

    def _rebuild_once(self, slot: Slot) -> None:
        calls = self.closure([slot])
        with below_autograd(), flags_of(self.tape):
            for call in calls:
                run(call, self.tape.slots, lambda s: s.handles > 0 or s.call is None)

    def _distrust(self, slot: Slot) -> None:
        assert slot.call is not None
        name = slot.call.func.name()
        if name not in self.opaque_ops:
            warnings.warn(
                f"MemOpt: running {name} again gave other bits than the first time; its results are kept from now on. "
                "If the op is deterministic, please report it.",
                stacklevel=2,
            )
        self.opaque_ops[name] = "a rebuild gave other bits"
        slot.ok = False
        self.evictable.pop(slot.id, None)

    def released(self, handle: Handle) -> None:
        with self.lock:
            slot = handle.slot
            if slot.handles == 0:
                self.evictable.pop(slot.id, None)
                if slot.call is not None and slot.ok:
                    slot.value = None
            if self.events is not None:
                self.events.released(handle.save)
