"""A dispatch mode that disturbs neither compiled code nor other modes.

Torch's `with mode:` is for modes that nest, and leaves the topmost one, whichever it is. Ours is entered in a forward and left
when the step ends: a mode of the user's (a counter of FLOPs) may begin before and end in between, or begin in between and stay.
So ours is put beneath those that are on, and taken from where it is.
"""

from __future__ import annotations

from contextlib import ExitStack

from lightning_memopt.torch_private import TorchDispatchMode, current_modes, pop_mode, push_mode


class Outside(TorchDispatchMode):
    """A mode that sees eager ops alone: compiled code, and what operators like `cond` and `scan` run, is as without it."""

    supports_higher_order_operators = True  # else torch raises where the model calls one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def enter_in(self, stack: ExitStack, beneath: bool = False) -> None:
        """`enter`, and leave when the stack is closed, whatever is interrupted."""
        for _ in range(2):  # the second does nothing, unless the first was interrupted
            stack.callback(self.leave)
        self.enter(beneath)

    def enter(self, beneath: bool = False) -> None:
        """Begin to see ops, before the modes that are on do or `beneath` them."""
        on = current_modes()
        _put_on([self, *on] if beneath else [*on, self])

    def leave(self) -> None:
        """See no more ops, whichever modes were entered since. May be repeated."""
        on = current_modes()
        if self in on:
            _put_on([mode for mode in on if mode is not self])


def _put_on(modes: list[TorchDispatchMode]) -> None:
    """Let these be the modes that are on, from the bottom up. Interrupted, it is done all the same."""
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
