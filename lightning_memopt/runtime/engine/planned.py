"""The engine that does what a plan says: drops what it drops, holds what it holds, rebuilds when its Schedule says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial

import torch

from lightning_memopt.errors import OffloadError
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan import Fetch, Free, Segment
from lightning_memopt.record import UNKNOWN, Slot, detached
from lightning_memopt.runtime.away import Depot
from lightning_memopt.runtime.engine import Handle, Kept
from lightning_memopt.runtime.execute import below_autograd, checksum, flags_of, missing, run
from lightning_memopt.runtime.leaving import Leaving
from lightning_memopt.runtime.matching import Matcher
from lightning_memopt.runtime.program import Program
from lightning_memopt.runtime.rejoining import starts_of


def _among(ids: set[int], slot: Slot) -> bool:
    return slot.id in ids


class PlannedEngine(Leaving):
    """One forward pass under a program. `position` is the plan's op that comes next; `lost`: the last op recorded was none.
    `depot`: where it puts what goes away. `unproven`: the plan may be that of another model, so what is not at its turn is none
    of its ops.

    Where the forward is not the observed one: `stands` says which tensors of the plan, besides its own, a slot (by id) stands
    in for, because the ops that make those did not run; `needed` are slots that the plan would let go too early, because of
    rebuilds it does not know.
    """

    def __init__(self, program: Program, verify: bool = False, depot: Depot | None = None, unproven: bool = False) -> None:
        super().__init__(program, verify, depot)
        self.unproven = unproven
        self.lost = False
        self.next_event = 0
        self.due: list[int] = []
        self.labels: set[int] = set()
        self.packed: set[int] = set()
        self.stands: dict[int, list[int]] = {}
        self.needed: set[int] = set()
        self._guarded: list[tuple[int, set[int]]] = []

    def make_recorder(self) -> Matcher:
        return Matcher(self)

    def wants_state(self) -> bool:
        return self.lost or self.position in self.program.random

    def passed(self, position: int, name: str, aside: bool = False) -> None:
        """An op is not what the plan has at this position; `aside`: see `Departures`."""
        self.lost = True
        self.departures.aside = self.departures.aside and aside
        if self.departures.first is None:
            self.departures.first = (position, name)

    def overwrites(self, slot: Slot) -> None:
        if slot.plan in self.program.outdated and slot.id not in self.stands and slot.id not in self.needed:
            slot.value = None  # what comes is held, and read in its place
        else:
            super().overwrites(slot)

    def hold(self, slot: Slot, t: torch.Tensor, tensor: int | None = None) -> None:
        """The plan holds this tensor from its birth, or `tensor`, which it stands in for."""
        if tensor is None and slot.plan in self.program.unsaved and not slot.empty and slot.away is None:
            self._goes(slot, t)
        if not slot.empty:
            tensor = slot.plan if tensor is None else tensor
            assert tensor is not None
            slot.value, slot.noted = detached(t), UNKNOWN
            slot.pinned = False  # the plan knows who reads it, what was packed before it was written over too
            slot.ok = slot.ok or slot.call is None
            self.active.add(tensor)

    def guard(self, slots: set[int], until: int | None = None) -> None:
        """These slots, by their ids, stay until backward is past a point of the graph, or to the end."""
        self._guarded.append((len(self.program.graph.points) if until is None else until, slots))
        self.needed |= slots

    def _unguard(self) -> None:
        """Let go of what is needed no more, and should have gone before."""
        now = self.program.event_points[self.next_event - 1]
        self._guarded = [(until, slots) for until, slots in self._guarded if until >= now]
        before, self.needed = self.needed, set().union(*(slots for _, slots in self._guarded))
        for id in before - self.needed:
            slot = self.tape.slots[id]
            again = slot.call is not None and slot.ok
            held = slot.plan in self.program.holds or (id in self.stands and (again or slot.handles == 0))
            if held and not self.lives(slot) and self._may_go(slot) and not self._stays(slot):
                slot.value = None

    def lives(self, slot: Slot) -> bool:
        """Whether the plan has the slot's bytes in memory now."""
        if slot.id in self.stands and not self.active.isdisjoint(self.stands[slot.id]):
            return True
        return slot.plan in self.active

    def pack(self, t: torch.Tensor) -> Kept | Handle:
        found = super().pack(t)
        if type(found) is Handle:
            self.packed.add(found.save)
        return found

    def save_of(self, slot: Slot) -> int:
        """Of the plan's saves of this tensor that are still to come in this step, the one nearest to the position."""
        if slot.plan is None:
            return BEFORE
        at, packs, labels = self.position, self.program.packs, self.labels
        names = (slot.plan, *self.stands.get(slot.id, ()))
        near = [(abs(op - at), save) for name in names for op, save in packs.get(name, ()) if save not in labels]
        if not near:
            return BEFORE
        save = min(near)[1]
        labels.add(save)
        return save

    def left_out_nbytes(self) -> int:
        """Bytes of the plan's tensors that autograd did not save in this step."""
        tensors = self.program.graph.tensors
        return sum(tensors[t].nbytes for save, t in self.program.saved if save not in self.labels)

    def keeps(self, slot: Slot, t: torch.Tensor, save: int) -> bool:
        if slot.plan is None and not slot.external:
            self.departures.unplanned_nbytes += slot.nbytes
        if slot.external or slot.stale or slot.plan not in self.program.tracked:
            return True
        if save == BEFORE and slot.away is None:  # not saved so often when it was observed: no plan says for how long
            return True
        if slot.plan in self.program.away and not self._departs(slot, t, save):
            return True
        if slot.value is not None or slot.away is not None:
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
            event = ("unpack", handle.save, handle.unpacked)
            follows = self._follow(event)
            if follows:
                self._segment_at(event)
            handle.unpacked += 1
            found = super().request(handle)
            if self.recorder is not None:  # a gradient in the middle of the forward: its ops read what was made again
                self.recorder.recognise(handle.slot)
            if self.sums:  # in the first planned steps: the first rebuild
                then = self.sums.pop(handle.slot.id, None)
                if handle.slot.next is None:  # else it was overwritten where no version counts, and autograd reads that
                    self.compare(handle.slot, then)
            if follows:
                self._free(event)
            return found

    def _segment_at(self, event: tuple[str, int, int], asked: bool = True) -> None:
        planned = self.program.segments.get(event[1:])
        if planned is not None and planned[0] > self.cursor:
            self.cursor = planned[0]
            self.perform(planned[1], planned[0], asked)

    def perform(self, steps: Segment, point: int, asked: bool = True) -> None:
        """Run a segment. What it needs and finds missing is rebuilt on demand; as far as that is possible, where nobody asked
        or the forward was another one: what is asked for is seen to afterwards.
        """
        strict = asked and self.departures.first is None
        slots = self.tape.slots
        # from now on: what is rebuilt on demand, for another op of the segment, stays too
        self.active.update(t for t in self.program.births.get(point, ()) if t in slots)
        with below_autograd(), flags_of(self.tape):
            for step in steps:
                if isinstance(step, Fetch):
                    slot = slots.get(step.tensor)
                    if slot is not None and slot.away is not None and slot.value is None:
                        slot.away.begin()
                    continue
                if isinstance(step, Free):
                    slot = slots.get(step.tensor)
                    if slot is None or slot.id in self.needed or self.lives(slot) or self._stays(slot):
                        continue
                    if slot.away is not None or self._may_go(slot):
                        slot.value = None
                    continue
                made = [slots[t] for t in self.program.outputs[step.op] if t in slots]
                call = next((s.call for s in made if s.call is not None), None)
                if call is None or any(s.id in self.stands and not missing(s) for s in made):
                    continue  # it did not run in this step, and what stands in for its result is there
                absent = [slots[id] for id in call.reads if missing(slots[id])]
                if not strict and not (
                    any(s.ok or s.empty for s in made) and all(starts_of(s, slots) is not None for s in absent)
                ):
                    continue
                if absent:
                    self.materialise(absent)
                clones = {slots[t].id for t in step.clones if t in slots} | self.stands.keys() | self.needed
                run(call, slots, partial(_among, clones))
                self.replayed.append(call.op)

    def retains(self, slot: Slot) -> bool:
        """What the plan makes again when it is asked for does not stay before; once backward is astray, no plan is followed."""
        return slot.handles > 0 and (self.departures.astray or self.lives(slot))

    def _comes_early(self, event: tuple[str, int, int]) -> bool:
        """Whether the forward has yet to pack what the plan has asked for, or let go, by this event. Autograd asks, or lets
        go of a graph, in the middle of the forward, and the plan knows nothing of that.
        """
        if self.recorder is None:
            return False
        saves, upto = self.program.graph.saves, self.program.turns.get(event, -1) + 1
        return any(saves[save].op >= self.position for _, save, _ in self.program.events[self.next_event : upto])

    def _follow(self, event: tuple[str, int, int]) -> bool:
        """Notice when backward goes astray. From then on nothing goes that cannot be made again. Whether the plan says what is
        done at this event.

        Saves that were not packed in this step are passed over, as if they were asked for and let go in their turn. What was
        packed, and is still to come, lets go of nothing before.
        """
        if self._comes_early(event):
            self.departures.astray = True
            return False
        events, first = self.program.events, self.next_event
        if first < len(events) and events[first] == event:
            self.next_event += 1
            if self._guarded and not self.departures.astray:
                self._unguard()
            return True
        at = self.program.turns.get(event, -1)
        passed = events[first : max(at, 0)]
        unpack = event[0] == "unpack"
        segments = self.program.segments
        missed = not unpack and any(kind == "unpack" and (save, n) in segments for kind, save, n in passed)
        if at < first or missed or any(save in self.packed for _, save, _ in passed):
            self.departures.astray = True
        if at >= first:
            self.next_event = at + 1
            if self._guarded and not self.departures.astray:
                self._unguard()
            for other in passed:
                if other[1] in self.packed:
                    continue  # it comes later
                if unpack and other[0] == "unpack" and not self.departures.astray:
                    self._segment_at(other, asked=False)
                self._free(other, passed=True)
        return True

    def _free(self, event: tuple[str, int, int], passed: bool = False) -> None:
        """What the plan lets go at an event goes; at one that was passed over, what cannot be made again stays until autograd
        lets go of something: until then a second backward may be meant.
        """
        tensors: Iterable[int] = self.program.frees.get(event, ())
        if self.due and event[0] == "release" and not passed:
            tensors, self.due = [*self.due, *tensors], []
        for tensor in tensors:
            self.active.discard(tensor)
            slot = self.tape.slots.get(tensor)
            if slot is None or self.lives(slot):
                continue
            again = slot.away is not None or (slot.call is not None and slot.ok)
            if passed and not again and self._may_go(slot):
                self.due.append(tensor)
            else:
                self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        """No life of the slot's tensor goes on."""
        if slot.away is not None and slot.plan is not None:
            needed = slot.id in self.needed
            if not self._stays(slot) and not (needed and not slot.away.exact):
                self._has_gone(slot)
                back = self.program.last_back.get(slot.plan, BEFORE)
                if slot.handles == 0 and not self.departures.astray and self.cursor >= back and not needed:
                    slot.away = None  # A4
        elif self._may_go(slot):
            slot.value = None

    def _may_go(self, slot: Slot) -> bool:
        if slot.pinned:
            return False
        if slot.call is not None and slot.ok:
            return True
        comes_back = slot.plan is not None and self.cursor < self.program.last_back.get(slot.plan, BEFORE)  # but did not go
        return not (self.departures.astray or slot.id in self.needed or comes_back)

    def released(self, handle: Handle) -> None:
        with self.lock:
            slot = handle.slot
            event = ("release", handle.save, 0)
            with contextlib.suppress(OffloadError):  # a copy out has failed: the bytes stay, who waits for it is told
                if self._follow(event):
                    self._free(event)
                if slot.handles == 0 and not self.lives(slot):
                    self._let_go(slot)
