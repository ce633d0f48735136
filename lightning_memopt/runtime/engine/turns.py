"""Which of the plan's events have come in backward. Events are unpacks and releases of handles, in the observed order."""

from __future__ import annotations

from typing import NamedTuple

from lightning_memopt.runtime.engine.cursor import Cursor
from lightning_memopt.runtime.engine.program import Program

Event = tuple[str, int, int]
"""(kind, save, number of earlier events of this kind for this save)."""


class Turn(NamedTuple):
    """What `Turns.take` returns for an event.

    planned: whether to do what the plan does at the event.
    passed: earlier events that will not come, because their saves were not packed in this step.
    """

    planned: bool
    passed: tuple[Event, ...] = ()


_PLANNED = Turn(planned=True)
_NOT_PLANNED = Turn(planned=False)


class Turns:
    """The events of one backward.

    packed: saves that were packed in this step.
    """

    def __init__(self, program: Program, cursor: Cursor, packed: set[int]) -> None:
        self.packed = packed
        self._program = program
        self._cursor = cursor

    @property
    def point(self) -> int:
        """The point of the graph of the last event."""
        return self._program.event_points[self._cursor.turn - 1]

    def take(self, event: Event, in_forward: bool) -> Turn:
        """An event has come. If it is out of order, note that in the deviation. From then on only tensors that can be rebuilt
        are dropped.

        Events of saves that were not packed in this step are passed over as if they had come. Events of saves that were
        packed are not, because they may still come. In a forward that has deviated, every event is out of order, because the
        position may be that of a much earlier op.
        """
        if in_forward and (not self._cursor.deviation.aside or self._comes_early(event)):
            self._cursor.deviate_in_backward()
            return _NOT_PLANNED
        events, first = self._program.events, self._cursor.turn
        if first < len(events) and events[first] == event:
            self._cursor.turn += 1
            return _PLANNED
        turn = self._program.turns.get(event, -1)
        passed = events[first : max(turn, 0)]
        segments = self._program.segments
        unpacks = event[0] == "unpack"
        missed = not unpacks and any(kind == "unpack" and (save, n) in segments for kind, save, n in passed)
        if turn < first or missed or any(save in self.packed for _, save, _ in passed):
            self._cursor.deviate_in_backward()
        if turn < first:
            return _PLANNED
        self._cursor.turn = turn + 1
        skipped = [other for other in passed if other[1] not in self.packed]
        return Turn(planned=True, passed=tuple(skipped)) if skipped else _PLANNED

    def _comes_early(self, event: Event) -> bool:
        """Whether this event, or one planned before it, is for a save that the forward has not packed yet. Then autograd
        unpacks a save, or releases a graph, within the forward, and the plan does not know of that.
        """
        saves, upto = self._program.graph.saves, self._program.turns.get(event, -1) + 1
        before = (save for _, save, _ in self._program.events[self._cursor.turn : upto] if save not in self.packed)
        return any(saves[save].op >= self._cursor.position for save in before)
