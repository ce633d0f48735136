"""The counts of a meter, the throughput computed from them, and the file that keeps it.

A later run reads the file (`read_throughput`) to compare its own throughput with it.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_memopt import jsonio
from lightning_memopt.errors import PlanFileError
from lightning_memopt.units import format_nbytes

MIN_SECONDS = 1.0
"""Minimum seconds of a stretch whose energy is used, because the hardware updates its counters only every 20 to 100 ms."""
_KIND, _SCHEMA = "memopt rates", 2


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of several stretches.

    total_joules: joules of all stretches; None if those of one stretch are unknown.
    joules: joules of the stretches that took `MIN_SECONDS` or more; watts and joules a sample are computed from these.
    seconds: duration of the same stretches.
    samples: samples of the same stretches.
    """

    total_joules: float | None = 0.0
    joules: float = 0.0
    seconds: float = 0.0
    samples: int = 0

    def __add__(self, other: Energy) -> Energy:
        known = self.total_joules is not None and other.total_joules is not None
        total = (self.total_joules or 0.0) + (other.total_joules or 0.0) if known else None
        return Energy(total, self.joules + other.joules, self.seconds + other.seconds, self.samples + other.samples)

    @property
    def watts(self) -> float | None:
        return self.joules / self.seconds if self.seconds else None

    @property
    def joules_per_sample(self) -> float | None:
        return self.joules / self.samples if self.samples else None


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one or several stretches.

    batches: number of batches.
    steps: number of optimizer steps.
    samples: number of samples.
    seconds: duration.
    energy: name of a meter ("device", "cpu") -> energy.
    """

    batches: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    energy: dict[str, Energy] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        energy = {k: self.energy.get(k, Energy()) + other.energy.get(k, Energy()) for k in {**self.energy, **other.energy}}
        return Tally(
            self.batches + other.batches,
            self.steps + other.steps,
            self.samples + other.samples,
            self.seconds + other.seconds,
            energy,
        )

    @property
    def samples_per_sec(self) -> float | None:
        return self.samples / self.seconds if self.seconds and self.samples else None

    @property
    def step_seconds(self) -> float | None:
        return self.seconds / self.steps if self.steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The throughput of a run in its steady stretches. None: not measured.

    device: name of the training device.
    steps: number of optimizer steps that were measured.
    samples_per_step: samples of an optimizer step.
    samples_per_sec: samples a second.
    joules_per_sample: energy of the whole device a sample.
    approximate: whether the joules were integrated from power samples.
    peak_nbytes: maximum bytes reserved on the device.
    """

    device: str
    steps: int
    samples_per_step: float | None = None
    samples_per_sec: float | None = None
    joules_per_sample: float | None = None
    approximate: bool = False
    peak_nbytes: int | None = None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that `read_throughput` reads. Raises PlanFileError if it cannot be written."""
        jsonio.write(path, {"kind": _KIND, "schema": _SCHEMA, **asdict(self)}, indent=1)

    def text(self) -> str:
        """All numbers in one line."""
        parts = [f"{self.steps} steps on {self.device}"]  # without brackets, which Rich would take for markup
        if self.samples_per_sec is not None:
            parts.append(f"{self.samples_per_sec:.4g} samples/s, {self.samples_per_step or 0:.4g} a step")
        if self.joules_per_sample is not None:
            about = "about " if self.approximate else ""
            parts.append(f"{about}{self.joules_per_sample:.4g} J/sample (the whole device, other programs included)")
        if self.peak_nbytes is not None:
            parts.append(f"{format_nbytes(self.peak_nbytes)} reserved at most")
        return "; ".join(parts)


def read_throughput(path: str | os.PathLike[str]) -> Throughput:
    """Read a file that `Throughput.write` wrote. Raises PlanFileError if it cannot be read, or is another kind of file."""
    values = jsonio.read(path, max_nbytes=1 << 16)
    kind, schema = values.pop("kind", None), values.pop("schema", None)
    if schema == 1 and "peak_bytes" in values and "peak_nbytes" not in values:
        schema, values["peak_nbytes"] = _SCHEMA, values.pop("peak_bytes")
    if kind != _KIND or schema != _SCHEMA:
        raise PlanFileError(f"{path} is of kind {kind!r}, schema {schema!r}; give a file of {_KIND!r}, schema {_SCHEMA}.")
    return throughput_of(values, os.fspath(path))


def throughput_of(values: object, path: str) -> Throughput:
    """The throughput whose fields these are. Raises PlanFileError, which names the file at `path`."""
    types = {f.name: str(f.type) for f in fields(Throughput)}
    if not isinstance(values, dict) or values.keys() != types.keys():
        keys = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise PlanFileError(f"{path} has the keys {keys}, but must have {sorted(types)}. Write the file again.")
    bad = [key for key, value in values.items() if not _has_type(value, types[key])]
    if bad:
        raise PlanFileError(f"{path} has {bad[0]} = {values[bad[0]]!r}, which is not valid. Write the file again.")
    return Throughput(**values)


def _has_type(value: Any, annotation: str) -> bool:
    """Whether a value is valid for a field with this annotation. Numbers must be finite and not negative."""
    if value is None:
        return "None" in annotation
    if "str" in annotation:
        return isinstance(value, str)
    if "bool" in annotation or isinstance(value, bool):
        return "bool" in annotation and isinstance(value, bool)
    if isinstance(value, float):
        return "float" in annotation and math.isfinite(value) and value >= 0
    return isinstance(value, int) and value >= 0
