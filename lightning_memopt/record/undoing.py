"""A list of calls that undo something: a fast `contextlib.ExitStack`, which makes eight Python calls for each of its callbacks.
A step undoes twenty things.
"""

from __future__ import annotations

from collections.abc import Callable

Calls = list[Callable[[], object]]


def undo(calls: Calls) -> None:
    """Make all calls, the last one first, and empty the list. A call that raises, or is interrupted, is made once more, and the
    others are still made. So each call must be repeatable.
    """
    try:
        while calls:
            calls[-1]()
            del calls[-1]
    except BaseException:
        if calls:
            call = calls.pop()
            try:
                call()
            finally:
                undo(calls)
        raise
