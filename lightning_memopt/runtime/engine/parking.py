"""When the bytes of parked tensors are dropped from the device, and which value autograd gets when they are fetched: rules A1
to A7 of runtime/parked.py, for the engine that carries out plans.
"""

from __future__ import annotations

import torch

from lightning_memopt.errors import OffloadError, TierFullError, UnsupportedError
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.record import Tape
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime.engine.checks import Checks
from lightning_memopt.runtime.engine.cursor import NEVER, Cursor
from lightning_memopt.runtime.engine.handles import Handle
from lightning_memopt.runtime.engine.holding import Holding, Version
from lightning_memopt.runtime.engine.program import Program
from lightning_memopt.runtime.parked import Depot, ParkedTensor, whole
from lightning_memopt.torch_private import backward_keeps_graph, backward_task


class Parking:
    """The parked tensors of one forward.

    depot: the tiers for parked bytes; None where the plan parks nothing.
    active: tensors that the plan has in memory now (shared with `PlannedHoldings`).
    """

    def __init__(
        self, program: Program, tape: Tape[Holding], cursor: Cursor, checks: Checks, active: set[int], depot: Depot | None
    ) -> None:
        self.depot = depot
        self.active = active
        self._program = program
        self._tape = tape
        self._cursor = cursor
        self._checks = checks
        self._next_fence = 0
        self._late: list[tuple[int, int]] = []
        """(op, tensor): drop the tensor when this op has run. These tensors were packed after their fence, or this op packs
        them in a form that is not bit-identical.
        """
        self._refused: set[int] = set()
        """Tensors that the tier has no room for."""
        cursor.fence = program.fences[0][0] if program.fences else NEVER
        if depot is not None:
            depot.begins(program.graph.device)

    # -- in forward --------------------------------------------------------------------------------

    def pass_fences(self, over: bool = False) -> None:
        """Drop the bytes of tensors whose fence is an op that has run. Waits for their copies out.

        It is called before the next op runs, when autograd has packed the inputs of the last op. `over`: the recorded forward
        is over. The plan's later ops, those of the loss, run unseen, so their fences are passed now. User code keeps what it
        still reads, as autocast keeps its casts of weights.
        """
        fences, position = self._program.fences, NEVER if over else self._cursor.position
        while self._next_fence < len(fences) and fences[self._next_fence][0] < position:
            tensor = fences[self._next_fence][1]
            self._next_fence += 1
            self._at_fence(tensor)
        late, self._late = self._late, []
        for op, tensor in late:
            if op < position:
                self._at_fence(tensor)
            else:
                self._late.append((op, tensor))
        later = (fences[self._next_fence][0] if self._next_fence < len(fences) else NEVER, *(op for op, _ in self._late))
        self._cursor.fence = min(later)

    def _at_fence(self, tensor: int) -> None:
        """Drop the bytes of the plan's tensor from the device."""
        version = self._tape.versions.get(tensor)
        if version is None:
            return
        holding = version.holding
        if holding.tensor != tensor or holding.parked is None or holding.value is None:
            return
        if not holding.parked.exact and (not self._cursor.on_plan or any(t == tensor for _, t in self._late)):
            return  # A5: an op that is not the plan's may have read it
        if version.counter >= 0 and holding.value._version != version.counter and not version.stale:
            holding.unpark()  # A2: it was changed unseen, perhaps while it was copied
            return
        self.let_go(version)

    def _fence_after(self, tensor: int, exact: bool) -> None:
        """Drop the tensor after this op if its fence was passed already, or if this op may not be the plan's."""
        fence = self._program.fence_of.get(tensor)
        fences, position = self._program.fences, self._cursor.position
        if fence is None or (exact and self._next_fence < len(fences) and (fence, tensor) >= fences[self._next_fence]):
            return
        self._late.append((max(fence, position), tensor))
        self._cursor.fence = min(self._cursor.fence, self._late[-1][0])

    def park(self, version: Version, t: torch.Tensor) -> bool:
        """Begin to park the bytes of a version, in the form that the plan has for its tensor. They stay in memory until the
        fence. Returns whether the tier has room for them.
        """
        tensor = version.holding.tensor
        assert tensor is not None
        if tensor in self._refused:
            return False
        if self.depot is None:
            raise OffloadError("this plan parks tensors, and there is nowhere to put them: give the engine a depot")
        planned = self._program.graph.tensors[tensor]
        with below_autograd():
            form = self._program.parked[tensor]
            try:
                version.holding.park(ParkedTensor(self.depot, whole(t, planned.size), form, planned.name))
            except TierFullError:  # a forward more than the plan knows, and no further tier is allowed
                self._refused.add(tensor)
                self._cursor.deviation.unparked_nbytes += version.nbytes
                return False
            if codec_of(form) in EXACT:
                self._checks.note(version, t)
            return True

    def pack(self, version: Version, t: torch.Tensor, save: int) -> bool:
        """Park a tensor that autograd saves, unless the plan's form is meant for another save. Returns whether it did."""
        holding = version.holding
        assert holding.tensor is not None
        codec = codec_of(self._program.parked[holding.tensor])
        exact = codec in EXACT
        if codec and str(t.dtype) != f"torch.{self._program.graph.tensors[holding.tensor].dtype}":
            return False  # a view of the memory as another type
        if not exact and not self._expects(save):
            return False
        before = holding.parked
        if before is None and not self.park(version, t):
            return False
        if before is None or not exact:  # if not exact, it stays until it is certain that this op is the plan's
            holding.hold(t)
            self.active.add(holding.tensor)
            self._fence_after(holding.tensor, exact)
        return True

    def _expects(self, save: int) -> bool:
        """A5: whether the plan has chosen a form that is not bit-identical for this save."""
        return save != BEFORE and self._cursor.on_plan and self._program.graph.saves[save].op == self._cursor.position

    # -- in backward -------------------------------------------------------------------------------

    def let_go(self, version: Version) -> None:
        """A1: drop the bytes in memory when their copy is complete."""
        holding = version.holding
        assert holding.parked is not None and holding.tensor is not None
        if not holding.parked.copied:
            with below_autograd():
                holding.parked.wait_copied()
        holding.parked.cancel_fetch()
        holding.parked.shown = None
        holding.drop()
        self.active.discard(holding.tensor)

    def must_stay(self, version: Version) -> bool:
        """A5, A7: whether bytes of a parked tensor must stay in memory while autograd may ask for them."""
        parked = version.holding.parked
        if parked is None or not version.holding.handles:
            return False
        return parked.spent or (not parked.exact and not self._cursor.on_plan)  # an op that is not the plan's may ask

    def show(self, version: Version, handle: Handle) -> torch.Tensor:
        """A5: the decoded value, which only autograd gets."""
        parked = version.holding.parked
        assert parked is not None
        self._may_show(version, handle, parked.lossy)
        if parked.shown is None:
            with below_autograd():
                parked.shown = parked.value()
            parked.expected = parked.shown._version
        with below_autograd():
            parked.in_order(parked.shown)
        return parked.shown

    def _may_show(self, version: Version, handle: Handle, lossy: bool) -> None:
        """Raise UnsupportedError outside an ordinary backward: the form was chosen for the formula of the saving op."""
        outside = backward_task() == -1
        if outside or (lossy and torch.is_grad_enabled()):
            tensor = version.holding.tensor
            assert tensor is not None
            form, name = self._program.parked[tensor], self._program.graph.tensors[tensor].name
            raise UnsupportedError(
                f"{name} {list(handle.view.size)} is parked in the form {form!r}, which is not bit-identical: "
                + ("it cannot be read outside of backward" if outside else "create_graph=True would differentiate its errors")
                + ". Observe such a step, so that the plan knows of it, or do without lossy compression."
            )

    def spend(self, version: Version) -> None:
        """A7: autograd has got the value. Drop the encoded bytes if autograd will not ask again."""
        parked = version.holding.parked
        if parked is not None and not parked.spent and self._for_the_last_time(version):
            parked.spend()

    def _for_the_last_time(self, version: Version) -> bool:
        """Whether the plan does not fetch the version again, and backward runs as planned and only once."""
        tensor = version.holding.tensor
        if not self._cursor.strict or tensor is None or self._cursor.point < self._program.last_fetch[tensor]:
            return False
        return backward_task() != -1 and not backward_keeps_graph()
