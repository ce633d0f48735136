"""What a meter counts, what follows from it, and the file in which one run keeps it for the next to be compared with."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_memopt import jsonio
from lightning_memopt.errors import PlanFileError
from lightning_memopt.units import format_nbytes

MIN_SECONDS = 1.0
"""Counters of energy are read every 20 to 100 ms by what they count: of a shorter stretch they say little."""
_KIND, _SCHEMA = "memopt rates", 2


@dataclass(frozen=True, slots=True)
class Energy:
    """`total_joules` of every stretch, None where those of one are not known; the others of stretches of `MIN_SECONDS` or more,
    of which rates are made.
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
    """Batches, optimizer steps, samples and seconds of one stretch or of several, and joules by what was measured."""

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
class Rates:
    """What a run reached, in the steps that were as all others are. None: not measured.

    `approximate`: joules were integrated from samples of power.
    """

    device: str
    steps: int
    samples_per_step: float | None = None
    samples_per_sec: float | None = None
    joules_per_sample: float | None = None
    approximate: bool = False
    peak_nbytes: int | None = None

    def write(self, path: str | os.PathLike[str]) -> None:
        """As JSON. Raises PlanFileError."""
        jsonio.write(path, {"kind": _KIND, "schema": _SCHEMA, **asdict(self)}, indent=1)

    def text(self) -> str:
        """One line."""
        parts = [f"{self.steps} steps on {self.device}"]  # no brackets: Rich would take them for markup
        if self.samples_per_sec is not None:
            parts.append(f"{self.samples_per_sec:.4g} samples/s, {self.samples_per_step or 0:.4g} a step")
        if self.joules_per_sample is not None:
            about = "about " * self.approximate
            parts.append(f"{about}{self.joules_per_sample:.4g} J/sample (the whole device, whoever uses it)")
        if self.peak_nbytes is not None:
            parts.append(f"{format_nbytes(self.peak_nbytes)} reserved at most")
        return "; ".join(parts)


def read_rates(path: str | os.PathLike[str]) -> Rates:
    """What `Rates.write` wrote. Raises PlanFileError."""
    found = jsonio.read(path, max_nbytes=1 << 16)
    kind, schema = found.pop("kind", None), found.pop("schema", None)
    if schema == 1 and "peak_bytes" in found and "peak_nbytes" not in found:
        schema, found["peak_nbytes"] = _SCHEMA, found.pop("peak_bytes")
    if kind != _KIND or schema != _SCHEMA:
        raise PlanFileError(f"{path} is of kind {kind!r}, schema {schema!r}; give a file of {_KIND!r}, schema {_SCHEMA}.")
    wanted = {f.name: str(f.type) for f in fields(Rates)}
    if found.keys() != wanted.keys():
        raise PlanFileError(f"{path} has the keys {sorted(found)}; {sorted(wanted)} are wanted: write it again.")
    bad = [key for key, value in found.items() if not _fits(value, wanted[key])]
    if bad:
        raise PlanFileError(f"{path} has no usable {bad[0]}: {found[bad[0]]!r}; write it again.")
    return Rates(**found)


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if "str" in kind or "bool" in kind:
        return isinstance(value, str if "str" in kind else bool)
    number = isinstance(value, int) or ("float" in kind and isinstance(value, float) and math.isfinite(value))
    return number and not isinstance(value, bool) and value >= 0
