"""Seconds that copies, codecs and waits for them take."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_PENDING = 64


class Stopwatch:
    """The sum of what ran inside of `running`, in any thread: by the host's clock, or on a device between two events of one of
    its streams, which nobody waits for before `seconds` is asked. While it is not `on`, nothing is timed.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, event: Callable[[], Any] | None = None) -> None:
        self.on = True
        self._clock = clock
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._lock = threading.RLock()  # a destructor may wait for a copy anywhere, in here too
        self._seconds = 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()

    @contextlib.contextmanager
    def running(self, stream: Any = None) -> Iterator[None]:
        """Time this block; with a stream, what it queues there."""
        if not self.on:
            yield
            return
        began = self._mark(stream)
        try:
            yield
        finally:
            if stream is None:
                with self._lock:
                    self._seconds += self._clock() - began
        if stream is not None:  # not after a failure: a device that failed would raise here, in the place of what it was
            ended = self._mark(stream)
            with self._lock:
                self._pairs.append((began, ended))
                if len(self._pairs) > _PENDING:
                    self._fold()

    @property
    def seconds(self) -> float:
        """So far; waits for a device to be done with what it was given."""
        with self._lock:
            for _, ended in self._pairs:
                ended.synchronize()
            self._fold()
            return self._seconds

    def _mark(self, stream: Any) -> Any:
        if stream is None:
            return self._clock()
        event = self._event()
        event.record(stream)
        return event

    def _fold(self) -> None:
        for _ in range(len(self._pairs)):
            began, ended = self._pairs.popleft()
            if ended.query():
                self._seconds += 1e-3 * began.elapsed_time(ended)
            else:
                self._pairs.append((began, ended))
