"""The data of one step of a session. Each step has a new object."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memopt.session.history import StepKind
from lightning_memopt.session.judge.states import Running


@dataclass(eq=False)
class Step:
    """One step until now.

    Args:
        began: whether a forward of it has begun.
        is_nested: whether that was inside a backward: of another model, or of the process that this one was forked from.
        deviates: whether a forward of it ran ops that its plan does not have, on weights or on tensors with a gradient. Then
            it updates no parameter early.
        plans: the states whose plans were in force in it; several where batches differ in shape.
    """

    began: bool = False
    is_nested: bool = False
    deviates: bool = False
    plans: list[Running] = field(default_factory=list)

    @property
    def largest(self) -> Running | None:
        """The state whose plan has the largest predicted peak: the measured peak of the step is compared with it. Of a batch
        that borrows a plan and the one that the plan was made for, it is the latter.
        """
        if len(self.plans) == 1:
            return self.plans[0]
        return max(self.plans, key=lambda state: (state.plan.predicted_peak_nbytes, state.lender is None), default=None)

    def outcome(self, observed: bool) -> tuple[StepKind, int | None]:
        """The kind of the step that is over, and the peak that was predicted for it. `observed`: it was recorded."""
        largest = self.largest
        if observed or largest is None:
            return "observed" if observed else "unplanned", None
        return "planned", largest.plan.predicted.needed_nbytes

    def runs(self, state: Running) -> None:
        """A forward under the plan of this state begins."""
        if state not in self.plans:
            self.plans.append(state)

    def interrupted(self) -> None:
        """A forward of the step raised. The step may go on with another forward."""
        self.began = False
        self.plans.clear()
