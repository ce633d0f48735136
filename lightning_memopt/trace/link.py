"""How fast this machine's tiers and codecs are: a few real copies of two sizes each way, in less than a second.

A copy of n bytes is taken to last `latency + n / rate`: medians at two sizes give both. Codecs are given what they accept of
float32, bfloat16 and bool. Bytes per second everywhere; for codecs, bytes of what is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from lightning_memopt.plan.rates import Coding, Link, MachineRates

SMALL_NBYTES = 256 << 10
MOST_ROUNDS = 5
_TIMES_SMALL = 32  # the large copy, at most: 8 MiB
_CODED = (16, 64, 16, 16)
_DTYPES = (torch.float32, torch.bfloat16, torch.bool)


class _Parked(Protocol):
    def wait_stored(self) -> None: ...
    def fetch(self, out: Tensor) -> None: ...
    def wait_fetched(self) -> None: ...
    def release(self) -> None: ...


class _Tier(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def capacity_nbytes(self) -> int: ...
    def store(self, t: Tensor, what: str) -> _Parked: ...


class _Codec(Protocol):
    @property
    def name(self) -> str: ...
    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool: ...
    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int: ...
    def encode(self, t: Tensor, out: Tensor) -> None: ...
    def decode(self, encoded: Tensor, out: Tensor) -> None: ...


def measure(
    tiers: Iterable[_Tier],
    device: torch.device | str,
    codecs: Iterable[_Codec] = (),
    *,
    seconds: float = 0.8,
    clock: Callable[[], float] = time.perf_counter,
) -> MachineRates:
    """The rates of these tiers and codecs on this machine, measured for about `seconds` in all.

    A tier needs room for one copy; one that has none, or fails, raises its OffloadError. A codec that accepts none of float32,
    bfloat16 and bool is left out.
    """
    device, tiers, codecs = torch.device(device), tuple(tiers), tuple(codecs)
    share = seconds / max(1, len(tiers) + len(codecs))
    links = {tier.name: _link(tier, device, share, clock) for tier in tiers}
    found = {codec.name: coding for codec in codecs if (coding := _coding(codec, device, share, clock)) is not None}
    return MachineRates(
        name="measured",
        links=links,
        codecs=found,
        sources={"links": f"measured on {device}", "codecs": f"measured on {device}"},
    )


def fit(small: int, small_seconds: float, large: int, large_seconds: float) -> tuple[float, float]:
    """(bytes per second, latency): the line through two copies that took so long, or one through 0 where noise leaves none."""
    slope = (large_seconds - small_seconds) / (large - small) if large > small else 0.0
    latency = small_seconds - small * slope
    if slope <= 0 or latency < 0:
        return large / max(large_seconds, 1e-9), 0.0
    return 1 / slope, latency


def _seconds(action: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    """What an action takes until the device is done with it."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    began = clock()
    action()
    synchronize(device)
    return clock() - began


def _link(tier: _Tier, device: torch.device, share: float, clock: Callable[[], float]) -> Link:
    deadline = clock() + share
    small = max(1, min(SMALL_NBYTES, tier.capacity_nbytes))
    first = sum(_round_trip(tier, small, device, clock))  # also warms up; says how large the large copy may be
    times = min(max(2, int(share / (8 * max(first, 1e-9)))), _TIMES_SMALL)
    large = max(small, min(small * times, tier.capacity_nbytes))
    taken: dict[int, list[tuple[float, float]]] = {small: [], large: []}
    for _ in range(MOST_ROUNDS):
        for nbytes, found in taken.items():
            found.append(_round_trip(tier, nbytes, device, clock))
        if clock() > deadline:
            break
    out, back = ({nbytes: median(pair[way] for pair in found) for nbytes, found in taken.items()} for way in (0, 1))
    out_rate, out_latency = fit(small, out[small], large, out[large])
    in_rate, in_latency = fit(small, back[small], large, back[large])
    return Link(
        out_bytes_per_second=out_rate,
        in_bytes_per_second=in_rate,
        out_latency_seconds=out_latency,
        in_latency_seconds=in_latency,
    )


def _round_trip(tier: _Tier, nbytes: int, device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds out and back of one copy."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    parked: list[_Parked] = []

    def away() -> None:
        parked.append(tier.store(source, "a copy that is timed"))
        parked[0].wait_stored()

    def back() -> None:
        parked[0].fetch(out)
        parked[0].wait_fetched()

    try:
        return _seconds(away, device, clock), _seconds(back, device, clock)
    finally:
        for one in parked:
            one.release()


def _coding(codec: _Codec, device: torch.device, share: float, clock: Callable[[], float]) -> Coding | None:
    dtype = next((dtype for dtype in _DTYPES if codec.accepts(_CODED, dtype)), None)
    if dtype is None:
        return None
    deadline = clock() + share
    values = torch.arange(torch.Size(_CODED).numel(), device=device).reshape(_CODED).remainder(251).sub(125)
    t = values.gt(0) if dtype == torch.bool else values.to(dtype)
    encoded = torch.empty(codec.encoded_nbytes(_CODED, dtype), dtype=torch.uint8, device=device)
    out = torch.empty_like(t)
    taken: list[tuple[float, float]] = []
    for i in range(MOST_ROUNDS + 1):
        encode = _seconds(lambda: codec.encode(t, encoded), device, clock)
        pair = encode, _seconds(lambda: codec.decode(encoded, out), device, clock)
        late = clock() > deadline
        if i or late:  # the first warms up
            taken.append(pair)
        if late:
            break
    nbytes = t.numel() * t.element_size()
    encode, decode = (max(median(pair[way] for pair in taken), 1e-9) for way in (0, 1))
    return Coding(encode_bytes_per_second=nbytes / encode, decode_bytes_per_second=nbytes / decode)
