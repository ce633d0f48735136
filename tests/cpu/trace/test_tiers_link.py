"""MachineRates that are measured: of tiers whose speed is known, because the clock is theirs."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.runtime.tiers import DiskTier, HostTier
from lightning_memopt.trace.link import fit, measure


class Slow:
    """A tier that takes a latency and a time per byte each way, of its own clock."""

    name = "host"

    def __init__(self, out: tuple[float, float], back: tuple[float, float], capacity_nbytes: int = 1 << 30) -> None:
        self.out, self.back, self.capacity_nbytes = out, back, capacity_nbytes
        self.now = 0.0
        self.calls = self.open = 0

    def clock(self) -> float:
        return self.now

    def store(self, t: torch.Tensor, what: str) -> Any:
        self.calls += 1
        self.open += 1
        assert t.numel() <= self.capacity_nbytes
        noise = 1.5 if self.calls == 4 else 1.0  # one copy is disturbed: medians

        def take(way: tuple[float, float], factor: float) -> None:
            self.now += factor * (way[0] + t.numel() / way[1])

        def release() -> None:
            self.open -= 1

        return types.SimpleNamespace(
            wait_stored=lambda: take(self.out, noise),
            fetch=lambda out: None,
            wait_fetched=lambda: take(self.back, noise),
            release=release,
        )


def test_latency_and_rate_of_both_directions_are_found() -> None:
    tier = Slow(out=(2e-5, 12e9), back=(5e-5, 3e9))
    link = measure([tier], "cpu", clock=tier.clock).links["host"]
    assert link.out_bytes_per_second == pytest.approx(12e9) and link.out_latency_seconds == pytest.approx(2e-5)
    assert link.in_bytes_per_second == pytest.approx(3e9) and link.in_latency_seconds == pytest.approx(5e-5)
    assert tier.open == 0 and tier.now < 1


def test_slow_and_small_tiers_end_in_time() -> None:
    slow = Slow(out=(0.0, 1e7), back=(0.0, 1e7))
    link = measure([slow], "cpu", clock=slow.clock).links["host"]
    assert link.out_bytes_per_second == pytest.approx(1e7) and slow.now < 1
    small = Slow(out=(1e-3, 1e9), back=(1e-3, 1e9), capacity_nbytes=100)
    link = measure([small], "cpu", clock=small.clock).links["host"]
    assert link.out_bytes_per_second == pytest.approx(1e9) and link.out_latency_seconds == pytest.approx(1e-3)


def test_a_line_that_noise_has_turned_goes_through_zero() -> None:
    assert fit(100, 2.0, 200, 3.0) == (pytest.approx(100), pytest.approx(1.0))
    assert fit(100, 3.0, 200, 2.0) == (pytest.approx(100), 0.0)
    assert fit(100, 1.0, 200, 4.0) == (pytest.approx(50), 0.0)
    assert fit(100, 2.0, 100, 2.0) == (pytest.approx(50), 0.0)


class Halving:
    name = "halving"

    def __init__(self, accepted: Any = torch.bfloat16) -> None:
        self.accepted = accepted
        self.now = 0.0

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype == self.accepted

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return torch.Size(size).numel()

    def encode(self, t: torch.Tensor, out: torch.Tensor) -> None:
        assert t.dtype == self.accepted and out.dtype == torch.uint8 and out.numel() == t.numel()
        self.now += t.numel() * 2 / 1e9

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        self.now += out.numel() * 2 / 4e9


def test_codecs_are_measured_by_what_they_decode() -> None:
    codec = Halving()
    found = measure([], "cpu", [codec], clock=lambda: codec.now).codecs["halving"]
    assert found.encode_bytes_per_second == pytest.approx(1e9) and found.decode_bytes_per_second == pytest.approx(4e9)
    assert measure([], "cpu", [Halving(torch.complex64)]).codecs == {}, "it accepts nothing that is measured"


def test_real_tiers_have_rates_that_can_be_kept(tmp_path: Path) -> None:
    tiers = [HostTier(16 << 20, "cpu"), DiskTier(16 << 20, tmp_path)]
    try:
        rates = measure(tiers, torch.device("cpu"), seconds=0.2)
        assert all(tier.used_nbytes == 0 for tier in tiers)
    finally:
        for tier in tiers:
            tier.close()
    assert set(rates.links) == {"host", "disk"}
    for tier in rates.links:
        assert 0 < rates.out_seconds(tier, 1 << 20) < 60 and 0 < rates.in_seconds(tier, 1 << 20) < 60
    rates.write(tmp_path / "rates.json")
    assert MachineRates.read(tmp_path / "rates.json") == rates
