"""The engine that does what a plan says: drops what it drops, holds what it holds, rebuilds when its Schedule says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from lightning_memopt.graph import BEFORE
from lightning_memopt.plan import Free, Segment
from lightning_memopt.record import Slot, detached
from lightning_memopt.runtime.execute import below_autograd, checksum, flags_of, missing, run
from lightning_memopt.runtime.matching import Matcher
from lightning_memopt.runtime.program import Program
from lightning_memopt.runtime.replay import Engine, Handle

_LOOK_AHEAD = 16
"""How many planned saves a pack may skip before it counts as unplanned."""


def _among(ids: set[int], slot: Slot) -> bool:
    return slot.id in ids


@dataclass(slots=True)
class Departures:
    """How a forward and its backward differ from those of the plan; it outlives the engine.

    `first`: position and name of the first op that is not where the plan has it. `unplanned`: autograd saved a result that
    the plan does not know. `excess_nbytes`: by how much tensors that were recorded are larger than those of the graph that
    they are. `astray`: backward did not take the observed order: only a part of it, twice, or another order.
    """

    first: tuple[int, str] | None = None
    unplanned: bool = False
    excess_nbytes: int = 0
    astray: bool = False


class PlannedEngine(Engine):
    """One forward pass under a program. `position` is the plan's op that comes next."""

    def __init__(self, program: Program, verify: bool = False) -> None:
        super().__init__()
        self.program = program
        self.verify = verify
        self.sums: dict[int, tuple[int, int]] = {}
        self.position = 0
        self.next_save = 0
        self.cursor = BEFORE
        self.next_event = 0
        self.active: set[int] = set()
        self.departures = Departures()

    def make_recorder(self) -> Matcher:
        return Matcher(self)

    def wants_state(self) -> bool:
        return self.position in self.program.random

    def passed(self, position: int, name: str) -> None:
        """An op is not what the plan has at this position."""
        if self.departures.first is None:
            self.departures.first = (position, name)

    def overwrites(self, slot: Slot) -> None:
        if slot.plan in self.program.outdated:
            slot.value = None  # what comes is held, and read in its place
        else:
            super().overwrites(slot)

    def hold(self, slot: Slot, t: torch.Tensor) -> None:
        """The plan holds this tensor from its birth."""
        if not slot.empty:
            assert slot.plan is not None
            slot.value = detached(t)
            slot.pinned = False  # the plan knows who reads it, what was packed before it was written over too
            slot.ok = slot.ok or slot.call is None
            self.active.add(slot.plan)

    def save_of(self, slot: Slot) -> int:
        saved, first = self.program.saved, self.next_save
        for i in range(first, min(first + _LOOK_AHEAD, len(saved))):
            if saved[i][1] == slot.plan:
                self.next_save = i + 1
                return saved[i][0]
        return BEFORE

    def keeps(self, slot: Slot, t: torch.Tensor) -> bool:
        if slot.plan is None and not slot.external:
            self.departures.unplanned = True
        if slot.external or slot.stale or slot.plan not in self.program.tracked:
            return True
        if slot.value is not None:
            return False
        if slot.plan in self.program.outdated:  # answered by what is held; by itself, where it is not written over this time
            slot.value = detached(t)
            return False
        if not (slot.ok and slot.call is not None and slot.plan in self.program.unkept):
            return True
        if self.verify and slot.id not in self.sums:
            with below_autograd():
                self.sums[slot.id] = checksum(t)
        return False

    # -- in backward -------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        with self.lock:
            planned = self.program.segments.get((handle.save, handle.unpacked))
            if planned is not None and planned[0] > self.cursor:
                self.cursor = planned[0]
                self.perform(planned[1], planned[0])
            event = ("unpack", handle.save, handle.unpacked)
            self._follow(event)
            handle.unpacked += 1
            found = super().request(handle)
            if self.sums:  # in the first planned steps: the first rebuild
                self.compare(handle.slot, self.sums.pop(handle.slot.id, None))
            self._free(event)
            return found

    def perform(self, steps: Segment, point: int) -> None:
        """Run a segment. What it needs and finds missing is rebuilt on demand."""
        slots = self.tape.slots
        with below_autograd(), flags_of(self.tape):
            for step in steps:
                if isinstance(step, Free):
                    slot = slots.get(step.tensor)
                    if slot is not None and step.tensor not in self.active:
                        slot.value = None
                    continue
                outputs = [slots.get(t) for t in self.program.outputs[step.op]]
                call = next((s.call for s in outputs if s is not None and s.call is not None), None)
                if call is None:
                    continue
                absent = [slots[id] for id in call.reads if missing(slots[id])]
                if absent:
                    self.materialise(absent)
                clones = {slots[t].id for t in step.clones if t in slots}
                run(call, slots, partial(_among, clones))
                self.replayed.append(call.op)
        self.active.update(t for t in self.program.births.get(point, ()) if t in slots)

    def _follow(self, event: tuple[str, int, int]) -> None:
        """Notice when backward goes astray. From then on nothing goes that cannot be made again."""
        events = self.program.events
        if self.next_event < len(events) and events[self.next_event] == event:
            self.next_event += 1
        else:
            self.departures.astray = True

    def _free(self, event: tuple[str, int, int]) -> None:
        for tensor in self.program.frees.get(event, ()):
            self.active.discard(tensor)
            slot = self.tape.slots.get(tensor)
            if slot is not None and self._may_go(slot):
                slot.value = None

    def _may_go(self, slot: Slot) -> bool:
        return not slot.pinned and ((slot.call is not None and slot.ok) or not self.departures.astray)

    def released(self, handle: Handle) -> None:
        with self.lock:
            slot = handle.slot
            event = ("release", handle.save, 0)
            self._follow(event)
            self._free(event)
            if slot.handles == 0 and slot.plan not in self.active and self._may_go(slot):
                slot.value = None
