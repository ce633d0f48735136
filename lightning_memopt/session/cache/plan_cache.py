"""Which state a forward belongs to: batches of the same shapes share a state, and batches that are no larger borrow its plan.

The decisions of a plan do not depend on the sizes of tensors. So a plan in force also serves a batch that is no larger, and
nothing is observed for that batch. Its step is compared with the plan op by op. Tensors that are larger than planned are
counted, and the step is measured (docs/adr/0006). A batch that is larger may borrow under budget="min" (longer.py). A run
with many shapes has a maximum number of plans and of borrowers, and solves only so often.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import Graph
from lightning_memopt.logs import Say
from lightning_memopt.plan import Plan
from lightning_memopt.session import times
from lightning_memopt.session.cache import longer
from lightning_memopt.session.cache.solves import Solves
from lightning_memopt.session.forward.shapes import Signature, alike, elements, goes_on_as, times_larger
from lightning_memopt.session.judge.states import Running, Solve, State, after_observing
from lightning_memopt.session.observe.failed import Failed
from lightning_memopt.session.observe.observing import Observing, Waiting
from lightning_memopt.session.observe.silence import WAITS

PLANS = 16
"""Maximum number of signatures with a state of their own, and of those that wait. The least recently used makes room."""
BORROWERS = 64
"""Maximum number of signatures that borrow a plan: each has templates of its own."""
_REFUSALS = 3
"""Number of borrowers that a plan may fail to serve before it is no longer lent. Measured steps of its borrowers raise it."""
_STEPS_A_PLAN = 50
"""Number of forwards in which one more plan is made, after the first `PLANS`: a run must not spend its time on solving."""
_LARGE = 2
_PATIENCE = 8
"""A plan for a batch `_LARGE` times as large rebuilds too much. After `_PATIENCE` uses the small batch is observed."""


class PlanCache(dict[Signature, State]):
    """The state of every signature, the least recently used first. Many methods: each is one rule of who may borrow or plan.

    smallest: the budget is "min".
    """

    def __init__(self, config: MemOptConfig) -> None:
        super().__init__()
        self.smallest = config.smallest
        self.solves = Solves()
        self._unplanned = Failed(WAITS.what)
        self.forwards = 0

    @property
    def main(self) -> State | None:
        """The state whose own plan has the largest unmodified peak; where there is no plan, any state; None for no state."""
        running = [s for _, s in self._own() if isinstance(s, Running)]
        return max(running, key=lambda s: s.plan.unmodified_peak_nbytes) if running else next(iter(self.values()), None)

    @property
    def begins_anew(self) -> bool:
        """Whether all plans were dropped in the middle of the run, which must go on."""
        return not self and self.forwards > 0

    def in_force(self) -> Iterator[Plan]:
        """The plans of all signatures."""
        return (state.plan for state in self.values() if isinstance(state, Running))

    @property
    def measured_nbytes(self) -> int | None:
        """The largest measured peak of steps under the plans in force; None where no such step was measured."""
        return max(
            (s.peaks.measured_nbytes for s in self.values() if isinstance(s, Running) and s.peaks.measured_nbytes), default=None
        )

    def limit_nbytes(self, signature: Signature, limit_nbytes: int | None) -> int | None:
        """Bytes within which eviction keeps a step of this signature that runs without a plan. None: nothing is evicted.
        `limit_nbytes`: those of the budget; None for "min".
        """
        return longer.limit_nbytes(self._plans(), signature) if limit_nbytes is None else limit_nbytes

    def enter(self, signature: Signature, steps: int) -> State:
        """The state for a forward of this signature. A new state borrows a plan where it may, else observes `steps` steps."""
        self.forwards += 1
        self.solves.forward()
        before = self.get(signature)
        try:
            self.pop(signature, None)
            self[signature] = state = self._entered(signature, steps, before)
        except BaseException:
            if before is not None:
                self[signature] = before  # an interrupted forward must not cost the plan
            raise
        return state

    def _entered(self, signature: Signature, steps: int, state: State | None) -> State:
        """The state after `state` when a forward begins. While this runs, the signature is not in the cache."""
        if isinstance(state, Running) and state.drift.inputs_changed:  # the step that raised may not have ended
            state = state.observed_again()
        if isinstance(state, Running) and state.lender is not None and self._wasted(signature, state.lender):
            return self._begins(signature, 1)
        lasts = isinstance(state, Observing) and self._lasts(signature, state)
        if state is None or isinstance(state, Waiting) or lasts:
            waiting = state if isinstance(state, Waiting) else None
            alone = waiting is not None and waiting.alone
            borrowing = None if alone else self._borrowing(signature)
            return borrowing or self._observing(signature, steps, waiting)
        return state

    def replace(self, old: State, new: State) -> None:
        """Replace `old` by `new`. Signatures that borrowed from `old` are forgotten, and borrow again."""
        for signature, state in list(self.items()):
            if state is old:
                self[signature] = new
            elif isinstance(state, Running) and state.lender is old:
                del self[signature]

    def afresh(self, state: Observing, changed: bool) -> State:
        """This state, observed again from its first step. `changed`: so has the code that the steps of all states run. Then all
        are observed again, and none has to pay for it: compiling them took longer.
        """
        if changed:
            self.solves = Solves()
        for signature, other in list(self.items()):
            if changed and other is not state:
                del self[signature]
        return state.afresh()

    def take_graph(self, state: Observing, graph: Graph, say: Say, solve: Solve) -> State:
        """See `after_observing`. Counts the seconds of a solve."""
        signature, began = self._of(state), times.current.now()
        after = after_observing(state, graph, say, solve)
        if isinstance(after, Running):
            self.solves.ended(signature, len(graph.ops), times.current.now() - began)
        return after

    def turned_out(self, state: Observing | Running, signature: Signature) -> bool:
        """A forward of this state is over, and had the calls of `signature`: maybe more or fewer than the state's own signature
        has. Returns whether its graph counts for this state. If not, the next such forward is observed.

        state: one that is observed, or whose plan the user gave.
        """
        expected = self._of(state)
        known = isinstance(state, Running) or bool(state.graphs)  # else no forward with the expected calls was observed
        if not expected or signature in ((), expected) or (known and goes_on_as(signature, expected)):
            return True
        if signature not in self and (not known or goes_on_as(expected, signature)):
            self[signature] = self.pop(expected)
            return True
        if signature not in self:
            self[signature] = self._begins(signature, 1)
        return False

    def waited(self, state: Waiting, graph: Graph) -> None:
        """A step of a signature that waits was recorded."""
        self.solves.recorded(self._of(state), len(graph.ops))

    def step_ended(self, state: State | None, planned: bool, measured_nbytes: int | None, budget_nbytes: int | None) -> None:
        """A step of this state is over, and the next state is in its place. `planned`: a plan was in force."""
        waited = isinstance(state, Waiting)
        if waited:
            self.solves.step_ended(False)
        else:
            self.solves.step_ended(True if planned else None)
        unplanned = self._unplanned if waited else state
        if measured_nbytes is not None and isinstance(unplanned, Failed) and not planned:
            unplanned.measured(measured_nbytes, budget_nbytes)

    def _of(self, state: State) -> Signature:
        return next((signature for signature, other in self.items() if other is state), ())

    def _borrowing(self, signature: Signature) -> State | None:
        lenders = [(s, state) for s, state in self._lenders() if state.has_room(times_larger(s, signature))]
        if not lenders:
            return self._stretched(signature, longer.NEAR)
        _, lender = min(lenders, key=lambda pair: elements(pair[0]))
        if self._wasted(signature, lender):
            return None
        return self._borrower(lender.lend())

    def _borrower(self, state: Running) -> Running:
        """The state, when there is room for it."""
        borrowers = [s for s, state in self.items() if isinstance(state, Running) and state.lender is not None]
        if len(borrowers) >= BORROWERS:
            del self[borrowers[0]]
        return state

    def _stretched(self, signature: Signature, most_times: float) -> State | None:
        """Under budget="min", a state that borrows the plan of a batch up to `most_times` smaller."""
        lent = longer.stretched(self._lenders(), signature, most_times) if self.smallest else None
        return None if lent is None else self._borrower(lent)

    def _lenders(self) -> list[tuple[Signature, Running]]:
        return [(s, state) for s, state in self._plans() if state.refused < _REFUSALS or state.refused < state.peaks.proofs]

    def _plans(self) -> list[tuple[Signature, Running]]:
        return [(s, state) for s, state in self._own() if isinstance(state, Running)]

    def _lasts(self, signature: Signature, state: Observing) -> bool:
        """Whether a signature that was to be observed for several steps did not come again before one like it had a plan."""
        if state.steps == 1 or state.early_known or state.for_early:
            return False
        return any(alike(s, signature) for s, _ in self._lenders())

    def _wasted(self, signature: Signature, lender: Running) -> bool:
        """Count a use of a plan that is too large. Returns whether this signature is to be observed instead."""
        planned_for = self._of(lender)
        if not planned_for or lender.program.empty or _LARGE * elements(signature) > elements(planned_for):
            return False
        lender.wasted += 1
        # an upper bound of the seconds that a use loses: all extra seconds of the plan, in proportion to the batch
        lost_seconds = lender.plan.predicted.seconds * elements(signature) / max(1, elements(planned_for))
        if lender.wasted < _PATIENCE or not self._may_plan or not self.solves.pays(lender.wasted * lost_seconds, signature):
            return False
        lender.wasted = 0
        return True

    def _own(self) -> list[tuple[Signature, State]]:
        """The states that do not borrow, the least recently used first."""
        return [(s, state) for s, state in self.items() if not (isinstance(state, Running) and state.lender is not None)]

    @property
    def _may_plan(self) -> bool:
        return self.solves.count < PLANS + self.forwards // _STEPS_A_PLAN

    def _observing(self, signature: Signature, steps: int, before: Waiting | None) -> State:
        """A state for a signature that no plan serves. It waits where no plan may be made now: eviction keeps its steps within
        the budget.
        """
        planned = [s for s, state in self._own() if isinstance(state, Running)]
        alone = before is not None and before.alone
        if self._may_plan and self.solves.allows(signature, planned, alone):
            return self._begins(signature, steps)
        far = None if alone else self._stretched(signature, longer.FAR)
        if far is not None:
            return far
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
        """Where there are too many states, forget the least recently used; `waiting`: among those that wait for a plan."""
        own = [(s, state) for s, state in self._own() if isinstance(state, Waiting) is waiting]
        if len(own) < PLANS:
            return
        signature, oldest = own[0]
        del self[signature]
        for s, state in list(self.items()):
            if isinstance(state, Running) and state.lender is oldest:
                del self[s]
