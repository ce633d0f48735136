"""The engine that does what a plan says: drops what it drops, holds what it holds, rebuilds when its Schedule says."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

import torch

from lightning_memopt.errors import OffloadError, UnsupportedError
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan import Fetch, Free, Segment
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.record import UNKNOWN, Slot, detached
from lightning_memopt.runtime.away import Away, Depot, whole
from lightning_memopt.runtime.execute import below_autograd, checksum, flags_of, missing, modified, run
from lightning_memopt.runtime.matching import Matcher
from lightning_memopt.runtime.program import Program
from lightning_memopt.runtime.replay import Engine, Handle

_NEVER = 1 << 62
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
    """One forward pass under a program. `position` is the plan's op that comes next; `depot`: where it puts what goes away."""

    def __init__(self, program: Program, verify: bool = False, depot: Depot | None = None) -> None:
        super().__init__()
        self.program = program
        self.verify = verify
        self.depot = depot
        self.next_fence = 0
        self.due = program.fences[0][0] if program.fences else _NEVER
        """When the plan's op at this position has run, bytes are to be gone."""
        self.late: list[tuple[int, int]] = []
        """(op, tensor): to be gone when this op has run. What is packed later than the plan has it; and what is packed for the
        op, where the form has not the very bits.
        """
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

    def forward_ended(self) -> None:
        if self.due < self.position:
            self.pass_fences()
        super().forward_ended()

    def pass_fences(self) -> None:
        """Before an op runs, and all that it saves of its inputs is packed: let go of what has gone away by the op that ran
        last. Waits for copies that have not ended.
        """
        fences = self.program.fences
        while self.next_fence < len(fences) and fences[self.next_fence][0] < self.position:
            tensor = fences[self.next_fence][1]
            self.next_fence += 1
            self._leaves(tensor)
        late, self.late = self.late, []
        for op, tensor in late:
            if op < self.position:
                self._leaves(tensor)
            else:
                self.late.append((op, tensor))
        later = (fences[self.next_fence][0] if self.next_fence < len(fences) else _NEVER, *(op for op, _ in self.late))
        self.due = min(later)

    def _leaves_late(self, tensor: int, exact: bool) -> None:
        """Where its fence has been passed already, or this op is in doubt: after this op."""
        fence = self.program.fence_of.get(tensor)
        fences = self.program.fences
        if fence is None or (exact and self.next_fence < len(fences) and (fence, tensor) >= fences[self.next_fence]):
            return
        self.late.append((max(fence, self.position), tensor))
        self.due = min(self.due, self.late[-1][0])

    def _leaves(self, tensor: int) -> None:
        """The bytes of the plan's tensor are to be gone from the device."""
        slot = self.tape.slots.get(tensor)
        if slot is None or slot.away is None or slot.value is None:
            return
        if not slot.away.exact and (self.departures.first is not None or any(t == tensor for _, t in self.late)):
            return  # A5: who read it may not be who the plan says
        if slot.version >= 0 and slot.value._version != slot.version and not slot.stale:
            slot.away = None  # A2: changed by what nobody sees, perhaps while it was copied
            return
        self._has_gone(slot)

    def _has_gone(self, slot: Slot) -> None:
        """A1: not before its copy is complete."""
        assert slot.away is not None and slot.plan is not None
        if not slot.away.gone:
            with below_autograd():
                slot.away.wait_gone()
        slot.value = None
        self.active.discard(slot.plan)

    def _goes(self, slot: Slot, t: torch.Tensor) -> None:
        """Begin to put the bytes of a slot away, as its tensor's form says; they stay until the fence."""
        assert slot.plan is not None
        if self.depot is None:
            raise OffloadError("this plan sends tensors away, and there is nowhere to put them: give the engine a depot")
        planned = self.program.graph.tensors[slot.plan]
        with below_autograd():
            slot.away = Away(self.depot, whole(t, planned.size), self.program.away[slot.plan], planned.name)
            if slot.away.exact:
                slot.ok = True
                if self.verify and slot.id not in self.sums:
                    self.sums[slot.id] = checksum(t)

    def hold(self, slot: Slot, t: torch.Tensor) -> None:
        """The plan holds this tensor from its birth."""
        if slot.plan in self.program.unsaved and not slot.empty and slot.away is None:
            self._goes(slot, t)
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

    def _expects(self, save: int) -> bool:
        """A5: whether this is the very save for which the plan has a tensor in a form without its very bits."""
        graph = self.program.graph
        return save != BEFORE and self.departures.first is None and graph.saves[save].op == self.position

    def keeps(self, slot: Slot, t: torch.Tensor, save: int) -> bool:
        if slot.plan is None and not slot.external:
            self.departures.unplanned = True
        if slot.external or slot.stale or slot.plan not in self.program.tracked:
            return True
        if slot.plan in self.program.away:
            codec = codec_of(self.program.away[slot.plan])
            exact = codec in EXACT
            if codec and str(t.dtype) != f"torch.{self.program.graph.tensors[slot.plan].dtype}":
                return True  # a view of the memory as something else
            if not exact and not self._expects(save):
                return True
            if slot.away is None or not exact:  # again, until it is known that this op is the plan's
                slot.value, slot.noted = detached(t), UNKNOWN
                self.active.add(slot.plan)
                self._leaves_late(slot.plan, exact)
            if slot.away is None:
                self._goes(slot, t)
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
            planned = self.program.segments.get((handle.save, handle.unpacked))
            if planned is not None and planned[0] > self.cursor:
                self.cursor = planned[0]
                self.perform(planned[1], planned[0])
            event = ("unpack", handle.save, handle.unpacked)
            self._follow(event)
            handle.unpacked += 1
            found = super().request(handle)
            if self.sums:  # in the first planned steps: the first rebuild
                then = self.sums.pop(handle.slot.id, None)
                if handle.slot.next is None:  # else it was overwritten where no version counts, and autograd reads that
                    self.compare(handle.slot, then)
            self._free(event)
            return found

    def value_of(self, slot: Slot, handle: Handle) -> torch.Tensor:
        away = slot.away
        if away is None:
            return super().value_of(slot, handle)
        if away.exact or slot.value is not None or self.revive(slot, handle.guard):
            found = super().value_of(slot, handle)
        else:
            self._may_show(slot, handle)
            if slot.shown is None:
                with below_autograd():
                    slot.shown = away.value()  # A5
                slot.noted = slot.shown._version
            found = slot.shown
            if found._version != slot.noted:
                raise modified(f"[{found.type()} {list(handle.view.size)}]", found._version, slot.noted)
        if not away.spent and self._for_the_last_time(slot):
            away.spend()
        return found

    def _for_the_last_time(self, slot: Slot) -> bool:
        """A7: whether nobody asks again for what is away once this request is answered."""
        if self.departures.astray or slot.plan is None or self.cursor < self.program.last_back[slot.plan]:
            return False
        return torch._C._current_graph_task_id() != -1 and not torch._C._autograd._get_current_graph_task_keep_graph()

    def _may_show(self, slot: Slot, handle: Handle) -> None:
        """A5: raise where it is not an ordinary backward that asks: its formula is what the form was chosen for."""
        assert slot.away is not None and slot.plan is not None
        outside = torch._C._current_graph_task_id() == -1
        if outside or (slot.away.lossy and torch.is_grad_enabled()):
            form, name = self.program.away[slot.plan], self.program.graph.tensors[slot.plan].name
            raise UnsupportedError(
                f"{name} {list(handle.view.size)} is away in the form {form!r}, which has not its very bits: "
                + ("it cannot be read outside of backward" if outside else "create_graph=True would differentiate its errors")
                + ". Observe such a step, so that the plan knows of it, or do without lossy compression."
            )

    def perform(self, steps: Segment, point: int) -> None:
        """Run a segment. What it needs and finds missing is rebuilt on demand."""
        slots = self.tape.slots
        with below_autograd(), flags_of(self.tape):
            for step in steps:
                if isinstance(step, Fetch):
                    slot = slots.get(step.tensor)
                    if slot is not None and slot.away is not None and slot.value is None:
                        slot.away.begin()
                    continue
                if isinstance(step, Free):
                    slot = slots.get(step.tensor)
                    if slot is not None and step.tensor not in self.active:
                        slot.value = None
                    continue
                outputs = [slots.get(t) for t in self.program.outputs[step.op]]
                call = next((s.call for s in outputs if s is not None and s.call is not None and (s.ok or s.empty)), None)
                if call is None or not call.repeats:
                    continue  # it cannot run again as it ran in this forward: what it made was kept
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
            if slot is not None:
                self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        """A life of the slot's tensor has ended."""
        if slot.away is not None and slot.plan is not None:
            doubtful = not slot.away.exact and self.departures.first is not None  # A5: one may be no reader of the plan
            if slot.handles and (doubtful or slot.away.spent):
                return  # A7
            slot.shown = None
            self._has_gone(slot)
            slot.away.put_off()
            if slot.handles == 0 and not self.departures.astray and self.cursor >= self.program.last_back[slot.plan]:
                slot.away = None  # A4
        elif self._may_go(slot):
            slot.value = None

    def _may_go(self, slot: Slot) -> bool:
        return not slot.pinned and ((slot.call is not None and slot.ok) or not self.departures.astray)

    def released(self, handle: Handle) -> None:
        with self.lock:
            slot = handle.slot
            event = ("release", handle.save, 0)
            self._follow(event)
            with contextlib.suppress(OffloadError):  # a copy out has failed: the bytes stay, who waits for it is told
                self._free(event)
                if slot.handles == 0 and slot.plan not in self.active:
                    self._let_go(slot)
