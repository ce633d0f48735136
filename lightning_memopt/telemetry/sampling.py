"""Sample the memory of a device over time, in a thread, while a step runs. Input: a device. Output: seconds and bytes.

On the CPU the bytes are those of the native counter, on CUDA those that torch's allocator has given out. Reading them takes no
lock of the device.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of
from lightning_memopt.native import counter_of


class Sample(NamedTuple):
    """`seconds` since the sampling began, and the bytes in memory then."""

    seconds: float
    nbytes: int


class Sampler:
    """Reads the memory of `device` every `interval_seconds` from its construction until `stop`.

    available: whether the memory of this device can be read (on the CPU, only with the native counter).
    """

    def __init__(self, device: torch.device, interval_seconds: float = 0.001) -> None:
        self._backend, self._count = backend_of(device), counter_of(device)
        self.available = self._backend.keeps_statistics or self._count is not None
        self._began = perf_counter()
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._interval_seconds = interval_seconds
        self._thread: threading.Thread | None = None
        if self.available:
            self._read()
            self._thread = threading.Thread(target=self._run, name="memopt-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> list[Sample]:
        """The samples, in order; empty if nothing could be read. A second call returns the same."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._read()
        return self._samples

    def _run(self) -> None:
        while not self._over.wait(self._interval_seconds):
            self._read()

    def _read(self) -> None:
        nbytes = self._count.live_nbytes if self._count is not None else self._backend.allocated().now
        self._samples.append(Sample(perf_counter() - self._began, int(nbytes)))
