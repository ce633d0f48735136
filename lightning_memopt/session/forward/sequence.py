"""The calls of the model in one forward: all of a step up to a backward. Together they have one graph, one plan, one signature.

How many calls follow is not known when the first one begins. So a forward is expected to be like those of the last steps, and
gets their plan. A call that comes in addition runs under a plan as if it began a forward; later forwards are expected to have
it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from lightning_memopt.runtime import PlannedEngine
from lightning_memopt.runtime.engine.cursor import Cursor
from lightning_memopt.session.forward.shapes import NEXT, Signature, alike, followed_by, goes_on_as

_LAST = 16
"""A forward is expected to be like the longest of this many earlier ones. A shorter one takes less than its plan says."""
_REMEMBERED = 64
"""Maximum number of first calls of which is remembered what followed."""
_Place = tuple[int, Signature]
"""(how many forwards of the step came before, the first call)."""


class Sequence:
    """The present forward, and what followed its first call in earlier ones.

    now: the signature of its calls so far that run under one plan; () where none has begun.
    expected: the signature of the calls that it is expected to have.
    last: the signature of all calls of the forward before.
    engine: gives the engine of the last call; None where that had none.
    """

    def __init__(self) -> None:
        self.now: Signature = ()
        self.last: Signature = ()
        self._first: Signature = ()
        self._all: Signature = ()  # the calls of the present forward
        self.expected: Signature = ()
        self.engine: Callable[[], PlannedEngine | None] | None = None
        self._cursor: Cursor | None = None  # of an engine that autograd holds handles of
        self._before = 0  # forwards of this step
        self._seen: dict[_Place, deque[Signature]] = {}

    @property
    def is_first(self) -> bool:
        """Whether the present forward is the first one of its step."""
        return bool(self.now) and not self._before

    def ran(self, engine: PlannedEngine) -> None:
        """A call ran under a plan. An engine without handles holds nothing; autograd says how long the others live."""
        held = bool(engine.turns.packed)
        self.engine = weakref.ref(engine) if held else lambda: engine
        self._cursor = engine.cursor if held else None

    @property
    def is_waiting(self) -> bool:
        """Whether the last call, under a plan, has surely had no backward."""
        return self._cursor is not None and not self._cursor.asked

    def begins(self, call: Signature, no_backward: bool = False) -> Signature:
        """A forward begins with this call. Returns the signature of the calls that it is expected to have. `no_backward`: the
        one before it has had none. Where autograd has let go of that (a move of an agent), it counts for nothing; else this
        call follows those that were expected.
        """
        is_held = self.is_waiting and self.engine is not None and self.engine() is not None  # autograd holds what it has saved
        self.engine = self._cursor = None
        if no_backward and not is_held:
            self.given_up()
        if is_held:
            self._all = followed_by(self._all, call)
        else:
            self.ended()
            self._all = self._first = call
        self.now = call
        self.expected = self._expectation(call)
        return self.expected

    def expects(self, call: Signature) -> bool:
        """Whether this call is expected to come next in the present forward."""
        return bool(self.now) and goes_on_as(followed_by(self.now, call), self.expected)

    def goes_on(self, call: Signature) -> None:
        """This call is the next one of the present forward."""
        self.now, self._all = followed_by(self.now, call), followed_by(self._all, call)

    def ended(self) -> None:
        """The forward is over, if there is one."""
        first, self.last = self._first, self._all
        if not self.last:
            return
        place = self._before, first
        if self.last != first or (self._seen and any(call == first for _, call in self._seen)):
            self._seen[place] = seen = self._seen.pop(place, deque(maxlen=_LAST))
            seen.append(self.last)
            if len(self._seen) > _REMEMBERED:
                del self._seen[next(iter(self._seen))]
        self._before += 1
        self.now = self._all = ()

    def given_up(self) -> None:
        """The forward is given up, because one of its calls raised."""
        self.now = self._all = ()

    def step_ended(self) -> None:
        """The step is over, and with it a forward."""
        self.ended()
        self.engine = self._cursor = None
        self._before = 0

    def _expectation(self, call: Signature) -> Signature:
        for before in range(self._before, -1, -1):
            if (seen := self._seen.get((before, call))) is not None:
                return max(seen, key=len)
        for (_, first), seen in reversed(self._seen.items()):  # a batch of another size: alike calls may follow
            times = seen[-1].count(NEXT)
            if alike(first, call) and seen[-1] == first + times * (NEXT, *first[2:]):
                return call + times * (NEXT, *call[2:])
        return call
