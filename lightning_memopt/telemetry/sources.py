"""Where joules come from: a counter of energy that only grows, or power that is sampled and integrated."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from lightning_memopt.errors import EnergyUnavailableError

Clock = Callable[[], float]


class Source(Protocol):
    """`key`: what is measured, the same wherever two processes measure one thing. `approximate`: whether joules are integrated
    from samples of power."""

    key: str
    approximate: bool

    def take(self) -> float | None:
        """Joules since the last call; None where they cannot be known. Raises EnergyUnavailableError where they never will."""

    def close(self) -> None:
        """Ends what runs beside; a second time does nothing."""


class Counter:
    """`read` gives a count of `unit_joules` each, which begins anew at one of `wraps` (ascending), or where it is reset.

    `most_watts`: more than what is measured ever takes; a counter that grew faster was reset, or wrapped more than once.
    `finish` ends what `read` needs.
    """

    approximate = False

    def __init__(
        self,
        key: str,
        read: Callable[[], int],
        unit_joules: float,
        wraps: tuple[int, ...],
        most_watts: float,
        clock: Clock = time.perf_counter,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.key = key
        self._read, self._clock = read, clock
        self._unit_joules, self._wraps, self._most_watts = unit_joules, wraps, most_watts
        self._last, self._at = read(), clock()
        self._on_close = contextlib.ExitStack()
        self._on_close.callback(finish)

    def take(self) -> float | None:
        now, at = self._read(), self._clock()
        last, seconds = self._last, at - self._at
        self._last, self._at = now, at
        most = self._most_watts * (seconds + 1.0) / self._unit_joules  # a counter is behind by its period, so a second more
        if most >= self._wraps[-1]:
            return None  # it may have wrapped, and passed where it was
        growths = [now - last, *(now + wrap - last for wrap in self._wraps if last < wrap)]
        return next((growth * self._unit_joules for growth in growths if 0 <= growth <= most), None)

    def close(self) -> None:
        self._on_close.close()


class PowerSampler:
    """Integrates `watts()` by trapezoids; a thread samples every `period` seconds, 0 for none (whoever uses it samples)."""

    approximate = True

    def __init__(
        self,
        key: str,
        watts: Callable[[], float],
        clock: Clock = time.perf_counter,
        period: float = 0.1,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.key = key
        self._watts, self._clock = watts, clock
        self._joules = 0.0
        self._at, self._last = clock(), watts()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._on_close = contextlib.ExitStack()
        self._on_close.callback(finish)
        if period:
            stop = threading.Event()
            thread = threading.Thread(
                target=_sample, args=(weakref.ref(self, lambda _: stop.set()), stop, period), name="memopt-power", daemon=True
            )
            self._on_close.callback(thread.join, 10.0)
            self._on_close.callback(stop.set)
            thread.start()

    def sample(self) -> None:
        with self._lock:
            at, watts = self._clock(), self._watts()
            self._joules += 0.5 * (watts + self._last) * (at - self._at)
            self._at, self._last = at, watts

    def failed(self, error: Exception) -> None:
        self._error = error

    def take(self) -> float | None:
        if self._error is not None:
            raise EnergyUnavailableError(f"its power cannot be read any more ({self._error}); check the driver")
        self.sample()
        with self._lock:
            joules, self._joules = self._joules, 0.0
        return joules

    def close(self) -> None:
        self._on_close.close()


def _sample(ref: weakref.ref[PowerSampler], stop: threading.Event, period: float) -> None:
    """The thread: holds the sampler only while it samples, so that one that is forgotten ends."""
    while not stop.wait(period):
        sampler = ref()
        if sampler is None:
            return
        try:
            sampler.sample()
        except Exception as error:  # whatever it is, nobody above this frame would see it
            sampler.failed(error)
            return
        del sampler
