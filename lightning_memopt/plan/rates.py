"""How fast bytes move and ops run on a machine. Rates are measured (`trace/link.py`), or come from a profile of the package.

A copy of n bytes takes `latency + n / rate`. A codec takes `n / rate` for n decoded bytes. An op takes `max(flops / rate, bytes
/ bandwidth) / efficiency + launch` on a card other than the one where it was recorded (the roofline model). Rates are in bytes
and FLOPs per second; `sources` says where each number comes from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_memopt import jsonio
from lightning_memopt.errors import ConfigError, PlanFileError
from lightning_memopt.graph.fields import Fields

FORMAT = "lightning_memopt.rates"
SCHEMA = 1

PROFILES = Path(__file__).parent.parent / "profiles"

_FIELDS = ("format", "schema", "name", "links", "codecs", "device", "sources")
_DEVICE = ("nbytes", "flops_per_second", "bytes_per_second", "launch_seconds", "efficiency", "workspace_nbytes")
_KINDS = {"convolution": ("conv",), "attention": ("attention",), "normalization": ("_norm", "softmax")}
"""Kind of operator -> parts of the names of its operators."""
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "_addmm_activation", "_grouped_mm"}
OPERATORS = (*_KINDS, "matmul", "elementwise")
"""Kinds of operators. All that are not of another kind are "elementwise"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Copies between the device and one tier: `out` from the device, `in` to it."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    out_latency_seconds: float = 0.0
    in_latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """One codec, or one family of codecs; bytes are those of the decoded tensor."""

    encode_bytes_per_second: float
    decode_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A card, as far as it is needed to estimate how long ops recorded elsewhere take on it.

    flops_per_second: by dtype ("float32").
    efficiency: by kind of operator (`OPERATORS`): the share of these rates that it reaches. 1.0 if it is missing.
    workspace_nbytes: what libraries for products of matrices keep from their first call on, in torch's allocator.
    """

    nbytes: int
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    workspace_nbytes: int = 0

    def op_seconds(self, flops: int, nbytes: int, dtype: str = "float32", operator: str = "") -> float:
        """Seconds of an op that does `flops` and moves `nbytes` of the card's memory. `operator`: its name, "aten::mm". Raises
        ConfigError for a dtype without a rate.
        """
        rate = self.flops_per_second.get(dtype)
        if rate is None:
            raise ConfigError(
                f"the profile has no FLOP rate for {dtype}; use one of {', '.join(sorted(self.flops_per_second))}"
            )
        efficiency = self.efficiency.get(kind_of(operator), 1.0)
        return max(flops / rate, nbytes / self.bytes_per_second) / efficiency + self.launch_seconds


def kind_of(operator: str) -> str:
    """The kind of an operator ("aten::mm"), one of `OPERATORS`."""
    name = operator.rpartition("::")[2].partition(".")[0]
    if name in _PRODUCTS:
        return "matmul"
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), OPERATORS[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Links by tier, codecs by name or family ("block" stands for "block4" to "block16"), and the card if it is known."""

    name: str
    links: Mapping[str, Link] = field(default_factory=dict)
    codecs: Mapping[str, Coding] = field(default_factory=dict)
    device: Device | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> where its number comes from."""

    def out_seconds(self, tier: str, nbytes: int) -> float:
        link = self._link(tier)
        return link.out_latency_seconds + nbytes / link.out_bytes_per_second if nbytes else 0.0

    def in_seconds(self, tier: str, nbytes: int) -> float:
        link = self._link(tier)
        return link.in_latency_seconds + nbytes / link.in_bytes_per_second if nbytes else 0.0

    def encode_seconds(self, codec: str, nbytes: int) -> float:
        return nbytes / self._coding(codec).encode_bytes_per_second

    def decode_seconds(self, codec: str, nbytes: int) -> float:
        return nbytes / self._coding(codec).decode_bytes_per_second

    def knows(self, codec: str) -> bool:
        """Whether there is a rate for the codec."""
        return codec in self.codecs or codec.rstrip("0123456789") in self.codecs

    def _link(self, tier: str) -> Link:
        if tier not in self.links:
            known = ", ".join(self.links) or "none"
            raise ConfigError(f"the rates {self.name!r} have no link to the tier {tier!r}, only to: {known}; measure it")
        return self.links[tier]

    def _coding(self, codec: str) -> Coding:
        coding = self.codecs.get(codec) or self.codecs.get(codec.rstrip("0123456789"))
        if coding is None:
            known = ", ".join(self.codecs) or "none"
            raise ConfigError(f"the rates {self.name!r} have none for the codec {codec}, only for: {known}; measure it")
        return coding

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema": SCHEMA} | asdict(self)

    @classmethod
    def from_json(cls, obj: object) -> MachineRates:
        """Raises PlanFileError with the field, and the reason."""
        if not isinstance(obj, dict) or obj.get("format") != FORMAT:
            shown = repr(obj.get("format"))[:80] if isinstance(obj, dict) else type(obj).__name__
            raise PlanFileError(f'"format" is {shown}, not "{FORMAT}": this is not a file of rates; give the path of one')
        top = Fields(obj, "rates", _FIELDS, (SCHEMA,))
        return cls(
            name=top.string("name"),
            links={key: Link(**_positive(top, f"links.{key}", value, Link)) for key, value in _table(top, "links")},
            codecs={key: Coding(**_positive(top, f"codecs.{key}", value, Coding)) for key, value in _table(top, "codecs")},
            device=None if obj["device"] is None else _device(top),
            sources={key: Fields({key: text}, "rates.sources", (key,)).string(key) for key, text in _table(top, "sources")},
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `read` can read. It is written whole or not at all. Raises PlanFileError."""
        obj = self.to_json()
        self.from_json(obj)
        jsonio.write(path, obj, indent=1)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> MachineRates:
        """The rates in the file at `path`. Raises PlanFileError."""
        obj = jsonio.read(path)
        try:
            return cls.from_json(obj)
        except PlanFileError as error:
            raise PlanFileError(f"{os.fspath(path)!r}: {error}") from error


