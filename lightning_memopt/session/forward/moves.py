"""Moves: calls of modules that no backward follows, although gradients are on. Agents make them, a few or thousands before each
update, and a forward that each of them began, or that all of them were parts of, would be recorded for nothing.

What a move saved is let go of before a backward begins. Calls of the same module, with arguments of the same shapes, are taken
for moves from then on.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from lightning_memopt.session.forward.recording import Recording
from lightning_memopt.session.forward.shapes import Signature

_TIMES = 3
"""Number of calls of one signature, let go of between two updates, after which others of it are moves. A target network's call
for a batch is let go of, too, once a step, and the training call may have the same signature.
"""


class Moves:
    """The signatures of moves. If a step then has no forward at all, training calls have these signatures, too: all calls may
    begin forwards again, for ever.
    """

    def __init__(self) -> None:
        self._known = set[Signature]()
        self._let_go = Counter[Signature]()
        self._skipped = self._wrong = False

    def skip(self, call: Signature) -> bool:
        """Whether the call that begins is a move."""
        if not self.know(call):
            return False
        self._skipped = True
        return True

    def know(self, call: Signature) -> bool:
        """Whether calls of this signature are moves."""
        return call in self._known

    def let_go(self, call: Signature) -> None:
        """Autograd has let go of all that a call saved, before any backward."""
        self._let_go[call] += 1
        if self._let_go[call] == _TIMES and not self._wrong:
            self._known.add(call)

    def step_ended(self, trained: bool) -> None:
        """A step is over. `trained`: a call has begun a forward in it."""
        if self._skipped and not trained:
            self._wrong = True
            self._known.clear()
        self._skipped = False
        self._let_go.clear()


class _Call(NamedTuple):
    """A part of an open forward, up to the next call: the id of its first version, and whether autograd held any of it then."""

    signature: Signature
    first: int
    saved: bool = False


class Calls:
    """The calls that an open forward consists of so far, in their order, without moves at its beginning.

    saved: any of them has saved tensors.
    """

    def __init__(self, moves: Moves) -> None:
        self.saved = False
        self._moves = moves
        self._calls: list[_Call] = []

    def begins(self, call: Signature, recording: Recording) -> None:
        """A call begins."""
        self._calls.append(_Call(call, recording.recorder.next_id))

    def ended(self, recording: Recording) -> None:
        """The last call has ended."""
        self.saved = self.saved or recording.is_saved

    def let_go(self) -> None:
        """Autograd has let go of all that was saved."""
        for call in self._calls:
            self._moves.let_go(call.signature)

    def are_moves(self, recording: Recording) -> bool:
        """Before another call: whether there were only moves. The last one may still be held."""
        calls, last = self._calls, self._calls[-1]
        calls[-1] = last._replace(saved=recording.saves_any(range(last.first, recording.recorder.next_id)))
        while len(calls) > 1 and calls[0].saved and not recording.saves_any(range(calls[0].first, calls[1].first)):
            self._moves.let_go(calls.pop(0).signature)
        return all(self._moves.know(call.signature) for call in calls)

    def clear(self) -> None:
        """The forward is over."""
        self._calls.clear()
        self.saved = False
