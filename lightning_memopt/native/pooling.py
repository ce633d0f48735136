"""The Python side of the planned pool. lane.h says what it guarantees."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

from lightning_memopt.native.counting import Counter, Window, counter


@dataclass(frozen=True)
class Counts:
    """How the requests of a window were served. Bytes are those of all of these requests, live or not.

    served: requests that got their planned address.
    outside: requests that the plan leaves to the ordinary allocator, and up to 16 unplanned ones at the end of the step, which
        are taken for the next step's batch, of another shape.
    differs: unplanned requests: of another size than planned, or extra ones.
    occupied: requests whose planned range had a live buffer.
    skipped: planned requests that did not come.
    other_threads: requests of threads other than the one that began the window.
    """

    served: int = 0
    served_nbytes: int = 0
    outside: int = 0
    outside_nbytes: int = 0
    differs: int = 0
    differs_nbytes: int = 0
    occupied: int = 0
    occupied_nbytes: int = 0
    skipped: int = 0
    other_threads: int = 0
    other_threads_nbytes: int = 0

    @property
    def fallen(self) -> int:
        """Requests that fell through to the ordinary allocator: unplanned ones, and planned ones whose address was not free."""
        return self.differs + self.occupied

    @property
    def fallen_nbytes(self) -> int:
        return self.differs_nbytes + self.occupied_nbytes

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


_INTEGER, _POINTER = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "log": (None, ()),
    "log_ends": (None, ()),
    "logged": (_INTEGER, ()),
    "read": (None, (_INTEGER, _POINTER)),
    "add": (_INTEGER, (_INTEGER, _POINTER, _POINTER)),
    "remove": (None, (_INTEGER,)),
    "begin": (_INTEGER, (_INTEGER, _INTEGER)),
    "end": (None, (ctypes.c_int,)),
    "counts": (None, (_POINTER,)),
    "arenas": (None, (_POINTER,)),
}
"""Name of an exported function, without its prefix -> (type of its result, types of its arguments)."""


class Peak(Protocol):
    """A window of the allocator's counter that measures the maximum bytes outside of the arenas."""

    @property
    def peak_nbytes(self) -> int: ...
    def reset(self) -> int: ...
    def close(self) -> None: ...


class Lane(ABC):
    """One sequence of requests, its log and its planned windows: the functions of lane.h.

    library, prefix: the library with its exported functions, and the prefix of their names.
    leading: the first arguments of each function.
    """

    def __init__(self, library: ctypes.CDLL, prefix: str, leading: tuple[int, ...] = ()) -> None:
        self._call: dict[str, Any] = {}
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, f"{prefix}_{name}")
            function.restype, function.argtypes = result, (*(ctypes.c_int32 for _ in leading), *arguments)
            self._call[name] = partial(function, *leading)

    @property
    @abstractmethod
    def live_nbytes(self) -> int:
        """All counted bytes that are live now, of the process or of the device."""

    def others_nbytes(self) -> int:
        """Maximum bytes of other lanes that are live at one moment of a step, and that `live_nbytes` leaves out."""
        return 0

    @abstractmethod
    def outside_window(self) -> Peak | None:
        """A new window that measures the peak of all bytes outside of the arenas; None if too many are open."""

    def log(self) -> None:
        """Begin a log, and a window in which requests are logged. Forgets the previous log."""
        self._call["log"]()

    def log_ends(self) -> None:
        """End the log and its window. What was logged can still be read."""
        self._call["log_ends"]()

    @property
    def logged(self) -> int:
        """Number of requests that were logged so far."""
        return int(self._call["logged"]())

    def requests(self) -> list[tuple[int, int | None]]:
        """For each logged request: its bytes, and the number of the next request when it was freed (None: it is live)."""
        count = self.logged
        pairs = (_INTEGER * (2 * count))()
        self._call["read"](count, pairs)
        return [(pairs[i], pairs[i + 1] if pairs[i + 1] >= 0 else None) for i in range(0, 2 * count, 2)]

    def add(self, nbytes: Sequence[int], offsets: Sequence[int | None]) -> int:
        """Add the plan of a step: bytes and offset of each request (None: the ordinary allocator serves it).

        Returns the plan's number, for `begin` and `remove`.
        """
        row = _INTEGER * len(nbytes)
        return int(self._call["add"](len(nbytes), row(*nbytes), row(*(-1 if offset is None else offset for offset in offsets))))

    def remove(self, plan: int) -> None:
        """Forget a plan. A window under it ends."""
        self._call["remove"](plan)

    def begin(self, plan: int, arena_nbytes: int) -> bool:
        """Begin a window under a plan, in an arena of at least `arena_nbytes`. Returns whether there is memory for it."""
        return bool(self._call["begin"](plan, arena_nbytes))

    def end(self, free: bool) -> None:
        """End the window, if there is one. `free`: free the arena as soon as it has no buffer."""
        self._call["end"](free)

    def counts(self) -> Counts:
        """The counts of the open window, or else of the last one."""
        values = (_INTEGER * len(fields(Counts)))()
        self._call["counts"](values)
        return Counts(*values)

    def arenas_nbytes(self) -> tuple[int, int]:
        """(bytes of all arenas that are not freed, bytes of the live buffers in them)."""
        values = (_INTEGER * 2)()
        self._call["arenas"](values)
        return values[0], values[1]


class Pool(Lane):
    """The planned pool of the CPU. All its windows belong to the thread that begins them."""

    def __init__(self, counter: Counter) -> None:
        super().__init__(counter.library, "memopt_pool")
        self._counter = counter

    @property
    def live_nbytes(self) -> int:
        return self._counter.live_nbytes

    def outside_window(self) -> Window | None:
        return self._counter.window(outside=True)


def pool() -> Pool | None:
    """The planned pool of the CPU; None if the native counter, which serves it, is not installed."""
    counts = counter()
    return None if counts is None else Pool(counts)
