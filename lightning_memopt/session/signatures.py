"""Which state a forward belongs to: batches of the same shapes share one, others that are no larger borrow its plan.

A plan says what becomes of each tensor of a graph; nothing in it depends on how large the tensors are. So where a batch is no
larger than one whose plan is in force, that plan serves it, with nothing to observe. Op by op the step is compared with the
plan; what is larger than planned is counted, and measured (docs/adr/0006). What the number of shapes could make grow is
bounded here: plans, borrowers, and how often one is planned for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_memopt.session.buckets import Observing, Running, State

Signature = tuple[Any, ...]

PLANS = 16
"""Signatures with a state of their own; then the one used least recently makes room."""
BORROWERS = 64
"""Signatures that borrow; each remembers what its ops looked like."""
_STEPS_A_PLAN = 50
"""After the first `PLANS`, one more plan is made in this many forwards: planning must not become what a run does."""
_LARGE = 2
_PATIENCE = 8
"""A plan for a batch `_LARGE` times as large rebuilds more than it would have to: after so many uses, observe the small one."""


def signature_of(part: int, trained: tuple[bool, ...], batch: Any) -> Signature:
    """Which forward of a step, which parameters are trained, then shape, dtype and device of each tensor of the batch."""
    tensors = (t for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
    return (part, trained, *((tuple(t.shape), t.dtype, t.device.type) for t in tensors))


def serves(lender: Signature, signature: Signature) -> bool:
    """Whether the plan of the first may serve the second: alike but for sizes, no more elements in all, and none of the
    dimensions behind the first is larger. Samples may be more if they are shorter: what they take grows with their length at
    least in proportion.
    """
    if lender[:2] != signature[:2] or len(lender) != len(signature) or _elements(signature) > _elements(lender):
        return False
    return all(
        a[1:] == b[1:] and len(a[0]) == len(b[0]) and all(n >= m for n, m in zip(a[0][1:], b[0][1:], strict=True))
        for a, b in zip(lender[2:], signature[2:], strict=True)
    )


def _elements(signature: Signature) -> int:
    return sum(math.prod(shape) for shape, _, _ in signature[2:])


class Buckets(dict[Signature, State]):
    """The state of every signature, the one used least recently first."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = 0
        self.forwards = 0

    @property
    def main(self) -> State | None:
        """The state of the signature with the largest unmodified peak that has a plan of its own, else of any."""
        running = [s for _, s in self._own() if isinstance(s, Running)]
        return max(running, key=lambda s: s.plan.unmodified_peak_bytes) if running else next(iter(self.values()), None)

    def enter(self, signature: Signature, steps: int) -> State:
        """The state for a forward of this signature; a new one observes `steps` steps, unless it may borrow."""
        self.forwards += 1
        state = self.pop(signature, None)
        if isinstance(state, Running) and state.overtaken:  # the step that raised may not have ended
            state = state.observed_again()
        if isinstance(state, Running) and state.lender is not None and self._wasted(signature, state.lender):
            state = self._observing(1)
        elif state is None or (isinstance(state, Observing) and state.waits):
            state = self._borrowing(signature) or self._observing(steps)
        self[signature] = state
        return state

    def replace(self, old: State, new: State) -> None:
        """`new` is the state of what `old` was; who borrowed from `old` borrows again."""
        for signature, state in list(self.items()):
            if state is old:
                self[signature] = new
            elif isinstance(state, Running) and state.lender is old:
                del self[signature]

    def _borrowing(self, signature: Signature) -> State | None:
        lenders = [(s, state) for s, state in self._own() if isinstance(state, Running) and serves(s, signature)]
        if not lenders:
            return None
        _, lender = min(lenders, key=lambda pair: _elements(pair[0]))
        if self._wasted(signature, lender):
            return None
        borrowers = [s for s, state in self.items() if isinstance(state, Running) and state.lender is not None]
        if len(borrowers) >= BORROWERS:
            del self[borrowers[0]]
        return lender.lend()

    def _wasted(self, signature: Signature, lender: Running) -> bool:
        """Counts uses of a plan that is too large; whether this one should rather be observed."""
        of = next((s for s, state in self.items() if state is lender), None)
        if of is None or lender.program.empty or _LARGE * _elements(signature) > _elements(of):
            return False
        lender.wasted += 1
        if lender.wasted < _PATIENCE or not self._may_plan:
            return False
        lender.wasted = 0
        return True

    def _own(self) -> list[tuple[Signature, State]]:
        """Those that do not borrow, the one used least recently first."""
        return [(s, state) for s, state in self.items() if not (isinstance(state, Running) and state.lender is not None)]

    @property
    def _may_plan(self) -> bool:
        return self.planned < PLANS + self.forwards // _STEPS_A_PLAN

    def _observing(self, steps: int) -> State:
        """A state for a signature that nothing serves. Where no plan can be made now, it is kept within the budget by eviction
        alone until one can.
        """
        own = self._own()
        if len(own) >= PLANS:
            signature, oldest = own[0]
            del self[signature]
            for s, state in list(self.items()):
                if isinstance(state, Running) and state.lender is oldest:
                    del self[s]
        if not self._may_plan:
            return Observing(0)
        self.planned += 1
        return Observing(steps)
