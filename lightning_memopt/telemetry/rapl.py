"""The energy of the processors' packages by RAPL (Running Average Power Limit).

Linux shows the counters in files below /sys/class/powercap, which most systems let only root read.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from lightning_memopt.clocks import perf_counter
from lightning_memopt.errors import EnergyUnavailableError
from lightning_memopt.telemetry.sources import Clock, EnergyCounter, EnergySource

DIRECTORY = Path("/sys/class/powercap")
_MICRO = 1e-6
_MOST_WATTS = 1500.0
"""More watts than any package takes; packages of 2026 take up to 500 W."""


def rapl_sources(directory: str | os.PathLike[str] = DIRECTORY, clock: Clock = perf_counter) -> list[EnergySource]:
    """One counter for each package. Raises EnergyUnavailableError if there is none, or if it cannot be read."""
    try:
        # the other zones are parts of a package (core, dram), or contain it (psys)
        packages = [p for p in sorted(Path(directory).glob("intel-rapl:*")) if (p / "name").read_text().startswith("package")]
        if not packages:
            raise EnergyUnavailableError(f"there is no counter of a package below {directory}; leave cpu=True out")
        return [
            EnergyCounter(p.name, partial(_count, p / "energy_uj"), _MICRO, (_wrap(p),), _MOST_WATTS, clock) for p in packages
        ]
    except PermissionError as error:
        raise EnergyUnavailableError(f"{error.filename} is not readable for this user; ask for access") from error
    except (OSError, ValueError) as error:
        raise EnergyUnavailableError(f"a counter below {directory} cannot be read ({error}); leave cpu=True out") from error


def _wrap(package: Path) -> int:
    """The number of microjoules after which the counter begins again at 0."""
    return _count(package / "max_energy_range_uj") + 1


def _count(file: Path) -> int:
    return int(file.read_text())
