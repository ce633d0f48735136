"""Levels of differentiation that code of the forward opens: functorch's transforms, and forward-mode AD.

Under a transform of `torch.func` the recorder stays on: the transform's ops arrive below the transform, on plain tensors, and
are recorded as such. Tensors that autograd saves on a level belong to the transform, and stay as they are.

On a level of `torch.autograd.forward_ad` the recorder is off: under any dispatch mode torch uses other, out-of-place formulas
for tangents, whose gradients differ in their last bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.autograd import forward_ad

from lightning_memopt.record.seams import Listening, Seams
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import functorch_level

Told = Callable[[], None]


class _Listener(NamedTuple):
    """The listener to the levels of one thread.

    begins: called before the outermost level opens.
    ends: called after the outermost level has closed.
    thread: identity of the thread.
    """

    begins: Told
    ends: Told
    thread: int


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs in this thread."""
    return functorch_level() is not None


def in_dual_level() -> bool:
    """Whether a level of forward-mode AD is open; torch has one stack of them for all threads."""
    return forward_ad._current_level >= 0


def _enter(original: Any) -> Any:
    @uncompiled
    def enter_dual_level() -> int:
        if not in_dual_level():
            for listener in tuple(_seams.listeners):
                if listener.thread == threading.get_ident():
                    listener.begins()
        return original()

    return enter_dual_level


def _exit(original: Any) -> Any:
    @uncompiled
    def exit_dual_level(*, level: int | None = None) -> None:
        original(level=level)
        if not in_dual_level():
            for listener in reversed(tuple(_seams.listeners)):
                if listener.thread == threading.get_ident():
                    listener.ends()

    return exit_dual_level


_seams: Seams[_Listener] = Seams(
    lambda: [(forward_ad, "enter_dual_level", _enter), (forward_ad, "exit_dual_level", _exit)], stays=True
)


def around_dual_levels(begins: Told, ends: Told) -> Listening:
    """While this listens, `begins` is called before this thread opens a level of forward-mode AD, and `ends` after it has
    closed the outermost one.
    """
    return _seams, _Listener(begins, ends, threading.get_ident())
