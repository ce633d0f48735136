"""Which of the plan's events have come: requests and releases of handles, in the order that was observed."""

from __future__ import annotations

from typing import NamedTuple

from lightning_memopt.runtime.engine.cursor import Cursor
from lightning_memopt.runtime.engine.program import Program

Event = tuple[str, int, int]
"""(kind, save, how often it came before)."""


class Turn(NamedTuple):
    """An event that came.

    planned: whether the plan says what is done at it.
    passed: events before it that did not come: their saves were not packed in this step.
    moved: whether the plan has come further.
    """

    planned: bool
    passed: tuple[Event, ...] = ()
    moved: bool = True


_NEXT = Turn(planned=True)
_NOT_PLANNED = Turn(planned=False, moved=False)
_STAYS = Turn(planned=True, moved=False)


class Turns:
    """The events of one backward.

    packed: saves that were packed in this step.
    next: index in `Program.events` of the event that comes next.
    """

    def __init__(self, program: Program, cursor: Cursor) -> None:
        self.packed: set[int] = set()
        self.next = 0
        self._program = program
        self._cursor = cursor

    @property
    def point(self) -> int:
        """Where on the graph's axis the last event is."""
        return self._program.event_points[self.next - 1]

    def take(self, event: Event, in_forward: bool) -> Turn:
        """An event has come. Notices where backward goes astray: from then on nothing goes that cannot be made again.

        Saves that were not packed in this step are passed over, as if they were asked for and let go in their turn. A save
        that was packed, and is still to come, lets go of nothing before.
        """
        if in_forward and self._comes_early(event):
            self._cursor.goes_astray()
            return _NOT_PLANNED
        events, first = self._program.events, self.next
        if first < len(events) and events[first] == event:
            self.next += 1
            return _NEXT
        at = self._program.turns.get(event, -1)
        passed = events[first : max(at, 0)]
        segments = self._program.segments
        unpacks = event[0] == "unpack"
        missed = not unpacks and any(kind == "unpack" and (save, n) in segments for kind, save, n in passed)
        if at < first or missed or any(save in self.packed for _, save, _ in passed):
            self._cursor.goes_astray()
        if at < first:
            return _STAYS
        self.next = at + 1
        return Turn(planned=True, passed=tuple(other for other in passed if other[1] not in self.packed))

    def _comes_early(self, event: Event) -> bool:
        """Whether the forward has yet to pack saves that the plan has asked for, or let go, by this event. Autograd asks, or
        lets go of a graph, in the middle of the forward, and the plan knows nothing of that.
        """
        saves, upto = self._program.graph.saves, self._program.turns.get(event, -1) + 1
        return any(saves[save].op >= self._cursor.position for _, save, _ in self._program.events[self.next : upto])
