"""The objects of some classes that Python's garbage collector knows, in all of the process."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

_ALONE_SECONDS = 0.5
"""So long no other thread runs: half a second is enough to look at some million objects."""


def live_objects(wanted: Callable[[type], bool]) -> list[Any]:
    """All objects of the wanted classes. Not by `isinstance`, which asks the object: lazy ones would be initialised by that.

    `gc.get_objects` refers to every object, also to a tuple that another thread is just filling. Python raises SystemError in
    that thread if it goes on meanwhile, for it cannot resize a tuple that somebody has. So no other thread goes on until the
    list is gone.
    """
    known: dict[type, bool] = {}

    def is_wanted(kind: type) -> bool:
        if kind not in known:
            known[kind] = wanted(kind)
        return known[kind]

    before = sys.getswitchinterval()
    sys.setswitchinterval(_ALONE_SECONDS)
    try:
        time.sleep(0)  # threads that have waited for their turn have it now: they waited with the interval of before
        return [o for o in gc.get_objects() if is_wanted(type(o))]
    finally:
        sys.setswitchinterval(before)
