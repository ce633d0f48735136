"""Sum the joules of several energy sources.

If a source fails, there is one warning, and from then on no joules are reported, because nothing can replace the missing ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from lightning_memopt.telemetry.sources import EnergySource


class EnergyMeter:
    """The joules of all sources that `open_sources` opens. It never raises, because training must not end for lack of a meter.

    name: name of the measured device in the warning.
    failed: whether a source failed. From then on there are no joules.
    """

    def __init__(self, name: str, open_sources: Callable[[], Iterable[EnergySource]]) -> None:
        self.name, self.failed = name, False
        self._sources: tuple[EnergySource, ...] = ()
        self._joules: float | None = 0.0
        try:
            self._sources = tuple(open_sources())
        except Exception as error:  # the library of a driver may raise anything
            self._give_up(error)

    @property
    def available(self) -> bool:
        """Whether there is a source, and none failed."""
        return bool(self._sources)

    @property
    def approximate(self) -> bool:
        """Whether the joules of a source are integrated from power samples."""
        return any(source.approximate for source in self._sources)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the measured devices; two processes with the same keys measure the same devices."""
        return tuple(source.key for source in self._sources)

    def poll(self) -> None:
        """Read the counters, so that none wraps twice between two readings."""
        for source in self._sources:
            try:
                joules = source.take()
            except Exception as error:
                self._give_up(error)
                return
            self._joules = None if self._joules is None or joules is None else self._joules + joules

    def take(self) -> float | None:
        """Joules since the last call; None if they are unknown."""
        self.poll()
        joules, self._joules = self._joules, 0.0
        return joules if self.available else None

    def close(self) -> None:
        sources, self._sources = self._sources, ()
        for source in sources:
            try:
                source.close()
            except Exception:
                pass  # the driver is gone, so there is nothing to close

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        self.close()
        warnings.warn(f"MemOpt: no energy is reported for {self.name}: {error}.", stacklevel=2)
