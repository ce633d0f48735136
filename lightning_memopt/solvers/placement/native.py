"""Best-fit and the search in C++ (native/placement.cpp), where a compiler is there; the same results as in Python, sooner."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np

from lightning_memopt import cxx
from lightning_memopt.solvers.placement.buffers import Ints, Problem
from lightning_memopt.solvers.placement.sections import Sections

_FOLDER = Path(__file__).parents[2] / "native"
_SOURCE = _FOLDER / "placement.cpp"
_HEADER = _FOLDER / "placement_state.h"
_lock = threading.Lock()


def available() -> bool:
    """Whether the library is there; the first call builds it."""
    with _lock:
        return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    parts = (sys.platform, platform.machine(), hashlib.sha256(_SOURCE.read_bytes() + _HEADER.read_bytes()).hexdigest())
    try:
        return ctypes.CDLL(str(cxx.library("placement", parts, _compile, lambda: None)))
    except (cxx.BuildError, OSError):
        return None  # the Python code does the same


def _compile(compiler: str, target: Path) -> None:
    # -ffp-contract=off: scores are the same doubles as Python's
    cxx.run([compiler, *("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w"), str(_SOURCE), "-o", str(target)])


def _of(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def best_fit(problem: Problem, order: Ints, fixed: Ints | None = None) -> Ints:
    """As `best_fit.best_fit`. The library is available."""
    library = _library()
    assert library is not None
    arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in (problem.lower, problem.upper, problem.size, order)]
    offsets = np.full(len(problem), -1, dtype=np.int64) if fixed is None else fixed.astype(np.int64)
    library.memopt_best_fit(ctypes.c_int32(len(problem)), ctypes.c_int32(len(order)), *map(_of, arrays), _of(offsets))
    return offsets


class Stop:
    """A flag that ends searches from another thread."""

    def __init__(self) -> None:
        self.value = ctypes.c_int32(0)

    def set(self) -> None:
        self.value.value = 1

    def __bool__(self) -> bool:
        return bool(self.value.value)


def search(
    sections: Sections, capacity: int, *, seed: int, nodes_a_try: int, most_nodes: int, seconds: float, stop: Stop
) -> tuple[Ints | None, bool, int]:
    """As `search.search`, without the interpreter's lock. The library is available."""
    library = _library()
    assert library is not None
    s, nodes = sections, ctypes.c_int64()
    offsets = np.zeros(len(s.first), dtype=np.int64)
    code = library.memopt_search(
        *(ctypes.c_int32(len(s.first)), _of(s.first), _of(s.last), _of(s.size), _of(s.twin)),
        *(ctypes.c_int32(len(s.load_nbytes)), _of(s.load_nbytes), ctypes.c_int64(capacity)),
        *(ctypes.c_uint64(seed), ctypes.c_int64(nodes_a_try), ctypes.c_int64(most_nodes), ctypes.c_double(max(seconds, 0.0))),
        *(ctypes.byref(stop.value), _of(offsets), ctypes.byref(nodes)),
    )
    return (offsets if code == 1 else None), code >= 0, nodes.value
