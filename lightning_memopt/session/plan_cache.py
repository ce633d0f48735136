"""Which state a forward belongs to: batches of the same shapes share one, others that are no larger borrow its plan.

A plan says what becomes of each tensor of a graph; nothing in it depends on how large the tensors are. So where a batch is no
larger than one whose plan is in force, that plan serves it, with nothing to observe. Op by op the step is compared with the
plan; what is larger than planned is counted, and measured (docs/adr/0006). What the number of shapes could make grow is
bounded here: plans, borrowers, and how often one is planned for.
"""

from __future__ import annotations

from lightning_memopt.graph import Graph
from lightning_memopt.session import times
from lightning_memopt.session.failed import Failed
from lightning_memopt.session.offloading import Offloading
from lightning_memopt.session.shapes import Signature, alike, elements, times_larger
from lightning_memopt.session.silence import WAITS
from lightning_memopt.session.solves import Solves
from lightning_memopt.session.states import Observing, Running, Say, State, Waiting

PLANS = 16
"""Signatures with a state of their own, and as many that wait for a plan; then the one used least recently makes room."""
BORROWERS = 64
"""Signatures that borrow; each remembers what its ops looked like."""
_REFUSALS = 3
"""Borrowers that may leave a plan before it is lent no more, unless more of them have kept to it."""
_STEPS_A_PLAN = 50
"""After the first `PLANS`, one more plan is made in this many forwards: planning must not become what a run does."""
_LARGE = 2
_PATIENCE = 8
"""A plan for a batch `_LARGE` times as large rebuilds more than it would have to: after so many uses, observe the small one."""


