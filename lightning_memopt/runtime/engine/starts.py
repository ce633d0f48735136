"""Memory that is written after the forward that read it: the input is scaled in place, the next forward updates a buffer
(R5). Autograd does not mind where it saved something else, or where no version counter moves (`.data`).

Such a write is seen while a step is observed. Rebuilds of this step get a copy of what they start from; the ops that read or
made what was written over are `lost`: the plan, which comes without copies, runs none of them again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_memopt.record import Slot, Tape, storage_id
from lightning_memopt.runtime.execute import intact


class Starts:
    """Of one forward that is over, the slots that rebuilds may start from or that autograd reads, by the memory they are on.
    `lost`: ops by their numbers.
    """

    def __init__(self, tape: Tape, lost: set[int] | None = None) -> None:
        self._tape = tape
        self._on: dict[int, list[Slot]] = {}
        self.lost: set[int] = set() if lost is None else lost

    def note(self) -> None:
        """The forward is over: from here on writes are no part of it."""
        for slot in self._tape.slots.values():
            if slot.value is not None and (slot.read or slot.handles > 0):
                self._on.setdefault(storage_id(slot.value), []).append(slot)
            elif slot.handles > 0 and not slot.stale:
                self._on.setdefault(slot.weak, []).append(slot)  # evicted; the user may still hold its memory

    def taken(self, t: torch.Tensor) -> Iterator[Slot]:
        """The slots on the memory of `t`, which is about to be written, that backward may still need as they are. Each is given
        out once: what it holds afterwards is not on this memory any more.
        """
        slots = self._on.get(storage_id(t))
        if slots is None or not any(slot.handles > 0 or self._wanted(slot) for slot in slots):
            return
        del self._on[storage_id(t)]
        for slot in slots:
            self.lose(slot)
            yield slot

    def changed_unseen(self) -> None:
        """A rebuild was found to be impossible: whatever has changed since the forward is lost."""
        for slots in self._on.values():
            for slot in slots:
                if not intact(slot):
                    self.lose(slot)

    def lose(self, slot: Slot) -> None:
        """What the slot holds will not be there when a planned step would rebuild from it."""
        for other in self._tape.slots.values():
            if other.call is not None and (slot.id in other.call.reads or (other is slot and slot.handles > 0)):
                self.lost.add(other.call.op)

    def _wanted(self, start: Slot) -> bool:
        """Whether a tensor that autograd still holds could be rebuilt from the slot, whatever else were dropped."""
        slots = self._tape.slots
        waiting = [slot for slot in slots.values() if slot.handles > 0]
        seen = {slot.id for slot in waiting}
        while waiting:
            slot = waiting.pop()
            reads = slot.call.reads if slot.call is not None else ()
            if start.id in reads:
                return True
            for id in reads if slot.next is None else (*reads, slot.next):
                if id not in seen:
                    seen.add(id)
                    waiting.append(slots[id])
        return False
