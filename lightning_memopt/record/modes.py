"""A dispatch mode that disturbs neither compiled code nor other modes.

Torch's own `__enter__` and `__exit__` are for modes that nest, and leave the topmost one, whichever it is. Ours is entered in a
forward and left when the step ends: a mode of the user's (a counter of FLOPs) may begin before and end in between, or begin in
between and stay. So ours is put beneath those that are on, and taken from where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class Outside(TorchDispatchMode):
    """A mode that sees eager ops alone: compiled code, and what operators like `cond` and `scan` run, is as without it."""

    supports_higher_order_operators = True  # else torch raises where the model calls one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *_: Any) -> None:
        stack = _get_current_dispatch_mode_stack()
        if self in stack:
            with _lifted(len(stack) - 1 - stack.index(self)):
                _pop_mode()

    @contextmanager
    def beneath(self) -> Iterator[None]:
        """As `with self`, beneath the modes that are on."""
        with _lifted(len(_get_current_dispatch_mode_stack())):
            _push_mode(self)
        try:
            yield
        finally:
            self.__exit__()


@contextmanager
def _lifted(count: int) -> Iterator[None]:
    """Without the topmost modes, of which there are so many."""
    modes: list[TorchDispatchMode] = []
    try:
        while len(modes) < count:
            modes.append(_pop_mode())
        yield
    finally:
        while modes:
            _push_mode(modes.pop())
