"""The bytes that this process has in tiers, and those that the machine has left for them."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections import Counter

from lightning_memopt.errors import TierFullError
from lightning_memopt.runtime.tiers import streams
from lightning_memopt.units import format_nbytes, host_memory_nbytes

_taken: Counter[str] = Counter()
_lock = threading.RLock()  # a finalizer may run anywhere


class Room:
    """Bytes that something takes in the tier of this name: from now on until it gives them back, or is freed.

    limit_nbytes: the most bytes that the whole process may have there; None: as many as there are. Raises TierFullError for
        more.
    """

    def __init__(self, name: str, nbytes: int, limit_nbytes: int | None = None) -> None:
        with _lock:
            taken = _taken[name]
            if limit_nbytes is not None and taken + nbytes > limit_nbytes:
                raise TierFullError(
                    f"the {name} tier has {format_nbytes(taken)} of at most {format_nbytes(limit_nbytes)}, and no room for "
                    f"{nbytes} bytes ({format_nbytes(nbytes)}) more; set a larger {name}_budget"
                )
            _taken[name] += nbytes
            self.give = weakref.finalize(self, _give, name, nbytes)
            """Give the bytes back. May be called again."""
            self.give.atexit = False


def _give(name: str, nbytes: int) -> None:
    with _lock:
        _taken[name] -= nbytes


def taken_nbytes(name: str) -> int:
    """Bytes that this process has in the tier of this name."""
    return _taken[name]


def total_nbytes(name: str, directory: str | None) -> int:
    """Bytes of the host's memory, or of the disk with this directory (None: the system's directory for temporary files)."""
    return host_memory_nbytes() if name == "host" else shutil.disk_usage(directory or tempfile.gettempdir()).total


def left_nbytes(name: str, directory: str | None) -> int:
    """Bytes of them that are left, in addition to those that this process has."""
    return streams.left_nbytes() if name == "host" else shutil.disk_usage(directory or tempfile.gettempdir()).free
