"""Joules of what is measured together, or none: what fails is said once, and nothing takes its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from lightning_memopt.telemetry.sources import Source


class EnergyMeter:
    """The sum over the sources that `open_sources` opens. Where one fails, now or later: one warning, and never a number again.

    `name` is what the warning calls it; `failed` says that it came to that. Nothing here raises: training does not end for
    want of a meter.
    """

    def __init__(self, name: str, open_sources: Callable[[], Iterable[Source]]) -> None:
        self.name, self.failed = name, False
        self._sources: tuple[Source, ...] = ()
        self._joules: float | None = 0.0
        try:
            self._sources = tuple(open_sources())
        except Exception as error:  # whatever a driver's library may raise
            self._give_up(error)

    @property
    def available(self) -> bool:
        return bool(self._sources)

    @property
    def approximate(self) -> bool:
        return any(source.approximate for source in self._sources)

    @property
    def keys(self) -> tuple[str, ...]:
        """What is measured; two processes with the same keys measure the same thing."""
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
        """Joules since the last call; None where they cannot be known."""
        self.poll()
        joules, self._joules = self._joules, 0.0
        return joules if self.available else None

    def close(self) -> None:
        sources, self._sources = self._sources, ()
        for source in sources:
            try:
                source.close()
            except Exception:
                pass  # a driver that is gone needs no end

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        self.close()
        warnings.warn(f"MemOpt: no energy is reported of {self.name}: {error}.", stacklevel=2)
