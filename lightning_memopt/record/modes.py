"""A dispatch mode that disturbs neither compiled code nor other modes.

Torch's `with mode:` is for modes that nest: on exit it removes the topmost mode, whichever that is. A recorder is entered in a
forward and left when the step ends, and modes of the user (a FLOP counter) may begin and end in between in any order. So this
mode can be entered beneath the modes that are on, and is removed from any position in the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_memopt.torch_private import TorchDispatchMode, current_mode, current_modes, pop_mode, push_mode


class Outside(TorchDispatchMode):
    """A mode that sees only eager ops. Compiled code, and the bodies of operators like `cond` and `scan`, run as without it."""

    supports_higher_order_operators = True  # else torch raises an error when the model calls one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def enter_in(self, stack: ExitStack, beneath: bool = False) -> None:
        """`enter`, and leave when the stack is closed, even if the call or the exit is interrupted."""
        for _ in range(2):  # the second callback does nothing, unless the first was interrupted
            stack.callback(self.leave)
        self.enter(beneath)

    def enter(self, beneath: bool = False) -> None:
        """Begin to see ops: before the modes that are on see them, or after them if `beneath`. A mode that runs the ops itself
        (`sees_last`) always sees them after this one.
        """
        if beneath:
            on = current_modes()
            last = [mode for mode in on if getattr(mode, "sees_last", False)]
            _put_on([*last, self, *(mode for mode in on if mode not in last)])
        else:
            push_mode(self)

    def leave(self) -> None:
        """Stop seeing ops. Modes that were entered later stay on. May be repeated."""
        if current_mode() is self:
            pop_mode()
        elif self in (on := current_modes()):
            _put_on([mode for mode in on if mode is not self])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, ops of this thread are not seen; afterwards the mode is where it was."""
        on = current_modes()
        if self not in on:
            yield
            return
        self.leave()
        try:
            yield
        finally:
            _put_on(on)


def _put_on(modes: list[TorchDispatchMode]) -> None:
    """Make these the modes that are on, from the bottom up. An interrupt is raised only after that."""
    try:
        _stack(modes)
    except BaseException:
        _stack(modes)
        raise


def _stack(modes: list[TorchDispatchMode]) -> None:
    same = 0
    on = current_modes()
    while same < min(len(on), len(modes)) and on[same] is modes[same]:
        same += 1
    for _ in range(len(on) - same):
        pop_mode()
    for mode in modes[same:]:
        push_mode(mode)
