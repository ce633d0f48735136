"""Exceptions of signal handlers that land inside a destructor or a weak reference's callback, where Python drops them.

They are kept and raised at the next forward or request of backward, or when the session closes, so that Ctrl-C is never lost.
Python reports what it drops to `sys.unraisablehook`; while a session is open, ours picks out what came from this package.
"""

from __future__ import annotations

import sys
from typing import Any

_deferred: list[BaseException] = []
_previous: list[Any] = []


def raise_deferred() -> None:
    """Raise what was kept, if anything was."""
    if _deferred:
        raise _deferred.pop()


def _hook(unraisable: Any) -> None:
    error, source = unraisable.exc_value, getattr(unraisable.object, "func", unraisable.object)  # a callback may be a partial
    if error is not None and (getattr(source, "__module__", None) or "").startswith("lightning_memopt"):
        _deferred.append(error.with_traceback(None))  # a traceback would keep the frames it came through alive
    elif _previous:
        _previous[-1](unraisable)


def watch() -> None:
    """Start to pick up what Python would drop. Calls nest."""
    _previous.append(sys.unraisablehook)
    sys.unraisablehook = _hook


def unwatch() -> None:
    """End what `watch` began."""
    if _previous:
        previous = _previous.pop()
        if sys.unraisablehook is _hook:
            sys.unraisablehook = previous


def settle() -> None:
    """Raise what was kept, unless another exception is on its way."""
    if sys.exc_info()[0] is None:
        raise_deferred()
    _deferred.clear()
