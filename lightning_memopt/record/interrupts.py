"""Exceptions of signal handlers that land inside a destructor or a weak reference's callback, where Python drops them.

They are kept and raised at the next forward or request of backward, or when the session closes, so that Ctrl-C is never lost.
Python reports what it drops to `sys.unraisablehook`; while a session is open, ours picks out what came from this package.
Sessions may be open at once and close in any order, and others may replace the hook meanwhile: each hook of ours knows its own
predecessor for good, so that none can come before itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

_deferred: list[BaseException] = []
_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions that watch."""


def raise_deferred() -> None:
    """Raise what was kept, if anything was."""
    if _deferred:
        raise _deferred.pop()


class _Hook:
    """What stands in `sys.unraisablehook` while a session is open; `previous` stood there before."""

    def __init__(self, previous: Callable[[Any], Any]) -> None:
        self.previous = previous

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        source = getattr(unraisable.object, "func", unraisable.object)  # a callback may be a partial
        if _open and error is not None and (getattr(source, "__module__", None) or "").startswith("lightning_memopt"):
            _deferred.append(error.with_traceback(None))  # a traceback would keep the frames it came through alive
        else:
            self.previous(unraisable)


def watch(session: object) -> None:
    """Start to pick up what Python would drop, until `unwatch` of the same session."""
    _open.add(session)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def unwatch(session: object) -> None:
    """End what `watch` began; the last session puts the hook back, unless somebody else has replaced ours. May be repeated."""
    _open.discard(session)
    if not _open and isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = sys.unraisablehook.previous


def settle() -> None:
    """Raise what was kept, unless another exception is on its way."""
    if sys.exc_info()[0] is None:
        raise_deferred()
    _deferred.clear()
