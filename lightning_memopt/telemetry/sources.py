"""Sources of joules: a hardware counter of energy, or power that is sampled and integrated."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from lightning_memopt.clocks import perf_counter
from lightning_memopt.errors import EnergyUnavailableError

Clock = Callable[[], float]
"""Gives seconds since any fixed time."""


class EnergySource(Protocol):
    """Gives the joules of one device.

    key: name of the device; two processes that measure the same device have the same key.
    approximate: whether the joules are integrated from power samples.
    """

    key: str
    approximate: bool

    def take(self) -> float | None:
        """Joules since the last call; None if they are unknown. Raises EnergyUnavailableError once they cannot be read."""

    def close(self) -> None:
        """End threads and release the driver. A second call does nothing."""


class EnergyCounter:
    """Joules from a hardware counter, which only grows, except where it wraps or is reset.

    Args:
        key: name of the device.
        read: gives the value of the counter.
        unit_joules: joules of one count.
        wraps: values at which the counter may begin again at 0, ascending.
        most_watts: more power than the device takes. A counter that grew faster was reset, or wrapped more than once.
        clock: gives seconds.
        finish: releases what `read` needs.
    """

    approximate = False

    def __init__(
        self,
        key: str,
        read: Callable[[], int],
        unit_joules: float,
        wraps: tuple[int, ...],
        most_watts: float,
        clock: Clock = perf_counter,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.key = key
        self._read, self._clock = read, clock
        self._unit_joules, self._wraps, self._most_watts = unit_joules, wraps, most_watts
        self._last_count = read()
        self._read_at = clock()
        self._on_close = contextlib.ExitStack()
        self._on_close.callback(finish)

    def take(self) -> float | None:
        count, now = self._read(), self._clock()
        last, seconds = self._last_count, now - self._read_at
        self._last_count, self._read_at = count, now
        # the hardware updates its counter with a delay, so one second is added
        most = self._most_watts * (seconds + 1.0) / self._unit_joules
        if most >= self._wraps[-1]:
            return None  # it may have wrapped and grown past its last value
        growths = [count - last, *(count + wrap - last for wrap in self._wraps if last < wrap)]
        return next((growth * self._unit_joules for growth in growths if 0 <= growth <= most), None)

    def close(self) -> None:
        self._on_close.close()


class PowerSampler:
    """Joules from power samples, integrated by the trapezoidal rule.

    Args:
        key: name of the device.
        watts: gives the present power.
        clock: gives seconds.
        period: seconds between two samples of a background thread; 0 for no thread: then the caller calls `sample`.
        finish: releases what `watts` needs.
    """

    approximate = True

    def __init__(
        self,
        key: str,
        watts: Callable[[], float],
        clock: Clock = perf_counter,
        period: float = 0.1,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.key = key
        self._watts, self._clock = watts, clock
        self._joules = 0.0
        self._sampled_at = clock()
        self._last_watts = watts()
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
        """Read the power and add the joules since the last sample."""
        with self._lock:
            now, watts = self._clock(), self._watts()
            self._joules += 0.5 * (watts + self._last_watts) * (now - self._sampled_at)
            self._sampled_at, self._last_watts = now, watts

    def failed(self, error: Exception) -> None:
        """Remember an error of the thread; the next `take` raises it."""
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
    """The thread's function. It holds the sampler only while it samples, so that a sampler nobody uses is collected."""
    while not stop.wait(period):
        sampler = ref()
        if sampler is None:
            return
        try:
            sampler.sample()
        except Exception as error:  # a thread has no caller that would see it
            sampler.failed(error)
            return
        del sampler
