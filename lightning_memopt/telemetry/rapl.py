"""The energy of the processors' packages by RAPL, as Linux shows it below /sys/class/powercap; mostly for root alone."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

from lightning_memopt.errors import EnergyUnavailableError
from lightning_memopt.telemetry.sources import Clock, Counter, Source

DIRECTORY = Path("/sys/class/powercap")
_MICRO = 1e-6
_MOST_WATTS = 1500.0  # of a package; those of 2026 take up to 500


def rapl_sources(directory: str | os.PathLike[str] = DIRECTORY, clock: Clock = time.perf_counter) -> list[Source]:
    """A counter for every package; memory counts where it is part of one. Raises EnergyUnavailableError without any."""
    try:
        # others are parts of one (core, dram), or a sum of it and more (psys)
        packages = [p for p in sorted(Path(directory).glob("intel-rapl:*")) if (p / "name").read_text().startswith("package")]
        if not packages:
            raise EnergyUnavailableError(f"there is no package's counter below {directory}; leave cpu=True out")
        return [Counter(p.name, partial(_count, p / "energy_uj"), _MICRO, (_range(p),), _MOST_WATTS, clock) for p in packages]
    except PermissionError as error:
        raise EnergyUnavailableError(f"{error.filename} is not readable for this user; ask who administers it") from error
    except (OSError, ValueError) as error:
        raise EnergyUnavailableError(f"a counter below {directory} cannot be read ({error}); leave cpu=True out") from error


def _range(package: Path) -> int:
    return _count(package / "max_energy_range_uj") + 1  # the last value before 0


def _count(file: Path) -> int:
    return int(file.read_text())
