"""Energy: what the sources give, and what becomes of those that fail. No real clock."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import EnergyUnavailableError
from lightning_memopt.telemetry import EnergyMeter, nvml_source, rapl_sources
from lightning_memopt.telemetry.sources import EnergyCounter, PowerSampler
from tests.cpu.lib.fake_nvml import Board, Clock, FakeNvml, install


def meter_of(device: torch.device, clock: Clock) -> EnergyMeter:
    return EnergyMeter("the board", lambda: [nvml_source(device, clock)])


# -- NVML ----------------------------------------------------------------------------------------------


def test_devices_are_found_by_uuid(monkeypatch: Any, clock: Clock) -> None:
    """CUDA's order is not NVML's: each device gets the joules of its own board. Prefixes and none are the same device."""
    nvml = FakeNvml([Board("one", clock, watts=10), Board("two", clock, watts=20), Board("three", clock, watts=30)])
    device = install(monkeypatch, nvml, ["three", "GPU-one", "two"])
    meters = [meter_of(device(i), clock) for i in range(3)]
    clock.after(5)
    assert [meter.take() for meter in meters] == [150.0, 50.0, 100.0]
    assert backend_of(device(1)).uuid == "one" and meters[1].keys == ("GPU-one",) and not meters[1].approximate
    for meter in meters:
        meter.close()
        meter.close()
    assert nvml.open == 0, "every nvmlInit has its nvmlShutdown"


@pytest.mark.parametrize("modulus", [1 << 32, 1 << 64])
def test_a_counter_that_wraps(monkeypatch: Any, clock: Clock, modulus: int) -> None:
    board = Board("a", clock, watts=400, counted=modulus - 45_000_000, modulus=modulus)
    meter = meter_of(install(monkeypatch, FakeNvml([board]))(0), clock)
    found = []
    for _ in range(5):
        clock.after(4)
        found.append(meter.take())
    assert found == [pytest.approx(1600.0)] * 5
    assert board.counted + 1e3 * board.watts * clock.now > modulus, "it did wrap"


def test_a_counter_that_is_reset(monkeypatch: Any, clock: Clock) -> None:
    """One that goes back, or leaps farther than any board could, says nothing of that stretch, and goes on from there."""
    board = Board("a", clock, counted=7_000_000_000)
    meter = meter_of(install(monkeypatch, FakeNvml([board]))(0), clock)
    found = []
    for counted in (7_000_000_000, 3_000_000, 3_000_000, 1 << 50, 1 << 50):
        board.counted = counted
        clock.after(2)
        found.append(meter.take())
    assert found == [200.0, None, 200.0, None, 200.0]


def test_o1_no_counter_before_volta(monkeypatch: Any, clock: Clock) -> None:
    """O1: power is sampled and integrated, and marked as approximate."""
    board = Board("a", clock, watts=50, raises={"energy": "NotSupported"})
    nvml = FakeNvml([board])
    device = install(monkeypatch, nvml)(0)
    source = nvml_source(device, clock)
    assert isinstance(source, PowerSampler) and source.approximate
    source.close()
    assert nvml.open == 0 and not any(t.name == "memopt-power" for t in threading.enumerate())
    meter = meter_of(device, clock)
    assert meter.approximate and meter.available
    meter.close()


def test_power_is_integrated(clock: Clock) -> None:
    """By trapezoids: exact for power that is linear between samples."""
    sampler = PowerSampler("a", lambda: 10.0 * clock.now, clock, period=0)
    for seconds in (0.5, 1.5, 2.0):
        clock.after(seconds)
        sampler.sample()
    clock.after(1.0)
    assert sampler.take() == pytest.approx(5.0 * (105.0**2 - 100.0**2))
    assert sampler.take() == 0.0


def test_the_sampling_thread(clock: Clock) -> None:
    """It samples, ends when closed or forgotten, and an error in it reaches who asks, not the thread's stderr."""
    sampled, seen = threading.Event(), threading.Event()

    def watts() -> float:
        if threading.current_thread().name == "memopt-power":
            sampled.set()
        return 1.0

    def fails() -> float:
        if threading.current_thread().name == "memopt-power":
            sampled.set()
            assert seen.wait(60)
            raise RuntimeError("gone")
        return 1.0

    def sampling() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "memopt-power"]

    sampler = PowerSampler("a", watts, clock, period=1e-3)
    assert sampled.wait(60) and sampling()
    sampler.close()
    assert not sampling()
    sampler = PowerSampler("a", watts, clock, period=1e-3)
    forgotten, (thread,) = weakref.ref(sampler), sampling()
    del sampler
    gc.collect()
    thread.join(60)
    assert forgotten() is None and not thread.is_alive()
    sampled.clear()
    sampler = PowerSampler("a", fails, clock, period=1e-3)
    (thread,) = sampling()
    seen.set()
    thread.join(60)
    with pytest.raises(EnergyUnavailableError, match="gone"):
        sampler.take()