def profiles() -> tuple[str, ...]:
    """The names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def profile(name: str) -> MachineRates:
    """A profile that comes with the package. Raises ConfigError for an unknown name."""
    if name not in profiles():
        raise ConfigError(f"there is no profile {name!r}; use one of {', '.join(profiles())}")
    return MachineRates.read(PROFILES / f"{name}.json")


def _table(fields: Fields, key: str) -> list[tuple[str, Any]]:
    value = fields.obj[key]
    if not isinstance(value, dict):
        fields.refuse(key, None, "not an object")
    return list(value.items())


def _positive(top: Fields, where: str, value: object, of: type[Link] | type[Coding]) -> dict[str, float]:
    """The fields of a link or a codec; all but latencies are above 0."""
    keys = tuple(of.__dataclass_fields__)
    inner = Fields(value, f"{top.where}.{where}", keys)
    numbers = {key: inner.number(key) for key in keys}
    for key, number in numbers.items():
        if number == 0 and not key.endswith("latency_seconds"):
            inner.refuse(key, None, "0, which would take forever")
    return numbers


def _device(top: Fields) -> Device:
    inner = top.inner("device", _DEVICE)
    device = Device(
        nbytes=inner.integer("nbytes", low=1),
        flops_per_second=_rates(inner, "flops_per_second"),
        bytes_per_second=inner.number("bytes_per_second"),
        launch_seconds=inner.number("launch_seconds"),
        efficiency=_rates(inner, "efficiency"),
        workspace_nbytes=inner.integer("workspace_nbytes"),
    )
    if device.bytes_per_second == 0:
        inner.refuse("bytes_per_second", None, "0, which would take forever")
    return device


def _rates(inner: Fields, key: str) -> dict[str, float]:
    """A table of numbers above 0."""
    table = _table(inner, key)
    rates = Fields(dict(table), f"{inner.where}.{key}", tuple(name for name, _ in table))
    for name, _ in table:
        if rates.number(name) == 0:
            rates.refuse(name, None, "0, which would take forever")
    return {name: rates.number(name) for name, _ in table}
