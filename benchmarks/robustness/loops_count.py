"""Bytes that torch's CPU allocator has given out, counted by a library that is preloaded into the process.

It is not part of the package, and does not use what the package measures with: an independent count. Without a compiler, or
in a process that was started without the library, nothing is measured.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("loops_count.cpp")


def built() -> Path | None:
    """The library, built where it is not there yet; None where that cannot be done."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    name = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"memopt-loops-{os.getuid()}-{name}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-std=c++17", str(_SOURCE), "-o", str(unfinished), "-ldl"]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        unfinished.replace(library)
    return library


def environment() -> dict[str, str]:
    """For a process that counts: this one's, with the library preloaded."""
    library = built()
    found = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "TOKENIZERS_PARALLELISM": "false"}
    return found | ({"LD_PRELOAD": str(library)} if library else {})


@functools.cache
def _library() -> ctypes.CDLL | None:
    names = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if "memopt-loops" in name]
    if not names:
        return None
    library = ctypes.CDLL(names[0])
    library.loops_live.restype = library.loops_peak.restype = ctypes.c_int64
    return library


def live_nbytes() -> int | None:
    """What is allocated now."""
    library = _library()
    return int(library.loops_live()) if library is not None else None


def true_peak() -> int | None:
    """The most that was allocated since this was last asked."""
    library = _library()
    return int(library.loops_peak()) if library is not None else None
