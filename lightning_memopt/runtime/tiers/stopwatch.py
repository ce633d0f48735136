"""Measure the seconds that copies, codecs, and waits for them take."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of

_PENDING = 64
"""Maximum number of pairs of events that wait to be read."""


class Stopwatch:
    """The total seconds of all `running` blocks, in any thread.

    A block is timed by the host's clock, or between two events on a stream of the device. Only `seconds` waits for these
    events.

    on: whether blocks are timed.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter, event: Callable[[], Any] | None = None) -> None:
        self.on = True
        self._clock = clock
        self._event = event
        self._lock = threading.RLock()  # a destructor may wait for a copy anywhere, even in here
        self._seconds = 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()

    def another(self) -> Stopwatch:
        """A stopwatch of the same kind, at 0."""
        return Stopwatch(self._clock, self._event)

    @contextlib.contextmanager
    def running(self, stream: Any = None) -> Iterator[None]:
        """Time the block; with a stream, the work that the block queues on it."""
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
        if stream is not None:  # not after an error: a failed device would raise another one here and hide the first
            ended = self._mark(stream)
            with self._lock:
                self._pairs.append((began, ended))
                if len(self._pairs) > _PENDING:
                    self._fold()

    @property
    def seconds(self) -> float:
        """The total so far. Waits until the device has finished the timed work."""
        with self._lock:
            for _, ended in self._pairs:
                ended.synchronize()
            self._fold()
            return self._seconds

    def _mark(self, stream: Any) -> Any:
        if stream is None:
            return self._clock()
        event = backend_of(stream.device).timing_event() if self._event is None else self._event()
        event.record(stream)
        return event

    def _fold(self) -> None:
        """Add the times of events that have passed. The caller has the lock."""
        for _ in range(len(self._pairs)):
            began, ended = self._pairs.popleft()
            if ended.query():
                self._seconds += 1e-3 * began.elapsed_time(ended)
            else:
                self._pairs.append((began, ended))