def unavailable(open_sources: Any, match: str) -> None:
    """One warning, which says why; nothing raised, no number, then or later, and no other warning."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        meter = EnergyMeter("the board", open_sources)
        assert not meter.available and meter.failed and meter.keys == ()
        meter.poll()
        assert meter.take() is None and meter.take() is None
        meter.close()
    assert len(said) == 1 and match in str(said[0].message) and "no energy is reported for the board" in str(said[0].message)


@pytest.mark.parametrize("how", ["board", "slice"])
def test_o2_mig(monkeypatch: Any, clock: Clock, how: str) -> None:
    """O2: a slice has no energy of its own, whichever UUID CUDA gives; that of the board is not taken for it."""
    nvml = FakeNvml([Board("a", clock, sliced=True)], ["MIG-s"])
    device = install(monkeypatch, nvml, ["a" if how == "board" else "s"])(0)
    unavailable(lambda: [nvml_source(device, clock)], "MIG")
    assert nvml.open == 0


def test_a_board_that_could_be_sliced(monkeypatch: Any, clock: Clock) -> None:
    device = install(monkeypatch, FakeNvml([Board("a", clock, sliced=False)]))(0)
    assert meter_of(device, clock).available


@pytest.mark.parametrize("error", ["NotSupported", "NoPermission", "GpuIsLost", "Unknown"])
def test_p31_neither_energy_nor_power(monkeypatch: Any, clock: Clock, error: str) -> None:
    nvml = FakeNvml([Board("a", clock, raises={"energy": error, "power": error})])
    device = install(monkeypatch, nvml)(0)
    unavailable(lambda: [nvml_source(device, clock)], "neither its energy")
    assert nvml.open == 0


@pytest.mark.parametrize("error", ["LibraryNotFound", "DriverNotLoaded", "NoPermission"])
def test_p31_nvml_does_not_begin(monkeypatch: Any, clock: Clock, error: str) -> None:
    device = install(monkeypatch, FakeNvml([Board("a", clock)], begins=error))(0)
    unavailable(lambda: [nvml_source(device, clock)], "cannot be started")


def test_p31_no_module(monkeypatch: Any, clock: Clock) -> None:
    device = install(monkeypatch, None)(0)
    unavailable(lambda: [nvml_source(device, clock)], "install nvidia-ml-py")


def test_p31_unknown_device_and_others(monkeypatch: Any, clock: Clock) -> None:
    device = install(monkeypatch, FakeNvml([Board("a", clock)]), ["b"])(0)
    unavailable(lambda: [nvml_source(device, clock)], "knows no device GPU-b")
    unavailable(lambda: [nvml_source(torch.device("meta"), clock)], "not an NVIDIA GPU")


def test_no_value_is_no_number(monkeypatch: Any, clock: Clock) -> None:
    """NVML_VALUE_NOT_AVAILABLE is not taken for joules: power is sampled instead; nor for watts."""
    nvml = FakeNvml([Board("a", clock, watts=0.0, counted=(1 << 64) - 1)])
    device = install(monkeypatch, nvml)(0)
    source = nvml_source(device, clock)
    assert source.approximate
    source.close()
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", lambda handle: (1 << 32) - 1)
    unavailable(lambda: [nvml_source(device, clock)], "its power has no value")


def test_p31_lost_on_the_way(monkeypatch: Any, clock: Clock) -> None:
    """A device that is lost in training: one warning, no number from then on."""
    board = Board("a", clock)
    nvml = FakeNvml([board])
    meter = meter_of(install(monkeypatch, nvml)(0), clock)
    clock.after(1)
    assert meter.take() == 100.0
    board.raises["energy"] = "GpuIsLost"
    with pytest.warns(UserWarning, match="no energy is reported for the board") as said:
        assert meter.take() is None
    assert len(said) == 1 and meter.failed and nvml.open == 0
    board.raises.clear()
    assert meter.take() is None, "what was missed does not come back"


def test_one_of_several_that_fails(clock: Clock) -> None:
    """The sum over some of the sources is not a number either."""
    counts = [EnergyCounter(str(i), lambda: int(1e6 * clock.now), 1e-6, (1 << 60,), 500.0, clock) for i in range(2)]
    meter = EnergyMeter("both", lambda: counts)
    clock.after(3)
    assert meter.take() == pytest.approx(6.0) and meter.keys == ("0", "1")
    counts[1]._read = lambda: 1 // 0
    with pytest.warns(UserWarning, match="for both"):
        assert meter.take() is None


# -- RAPL ----------------------------------------------------------------------------------------------


def domain(root: Path, name: str, kind: str, count: int, most: int = 10**10 - 1) -> Path:
    path = root / name
    path.mkdir(parents=True)
    for file, value in {"name": kind, "energy_uj": count, "max_energy_range_uj": most}.items():
        (path / file).write_text(f"{value}\n")
    return path / "energy_uj"


def test_rapl_sums_packages(tmp_path: Path, clock: Clock) -> None:
    """Parts of a package, and the platform that they are part of, are not counted twice."""
    one = domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    two = domain(tmp_path, "intel-rapl:1", "package-1", 9_998_000_000)
    for name, kind in [("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")]:
        domain(tmp_path, name, kind, 0)
    meter = EnergyMeter("the processors", lambda: rapl_sources(tmp_path, clock))
    assert meter.keys == ("intel-rapl:0", "intel-rapl:1")
    clock.after(2)
    one.write_text("25000000\n")
    two.write_text("8000000\n")  # wrapped after 9,999,999,999
    assert meter.take() == pytest.approx(20.0 + 10.0, rel=0, abs=1e-7)
    clock.after(1000)  # at what no processor takes it could have come around more than once
    assert meter.take() is None
    clock.after(1)
    assert meter.take() == 0.0


def test_rapl_unavailable(monkeypatch: Any, tmp_path: Path, clock: Clock) -> None:
    unavailable(lambda: rapl_sources(tmp_path / "none", clock), "no counter of a package")
    file = domain(tmp_path, "intel-rapl:0", "package-0", 1)
    file.write_text("what\n")
    unavailable(lambda: rapl_sources(tmp_path, clock), "cannot be read")

    def denied(path: Path, *_: Any) -> str:
        raise PermissionError(13, "denied", str(path))

    monkeypatch.setattr(Path, "read_text", denied)
    unavailable(lambda: rapl_sources(tmp_path, clock), "not readable for this user")
