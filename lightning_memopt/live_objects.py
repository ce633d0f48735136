"""The objects of some classes that Python's garbage collector knows, in all of the process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import chain, compress, groupby, starmap
from types import CellType, FunctionType, GetSetDescriptorType, WrapperDescriptorType
from typing import Any

_COMMON = (tuple, dict, list, set, type, FunctionType, CellType, GetSetDescriptorType, WrapperDescriptorType)
"""Most objects are of these classes. Tuples must be among them: see `live_objects`."""


def live_objects(wanted: Callable[[type], bool]) -> list[Any]:
    """All objects of the wanted classes. Not by `isinstance`, which asks the object: lazy ones would be initialised by that.

    `gc.get_objects` refers to every object, also to a tuple that another thread is just filling. Python raises SystemError in
    that thread if it goes on meanwhile, for it cannot resize a tuple that somebody has. So we hold no tuple while another
    thread may run: one call of C code looks up all objects, goes through them in runs of one class, and leaves out the runs
    whose class is common and not wanted.
    """
    nothing = {kind: () for kind in _COMMON if not wanted(kind)}
    or_nothing: Callable[..., Iterable[Any]] = nothing.get  # (class, run of objects) -> the run, or nothing
    every = chain.from_iterable(map(gc.get_objects, (None,)))
    rest = list(chain.from_iterable(starmap(or_nothing, groupby(every, type))))
    return list(compress(rest, map(_Answers(wanted).__getitem__, map(type, rest))))


class _Answers(dict[type, bool]):
    """What `wanted` says of each class: asked once, so that the objects are gone through in C."""

    def __init__(self, wanted: Callable[[type], bool]) -> None:
        self._wanted = wanted

    def __missing__(self, kind: type) -> bool:
        answer = self[kind] = self._wanted(kind)
        return answer
