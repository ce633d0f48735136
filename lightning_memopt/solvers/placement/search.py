"""The exact search (native/placement.cpp says how it works) and best-fit in C++. Both need a compiler."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from lightning_memopt import cxx
from lightning_memopt.solvers.placement.buffers import Ints, Problem
from lightning_memopt.solvers.placement.sections import Sections

_SOURCE = Path(__file__).parents[2] / "native" / "placement.cpp"
_lock = threading.Lock()


def available() -> bool:
    """Whether the library can be used. The first call builds it."""
    with _lock:
        return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(library(lambda line: None)))
    except (cxx.BuildError, OSError):
        return None


def library(say: Callable[[str], None]) -> Path:
    """The path of the library, which is built first if it is missing or damaged. Raises BuildError."""
    parts = (sys.platform, platform.machine(), hashlib.sha256(_SOURCE.read_bytes()).hexdigest())
    return cxx.library("placement", "the search for addresses", parts, _compile, say)


def _compile(compiler: str, target: Path) -> None:
    cxx.run([compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-w", str(_SOURCE), "-o", str(target)])


def _of(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def best_fit(problem: Problem, order: Ints) -> Ints:
    """As `best_fit.best_fit`. The library must be available."""
    library = _library()
    assert library is not None
    arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in (problem.lower, problem.upper, problem.size, order)]
    offsets = np.empty(len(problem), dtype=np.int64)
    library.memopt_best_fit(ctypes.c_int32(len(problem)), *map(_of, arrays), _of(offsets))
    return offsets


class Stop:
    """A flag that ends a search from another thread."""

    def __init__(self) -> None:
        self.value = ctypes.c_int32(0)

    def set(self) -> None:
        self.value.value = 1

    def __bool__(self) -> bool:
        return bool(self.value.value)


def search(sections: Sections, capacity: int, seconds: float, stop: Stop) -> tuple[Ints | None, bool]:
    """(offsets of shape (n,) within the capacity or None, whether that is certain). The library must be available.

    capacity: bytes.
    seconds: the search gives up after this time, or when `stop` is set.

    The search does not hold the interpreter's lock.
    """
    library = _library()
    assert library is not None
    nodes = ctypes.c_int64()
    offsets = np.zeros(len(sections.first), dtype=np.int64)
    code = library.memopt_search(
        *(ctypes.c_int32(len(sections.first)), _of(sections.first), _of(sections.last), _of(sections.size)),
        *(ctypes.c_int32(len(sections.load_nbytes)), ctypes.c_int64(capacity), ctypes.c_double(max(seconds, 0.0))),
        *(ctypes.byref(stop.value), _of(offsets), ctypes.byref(nodes)),
    )
    return (offsets if code == 1 else None), code >= 0
