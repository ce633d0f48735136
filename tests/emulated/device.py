"""Whether this process's CUDA device is the emulated one, and what it saw."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch

NAME = "emulated CUDA device"


def is_emulated() -> bool:
    """Whether CUDA's first device is the emulated one: LD_LIBRARY_PATH named its libraries when the process began."""
    return torch.cuda.is_available() and torch.cuda.get_device_name(0) == NAME


def mode() -> str:
    """The mode it is in: "bytes" or "bits"."""
    return os.environ.get("EMULATED_MODE", "bytes")


def is_bits() -> bool:
    """Whether its memory holds values."""
    return mode() == "bits"


def races() -> int:
    """Number of accesses that nothing ordered, since the process began (EMULATED_RACES=1)."""
    count = ctypes.CDLL("libcudart.so.13").emulated_races
    count.restype = ctypes.c_uint64
    return int(count())


@dataclass(frozen=True)
class Op:
    """What the host asked of a stream.

    what: an operator, a kernel, "memset", "copy in" or "copy out" (", pageable"), "copy on the device", "record" or "wait".
    number: its number in the stream.
    nbytes: of the first range of memory that it uses.
    clock: of each stream, the last op that is known to be over when this one begins.
    """

    what: str
    stream: int
    device: int
    number: int
    nbytes: int
    clock: dict[int, int]

    def before(self, other: Op) -> bool:
        """Whether something orders `other` behind this one."""
        return other.clock.get(self.stream, 0) >= self.number and other is not self


@contextlib.contextmanager
def logged() -> Iterator[list[Op]]:
    """Within, what is asked of the devices is logged; then the list has it, in order."""
    log = ctypes.CDLL("libcudart.so.13").emulated_log
    ops: list[Op] = []
    log(1, None)
    try:
        yield ops
    finally:
        with tempfile.NamedTemporaryFile("r", suffix=".tsv") as file:
            log(0, file.name.encode())
            for line in file:
                stream, of, number, nbytes, clock, what = line.rstrip("\n").split("\t")
                times = dict(map(int, entry.split(":")) for entry in clock.split())
                ops.append(Op(what, int(stream), int(of), int(number), int(nbytes), times))


def has_context(index: int) -> bool:
    """Whether anything was asked of the device with this number: on a card, it then takes hundreds of MiB."""
    return bool(ctypes.CDLL("libcudart.so.13").emulated_has_context(index))


def last_error() -> int:
    """CUDA's last error in this thread, which stays."""
    return int(ctypes.CDLL("libcudart.so.13").cudaPeekAtLastError())


def run(command: list[str], seconds: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another process on an emulated device with this environment, with warnings off. It must end within the given seconds."""
    own = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=seconds)


def lines_of(code: str, **environment: str) -> tuple[list[str], str]:
    """The lines that this program prints in another process, and what it says on stderr; no access there was unordered."""
    end = "\nimport torch\nfrom tests.emulated import device\ntorch.cuda.synchronize()\nassert device.races() == 0"
    done = run([sys.executable, "-c", code + end], EMULATED_RACES="1", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr
