"""What belongs to one step of a session: made anew when the step before it is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memopt.session.states import Running


@dataclass(eq=False)
class Step:
    """One step, as far as it has come.

    Args:
        began: whether a forward of it has begun.
        deviates: whether a forward of it ran other ops than its plan, with weights or with what has a gradient. Then no
            parameter is updated in its backward.
        plans: the states whose plans were in force in it: several where batches differ in shape.
    """

    began: bool = False
    deviates: bool = False
    plans: list[Running] = field(default_factory=list)

    @property
    def largest(self) -> Running | None:
        """The state of the plan that needs most: what was measured of the step is said of it."""
        return max(self.plans, key=lambda state: state.plan.predicted_peak_nbytes, default=None)

    def runs(self, state: Running) -> None:
        """A forward under the plan of this state begins."""
        if state not in self.plans:
            self.plans.append(state)

    def interrupted(self) -> None:
        """A forward of it raised: it may go on with another one."""
        self.began = False
        self.plans.clear()
