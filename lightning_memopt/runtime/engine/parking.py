"""When the bytes of what goes away leave the device, and what autograd is shown of what comes back: rules A1 to A7 of
runtime/away.py, for the engine that carries out plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_memopt.errors import ModifiedError, OffloadError, UnsupportedError
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.record import UNKNOWN, Slot, detached
from lightning_memopt.runtime.away import Away, Depot, whole
from lightning_memopt.runtime.engine import Engine, Handle
from lightning_memopt.runtime.execute import below_autograd, checksum
from lightning_memopt.runtime.naming import GraphNames, Names, modified
from lightning_memopt.runtime.program import Program

_NEVER = 1 << 62


@dataclass(slots=True)
class Departures:
    """How a forward and its backward differ from those of the plan; it outlives the engine.

    `first`: position and name of the first op that is not where the plan has it. `aside`: all such ops are none of the plan's,
    and read neither weights nor what has a gradient (a metric, a log). `unplanned_nbytes`: of results that autograd
    saved and that the plan does not know. `excess_nbytes`: by how much tensors that were recorded are larger than those of the
    graph that they are. `astray`: backward did not take the observed order: only a part of it, twice, or another order.
    `changed`: tensors of the plan that rebuilds start from and that were changed after the forward.
    """

    first: tuple[int, str] | None = None
    aside: bool = True
    unplanned_nbytes: int = 0
    excess_nbytes: int = 0
    astray: bool = False
    changed: set[int] = field(default_factory=set)


class Leaving(Engine):
    """One forward pass under a program, as far as tensors go away. `position`: the plan's op that comes next; `cursor`: the
    segment that ran last; `active`: tensors that the plan has in memory. `fence`: when the plan's op at this position has run,
    bytes are to be gone.
    """

    def __init__(self, program: Program, verify: bool, depot: Depot | None) -> None:
        super().__init__()
        self.program = program
        self.verify = verify
        self.depot = depot
        if depot is not None:
            depot.begins(program.graph.device)
        self.position = 0
        self._names = GraphNames(program.graph)
        self.cursor = BEFORE
        self.active = set(program.outlasting)
        self.departures = Departures()
        self.sums: dict[int, tuple[int, int]] = {}
        self.fence = program.fences[0][0] if program.fences else _NEVER
        self._next_fence = 0
        self._late: list[tuple[int, int]] = []
        """(op, tensor): to be gone when this op has run. What is packed later than the plan has it; and what is packed for the
        op, where the form has not the very bits.
        """

    @property
    def names(self) -> Names:
        return self._names

    def about(self, slot: Slot | None) -> tuple[Names, int]:
        return self._names, self.position

    def start_changed(self, slot: Slot) -> ModifiedError:
        if slot.plan is not None:
            self.departures.changed.add(slot.plan)
        return super().start_changed(slot)

    def forward_ended(self) -> None:
        if self.fence < self.position:
            self.pass_fences()
        super().forward_ended()

    def pass_fences(self) -> None:
        """Before an op runs, and all that it saves of its inputs is packed: let go of what has gone away by the op that ran
        last. Waits for copies that have not ended.
        """
        fences = self.program.fences
        while self._next_fence < len(fences) and fences[self._next_fence][0] < self.position:
            tensor = fences[self._next_fence][1]
            self._next_fence += 1
            self._leaves(tensor)
        late, self._late = self._late, []
        for op, tensor in late:
            if op < self.position:
                self._leaves(tensor)
            else:
                self._late.append((op, tensor))
        later = (fences[self._next_fence][0] if self._next_fence < len(fences) else _NEVER, *(op for op, _ in self._late))
        self.fence = min(later)

    def _leaves_late(self, tensor: int, exact: bool) -> None:
        """Where its fence has been passed already, or this op is in doubt: after this op."""
        fence = self.program.fence_of.get(tensor)
        fences = self.program.fences
        if fence is None or (exact and self._next_fence < len(fences) and (fence, tensor) >= fences[self._next_fence]):
            return
        self._late.append((max(fence, self.position), tensor))
        self.fence = min(self.fence, self._late[-1][0])

    def _leaves(self, tensor: int) -> None:
        """The bytes of the plan's tensor are to be gone from the device."""
        slot = self.tape.slots.get(tensor)
        if slot is None or slot.plan != tensor or slot.away is None or slot.value is None:
            return
        if not slot.away.exact and (self.departures.first is not None or any(t == tensor for _, t in self._late)):
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
        slot.away.put_off()
        slot.value = slot.shown = None
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

    def _expects(self, save: int) -> bool:
        """A5: whether this is the very save for which the plan has a tensor in a form without its very bits."""
        graph = self.program.graph
        return save != BEFORE and self.departures.first is None and graph.saves[save].op == self.position

    def _departs(self, slot: Slot, t: torch.Tensor, save: int) -> bool:
        """Put away what autograd packs; False where it stays, because it is not what the plan has in that form."""
        assert slot.plan is not None
        codec = codec_of(self.program.away[slot.plan])
        exact = codec in EXACT
        if codec and str(t.dtype) != f"torch.{self.program.graph.tensors[slot.plan].dtype}":
            return False  # a view of the memory as something else
        if not exact and not self._expects(save):
            return False
        if slot.away is None or not exact:  # again, until it is known that this op is the plan's
            slot.value, slot.noted = detached(t), UNKNOWN
            self.active.add(slot.plan)
            self._leaves_late(slot.plan, exact)
        if slot.away is None:
            self._goes(slot, t)
        return True

    def _stays(self, slot: Slot) -> bool:
        """A5, A7: whether what is here of what was away must not be let go while autograd may ask for it."""
        away = slot.away
        if away is None or not slot.handles:
            return False
        return away.spent or (not away.exact and self.departures.first is not None)  # who asks may be no reader of the plan

    # -- in backward -------------------------------------------------------------------------------

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
                away.noted = slot.shown._version
            found = slot.shown
            with below_autograd():
                away.in_order(found)
            if found._version != away.noted:
                raise modified(self._called(handle), found._version, away.noted)
        if not away.spent and self._for_the_last_time(slot):
            away.spend()
        return found

    def _for_the_last_time(self, slot: Slot) -> bool:
        """A7: whether nobody asks again for what is away once this request is answered."""
        left = self.departures.astray or self.departures.first is not None
        if left or slot.plan is None or self.cursor < self.program.last_back[slot.plan]:
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
