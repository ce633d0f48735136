"""Steps that take more than their plan predicted come again: in a row where the step has changed, or now and then."""

from __future__ import annotations


class Recurring:
    """When such a step was measured, and when the next one is due.

    since: how many steps ago the last one was measured; None where none was.
    due: in how many steps the next one is to be observed; 0 where that is not known.
    """

    def __init__(self) -> None:
        self.since: int | None = None
        self.due = 0

    def step_ended(self) -> bool:
        """A step is over. Returns whether the next step is one to observe."""
        if self.since is not None:
            self.since += 1
        if not self.due:
            return False
        self.due -= 1
        return self.due == 0

    def again(self, ahead: int) -> bool | None:
        """The step that has just ended is one. Returns whether the next step is one to observe; None for the first of them. The
        next one is taken to come as many steps later as this one came after the last. `ahead`: how many steps before it
        observing begins.
        """
        before, self.since = self.since, 0
        if before is None:
            return None
        self.due = max(0, before - ahead)
        return self.due == 0
