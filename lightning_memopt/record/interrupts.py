"""Exceptions of signal handlers that land inside a destructor or a weak reference's callback, where Python drops them.

They are kept and raised at the next forward or request of backward, or when the session closes, so that Ctrl-C is never lost.
Python reports the exceptions that it drops to `sys.unraisablehook`. While a session is open, a hook of this package picks out
those from this package. Several sessions may be open at once and close in any order, and other code may replace the hook
meanwhile. So each `_Hook` keeps its predecessor for good, and no chain of hooks leads back to itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

DEFERRED: list[BaseException] = []
"""The exceptions that are kept."""
_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions that are open."""


def raise_deferred() -> None:
    """Raise a kept exception, if there is any."""
    if DEFERRED:
        raise DEFERRED.pop()


class _Hook:
    """The value of `sys.unraisablehook` while a session is open.

    previous: the hook that was there before.
    """

    def __init__(self, previous: Callable[[Any], Any]) -> None:
        self.previous = previous

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        source = getattr(unraisable.object, "func", unraisable.object)  # a callback may be a partial
        ours = (getattr(source, "__module__", None) or "").startswith("lightning_memopt")
        # whose finalizer it is is not known any more
        ours = ours or (isinstance(source, weakref.finalize) and isinstance(error, KeyboardInterrupt))
        if _open and error is not None and ours:
            DEFERRED.append(error.with_traceback(None))  # a traceback would keep its frames alive
        else:
            self.previous(unraisable)


def watch(session: object) -> None:
    """Start to keep exceptions that Python would drop, until `unwatch` of the same session."""
    _open.add(session)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def unwatch(session: object) -> None:
    """Called when the session is closed. The last session restores the hook, unless other code has replaced it. May be
    repeated.
    """
    _open.discard(session)
    if not _open and isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = sys.unraisablehook.previous


def settle() -> None:
    """Raise a kept exception, unless another one is being handled. Drop the others."""
    if sys.exc_info()[0] is None:
        raise_deferred()
    DEFERRED.clear()
