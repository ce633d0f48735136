"""Find all objects of some classes that Python's garbage collector knows in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import chain, compress, groupby, starmap
from types import CellType, FunctionType, GetSetDescriptorType, WrapperDescriptorType
from typing import Any

_COMMON = (tuple, dict, list, set, type, FunctionType, CellType, GetSetDescriptorType, WrapperDescriptorType)
"""Most objects are of these classes. Tuples must be among them: see `live_objects`."""


def live_objects(wanted: Callable[[type], bool]) -> list[Any]:
    """All objects of the wanted classes. Does not use `isinstance`, which asks the object and would initialise lazy ones.

    `gc.get_objects` refers to every object, including a tuple that another thread is just filling. If that thread runs
    meanwhile, Python raises SystemError in it, because it cannot resize a tuple that something else refers to. So we refer to
    no tuple while another thread may run: one call of C code gets all objects, goes through them in runs of one class, and
    drops the runs whose class is common and not wanted.
    """
    nothing = {kind: () for kind in _COMMON if not wanted(kind)}
    or_nothing: Callable[..., Iterable[Any]] = nothing.get  # (class, run of objects) -> the run, or nothing
    every = chain.from_iterable(map(gc.get_objects, (None,)))
    rest = list(chain.from_iterable(starmap(or_nothing, groupby(every, type))))
    return list(compress(rest, map(_Answers(wanted).__getitem__, map(type, rest))))


class _Answers(dict[type, bool]):
    """Class -> what `wanted` returns for it, called once per class, so that C code can go through the objects."""

    def __init__(self, wanted: Callable[[type], bool]) -> None:
        self._wanted = wanted

    def __missing__(self, kind: type) -> bool:
        answer = self[kind] = self._wanted(kind)
        return answer
