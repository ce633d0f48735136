"""Measure how fast this machine's tiers and codecs are, by a few real copies each way in two sizes, in less than a second.

Output: `plan.rates.rates`, in bytes per second. A copy of n bytes is assumed to take `latency + n / rate` seconds; the medians
at two sizes give both numbers. Codecs are measured on the first of float32, bfloat16 and bool that they accept, and their
bytes are those of the decoded tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of
from lightning_memopt.plan.rates import Coding, Link, MachineRates

SMALL_NBYTES = 256 << 10
MOST_ROUNDS = 5
_LEAST_TIMES_SMALL, _TIMES_SMALL = 8, 32
"""The large copy as a multiple of the small one: in a small tier, and at most (8 MiB)."""
_CODED = (16, 64, 16, 16)
"""Shape of the tensor on which codecs are measured."""
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
    clock: Callable[[], float] = perf_counter,
) -> MachineRates:
    """The rates of these tiers and codecs on this machine, measured for about `seconds` in total.

    Raises the tier's OffloadError if a tier fails, or has no space for one copy. A codec that accepts none of float32, bfloat16
    and bool is left out.
    """
    device, tiers, codecs = torch.device(device), tuple(tiers), tuple(codecs)
    share = seconds / max(1, len(tiers) + len(codecs))
    links = {tier.name: _link(tier, device, share, clock) for tier in tiers}
    codings = {codec.name: _coding(codec, device, share, clock) for codec in codecs}
    return MachineRates(
        name="measured",
        links=links,
        codecs={name: coding for name, coding in codings.items() if coding is not None},
        sources={"links": f"measured on {device}", "codecs": f"measured on {device}"},
    )


def fit(small: int, small_seconds: float, large: int, large_seconds: float) -> tuple[float, float]:
    """(bytes per second, latency in seconds) of the line through two measured copies.

    If noise gives a negative slope or latency, the line goes through 0 and the large copy.
    """
    slope = (large_seconds - small_seconds) / (large - small) if large > small else 0.0
    latency = small_seconds - small * slope
    if slope <= 0 or latency < 0:
        return large / max(large_seconds, 1e-9), 0.0
    return 1 / slope, latency


def seconds_of(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds until the device has finished an action."""
    synchronize = backend_of(device).synchronize
    synchronize()
    began = clock()
    action()
    synchronize()
    return clock() - began


def _link(tier: _Tier, device: torch.device, share: float, clock: Callable[[], float]) -> Link:
    deadline = clock() + share
    small = max(1, min(SMALL_NBYTES, tier.capacity_nbytes // _LEAST_TIMES_SMALL))
    first = sum(_round_trip(tier, small, device, clock))  # a warm-up, whose time limits the size of the large copy
    times = min(max(2, int(share / (8 * max(first, 1e-9)))), _TIMES_SMALL)
    large = max(small, min(small * times, tier.capacity_nbytes))
    taken: dict[int, list[tuple[float, float]]] = {small: [], large: []}
    for _ in range(MOST_ROUNDS):
        for nbytes, pairs in taken.items():
            pairs.append(_round_trip(tier, nbytes, device, clock))
        if clock() > deadline:
            break
    out = {nbytes: median(out_seconds for out_seconds, _ in pairs) for nbytes, pairs in taken.items()}
    back = {nbytes: median(in_seconds for _, in_seconds in pairs) for nbytes, pairs in taken.items()}
    out_rate, out_latency = fit(small, out[small], large, out[large])
    in_rate, in_latency = fit(small, back[small], large, back[large])
    return Link(
        out_bytes_per_second=out_rate,
        in_bytes_per_second=in_rate,
        out_latency_seconds=out_latency,
        in_latency_seconds=in_latency,
    )


def _round_trip(tier: _Tier, nbytes: int, device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """(seconds out, seconds back) of one copy of `nbytes` bytes."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    parked: list[_Parked] = []

    def park() -> None:
        parked.append(tier.store(source, "a copy that is timed"))
        parked[0].wait_stored()

    def fetch() -> None:
        parked[0].fetch(out)
        parked[0].wait_fetched()

    try:
        return seconds_of(park, device, clock), seconds_of(fetch, device, clock)
    finally:
        for copy in parked:
            copy.release()


def _coding(codec: _Codec, device: torch.device, share: float, clock: Callable[[], float]) -> Coding | None:
    """The rates of one codec, measured for `share` seconds; None if it accepts none of `_DTYPES`."""
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
        encode_seconds = seconds_of(lambda: codec.encode(t, encoded), device, clock)
        decode_seconds = seconds_of(lambda: codec.decode(encoded, out), device, clock)
        out_of_time = clock() > deadline
        if i > 0 or out_of_time:  # the first round is a warm-up, unless there is no time for another
            taken.append((encode_seconds, decode_seconds))
        if out_of_time:
            break
    nbytes = t.numel() * t.element_size()
    encode = max(median(encode_seconds for encode_seconds, _ in taken), 1e-9)
    decode = max(median(decode_seconds for _, decode_seconds in taken), 1e-9)
    return Coding(encode_bytes_per_second=nbytes / encode, decode_bytes_per_second=nbytes / decode)
