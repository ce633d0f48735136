"""Copies between a device and a file through two small pieces of page-locked memory: the device uses one piece while the file
uses the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.device.backends import backend_of
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.runtime.tiers.base import buffer
from lightning_memopt.runtime.tiers.streams import HostPool, queued_on

PIECE_NBYTES = 8 << 20

Move = Callable[[memoryview, int], None]
"""(memory, offset): write this memory to the file, or fill it from the file. `offset`: bytes from the tensor's beginning."""


class Staging:
    """One direction of a device's disk tier: a stream and two pieces of memory. Only the thread of that direction calls it, for
    one copy at a time.
    """

    def __init__(self, device: torch.device, piece_nbytes: int = PIECE_NBYTES, streams: Any = None) -> None:
        self.device = device
        self.streams = streams or backend_of(device).streams
        self.stream = self.streams.Stream(device)
        self.pool = HostPool(2 * piece_nbytes, device)
        self.pieces = self.pool.bytes[:piece_nbytes], self.pool.bytes[piece_nbytes:]
        self.events = self.streams.Event(), self.streams.Event()

    def out(self, t: Tensor, ready: Any, write: Move) -> None:
        """Write all of `t` after the event `ready`. Returns when all is written."""
        size = self.pieces[0].numel()
        with queued_on(self.streams, self.stream, self.device):
            self.stream.wait_event(ready)
            starts = range(0, t.numel(), size)
            for k, start in enumerate(starts):
                self._take(t, k, start)
                if k:
                    self._write(t, k - 1, starts[k - 1], write)
            self._write(t, len(starts) - 1, starts[-1], write)

    def _take(self, t: Tensor, k: int, start: int) -> None:
        part = t[start : start + self.pieces[0].numel()]
        streams_module.copy(self.pieces[k % 2][: part.numel()], part)
        self.events[k % 2].record(self.stream)

    def _write(self, t: Tensor, k: int, start: int, write: Move) -> None:
        self.events[k % 2].synchronize()
        write(buffer(self.pieces[k % 2][: t.numel() - start]), start)

    def back(self, out: Tensor, ready: Any, read: Move) -> None:
        """Fill all of `out`, whose memory is free after the event `ready`. No copy is under way when it returns, or raises."""
        size = self.pieces[0].numel()
        with queued_on(self.streams, self.stream, self.device):
            self.stream.wait_event(ready)
            try:
                for k, start in enumerate(range(0, out.numel(), size)):
                    if k > 1:
                        self.events[k % 2].synchronize()  # the piece's earlier bytes are on the device now
                    part = out[start : start + size]
                    piece = self.pieces[k % 2][: part.numel()]
                    read(buffer(piece), start)
                    streams_module.copy(part, piece)
                    self.events[k % 2].record(self.stream)
            finally:  # also if a read failed: then `out` is freed, and its memory reused
                for event in self.events:
                    event.synchronize()

    def close(self) -> None:
        self.pieces = self.pool.bytes[:0], self.pool.bytes[:0]
        self.pool.close()
