"""What is to be undone, as a list of calls. A step undoes twenty things, and `contextlib.ExitStack` calls eight functions of
Python for each.
"""

from __future__ import annotations

from collections.abc import Callable

Calls = list[Callable[[], object]]


def undo(calls: Calls) -> None:
    """Make all calls, the last one first; the list is empty afterwards. One that raises, or is interrupted, is made once more,
    and the others are made all the same: each must be repeatable.
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
