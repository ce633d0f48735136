"""Levels of differentiation that code of the forward opens: functorch's transforms, and forward-mode AD.

Under a transform of `torch.func` we push and pop nothing: its ops arrive below it, on plain tensors, and are recorded as such.
What autograd saves on a level is the transform's own, and stays as it is.

On a level of `torch.autograd.forward_ad` the recorder is not entered at all. Under any dispatch mode torch takes other, out of
place, formulas for tangents, whose gradients differ in their last bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import forward_ad

from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import functorch_level

Told = Callable[[], None]
_lock = threading.Lock()
_told: list[tuple[Told, Told, int]] = []
_originals: list[tuple[str, Any]] = []


def in_transform() -> bool:
    """Whether a transform of `torch.func` is under way in this thread."""
    return functorch_level() is not None


def in_dual_level() -> bool:
    """Whether a level of forward-mode AD is open; torch has one stack of them for all threads."""
    return forward_ad._current_level >= 0


def _enter(original: Any) -> Any:
    @uncompiled
    def enter_dual_level() -> int:
        outermost = not in_dual_level()
        if outermost:
            for begins, _, thread in tuple(_told):
                if thread == threading.get_ident():
                    begins()
        return original()

    return enter_dual_level


def _exit(original: Any) -> Any:
    @uncompiled
    def exit_dual_level(*, level: int | None = None) -> None:
        original(level=level)
        if not in_dual_level():
            for _, ends, thread in reversed(tuple(_told)):
                if thread == threading.get_ident():
                    ends()

    return exit_dual_level


def _install() -> None:
    for name, wrap in (("enter_dual_level", _enter), ("exit_dual_level", _exit)):
        original = getattr(forward_ad, name)
        _originals.append((name, original))
        setattr(forward_ad, name, wrap(original))


def _restore() -> None:
    while _originals:
        setattr(forward_ad, *_originals[-1])
        _originals.pop()


@contextlib.contextmanager
def around_dual_levels(begins: Told, ends: Told) -> Iterator[None]:
    """Call `begins` before this thread opens a level of forward-mode AD and `ends` after it has closed the outermost one."""
    told = begins, ends, threading.get_ident()
    try:
        with _lock:
            _told.append(told)
            if len(_told) == 1:
                _install()
        yield
    finally:
        with _lock:
            if told in _told:
                _told.remove(told)
            if not _told:
                try:
                    _restore()
                finally:
                    _restore()  # does nothing, unless the first was interrupted