class PlanCache(dict[Signature, State]):
    """The state of every signature, the one used least recently first."""

    def __init__(self) -> None:
        super().__init__()
        self.solves = Solves()
        self._unplanned = Failed(WAITS.what)
        self.forwards = 0

    @property
    def main(self) -> State | None:
        """The state of the signature with the largest unmodified peak that has a plan of its own, else of any."""
        running = [s for _, s in self._own() if isinstance(s, Running)]
        return max(running, key=lambda s: s.plan.unmodified_peak_nbytes) if running else next(iter(self.values()), None)

    def enter(self, signature: Signature, steps: int) -> State:
        """The state for a forward of this signature; a new one observes `steps` steps, unless it may borrow."""
        self.forwards += 1
        self.solves.forward()
        before = self.pop(signature, None)
        try:
            self[signature] = state = self._entered(signature, steps, before)
        except BaseException:
            if before is not None:
                self[signature] = before  # an interrupted forward must not cost the plan
            raise
        return state

    def _entered(self, signature: Signature, steps: int, state: State | None) -> State:
        """What becomes of the state of this signature, which is not in here meanwhile, when a forward begins."""
        if isinstance(state, Running) and state.overtaken:  # the step that raised may not have ended
            state = state.observed_again()
        if isinstance(state, Running) and state.lender is not None and self._wasted(signature, state.lender):
            return self._begins(signature, 1)
        lasts = isinstance(state, Observing) and self._lasts(signature, state)
        if state is None or isinstance(state, Waiting) or lasts:
            waiting = state if isinstance(state, Waiting) else None
            alone = waiting is not None and waiting.alone
            return (None if alone else self._borrowing(signature)) or self._observing(signature, steps, waiting)
        return state

    def replace(self, old: State, new: State) -> None:
        """`new` is the state of what `old` was; who borrowed from `old` borrows again."""
        for signature, state in list(self.items()):
            if state is old:
                self[signature] = new
            elif isinstance(state, Running) and state.lender is old:
                del self[signature]

    def observed(self, state: Observing, graph: Graph, limit_nbytes: int | None, offloading: Offloading, say: Say) -> State:
        """`state.observed`, with the time that solving takes."""
        signature, began = self._of(state), times.current.now()
        after = state.observed(graph, limit_nbytes, offloading, say)
        if isinstance(after, Running):
            self.solves.ended(signature, len(graph.ops), times.current.now() - began)
        return after

    def waited(self, state: Waiting, graph: Graph) -> None:
        """One more step of a signature that waits was recorded."""
        self.solves.recorded(self._of(state), len(graph.ops))

    def step_ended(self, state: State | None, planned: bool, measured_nbytes: int | None, budget_nbytes: int | None) -> None:
        """A step of this state is over, all that it led to included; `planned`: a plan was in force."""
        waited = isinstance(state, Waiting)
        self.solves.step_ended(planned and not waited if planned or waited else None)
        unplanned = self._unplanned if waited else state
        if measured_nbytes is not None and isinstance(unplanned, Failed) and not planned:
            unplanned.measured(measured_nbytes, budget_nbytes)

    def _of(self, state: State) -> Signature:
        return next((signature for signature, other in self.items() if other is state), ())

    def _borrowing(self, signature: Signature) -> State | None:
        lenders = [(s, state) for s, state in self._lenders() if state.has_room(times_larger(s, signature))]
        if not lenders:
            return None
        _, lender = min(lenders, key=lambda pair: elements(pair[0]))
        if self._wasted(signature, lender):
            return None
        borrowers = [s for s, state in self.items() if isinstance(state, Running) and state.lender is not None]
        if len(borrowers) >= BORROWERS:
            del self[borrowers[0]]
        return lender.lend()

    def _lenders(self) -> list[tuple[Signature, Running]]:
        own = [(s, state) for s, state in self._own() if isinstance(state, Running)]
        return [(s, state) for s, state in own if state.refused < _REFUSALS or state.refused < state.proofs]

    def _lasts(self, signature: Signature, state: Observing) -> bool:
        """Whether a signature that was to be observed for several steps has not come again until others had a plan."""
        if state.steps == 1 or state.early_known or state.for_early:
            return False
        return any(alike(s, signature) for s, _ in self._lenders())

    def _wasted(self, signature: Signature, lender: Running) -> bool:
        """Counts uses of a plan that is too large; whether this one should rather be observed."""
        of = self._of(lender)
        if not of or lender.program.empty or _LARGE * elements(signature) > elements(of):
            return False
        lender.wasted += 1
        # at most all that the plan takes on top of the unmodified step, in proportion to the batch
        each = lender.plan.predicted.seconds * elements(signature) / max(1, elements(of))
        if lender.wasted < _PATIENCE or not self._may_plan or not self.solves.pays(lender.wasted * each, signature):
            return False
        lender.wasted = 0
        return True

    def _own(self) -> list[tuple[Signature, State]]:
        """Those that do not borrow, the one used least recently first."""
        return [(s, state) for s, state in self.items() if not (isinstance(state, Running) and state.lender is not None)]

    @property
    def _may_plan(self) -> bool:
        return self.solves.count < PLANS + self.forwards // _STEPS_A_PLAN

    def _observing(self, signature: Signature, steps: int, before: Waiting | None) -> State:
        """A state for a signature that nothing serves. Where no plan is to be made now, it is kept within the budget by
        eviction alone until one is.
        """
        planned = [s for s, state in self._own() if isinstance(state, Running)]
        alone = before is not None and before.alone
        if self._may_plan and self.solves.allows(signature, planned, alone):
            return self._begins(signature, steps)
        self.solves.waits(signature, alone)
        if before is not None:
            return before
        self._make_room(waiting=True)
        return Waiting(alone)

    def _begins(self, signature: Signature, steps: int) -> State:
        self._make_room(waiting=False)
        self.solves.begins(signature)
        return Observing(steps)

    def _make_room(self, waiting: bool) -> None:
        """Where there are too many, let go of the one used least recently; `waiting`: of those that wait for a plan."""
        own = [(s, state) for s, state in self._own() if isinstance(state, Waiting) is waiting]
        if len(own) < PLANS:
            return
        signature, oldest = own[0]
        del self[signature]
        for s, state in list(self.items()):
            if isinstance(state, Running) and state.lender is oldest:
                del self[s]
