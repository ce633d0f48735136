"""What a meter makes of time and energy in a loop, and the file its rates are kept in. No real clock."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.errors import PlanFileError
from lightning_memopt.telemetry import EnergyMeter, Meter, Throughput, read_throughput
from lightning_memopt.telemetry.sources import EnergyCounter
from tests.cpu.lib.fake_nvml import Clock


def counting(clock: Clock, watts: float = 100.0) -> EnergyMeter:
    counter = lambda: EnergyCounter("a", lambda: int(1e3 * watts * clock.now), 1e-3, (1 << 64,), 500.0, clock)  # noqa: E731
    return EnergyMeter("fake", lambda: [counter()])


def loop(meter: Meter, clock: Clock, batches: int, seconds: float, samples: int = 4) -> None:
    for _ in range(batches):
        clock.after(seconds)
        meter.step(samples)


def test_o5_windows(monkeypatch: Any, clock: Clock) -> None:
    """O5: the device is synchronised where energy and time are read, and nowhere else; stretches last a second or more."""
    synchronised: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: synchronised.append(clock.now))
    read: list[float] = []

    def count() -> int:
        read.append(clock.now)
        return int(1e5 * clock.now)

    energy = EnergyMeter("fake", lambda: [EnergyCounter("a", count, 1e-3, (1 << 64,), 500.0, clock)])
    meter = Meter("cuda:0", every=4, warmup=0, clock=clock, energies={"device": energy})
    assert synchronised == [100.0]
    loop(meter, clock, 12, 0.125)
    assert synchronised == [100.0, 100.5, 101.0, 101.5]
    assert read == [100.0, 100.0, 101.0], "opened, begun, and after a second; not at the other edges"
    lap = meter.lap()
    assert (lap.samples, lap.steps, lap.seconds) == (48, 12, 1.5)
    assert (lap.energy["device"].joules, lap.energy["device"].seconds, lap.energy["device"].samples) == (100.0, 1.0, 32)
    loop(meter, clock, 3, 1.0)
    lap = meter.lap()
    assert (lap.energy["device"].joules, lap.energy["device"].samples) == (350.0, 16 + 12), "with what the lap before left"
    meter.stop()
    assert set(read) <= set(synchronised), "no energy was read while the device was at work"


def test_short_stretches_make_no_rate(clock: Clock) -> None:
    """Of evaluation after every half second of training there is a sum, and no rate."""
    meter = Meter(warmup=0, clock=clock, energies={"device": counting(clock)})
    for _ in range(6):
        loop(meter, clock, 5, 0.1)
        meter.pause()
        clock.after(3.0)
        meter.batch(1)
        meter.resume()
    meter.stop()
    energy = meter.total.energy["device"]
    assert energy.total_joules == pytest.approx(300.0, abs=0.01) and energy.watts is None and energy.joules_per_sample is None
    rates = meter.rates()
    assert rates is not None and rates.samples_per_sec == pytest.approx(40.0) and rates.joules_per_sample is None


def test_pauses_are_left_out(clock: Clock) -> None:
    meter = Meter(warmup=0, every=0, clock=clock, energies={"device": counting(clock)})
    loop(meter, clock, 2, 1.0)
    meter.pause()
    clock.after(50.0)
    meter.resume()
    loop(meter, clock, 2, 1.0)
    meter.stop()
    assert meter.total.seconds == 4.0 and meter.total.energy["device"].joules == pytest.approx(400.0)
    assert meter.total.energy["device"].joules_per_sample == pytest.approx(400.0 / 16)


def test_only_steady_steps_count(clock: Clock) -> None:
    """Not the warm-up, not what was observed, nor a stretch in which that came again; joules neither."""
    steady = True
    meter = Meter(warmup=2, every=3, steady=lambda: steady, clock=clock, energies={"device": counting(clock)})
    loop(meter, clock, 2, 9.0)
    assert meter.rates() is None
    steady = False
    loop(meter, clock, 2, 7.0)
    steady = True
    loop(meter, clock, 3, 1.0)
    assert (meter.steady.steps, meter.steady.seconds, meter.steady.energy["device"].joules) == (3, 3.0, pytest.approx(300.0))
    loop(meter, clock, 2, 1.0)
    steady = False
    loop(meter, clock, 1, 7.0)
    steady = True
    loop(meter, clock, 3, 1.0)
    meter.stop()
    assert (meter.steady.steps, meter.steady.seconds) == (6, 6.0)
    rates = meter.rates()
    assert rates is not None and rates.joules_per_sample == pytest.approx(100.0 / 4) and rates.steps == 6
    assert meter.total.steps == 13 and meter.total.energy["device"].total_joules == pytest.approx(100 * meter.total.seconds)


def test_the_warm_up(clock: Clock) -> None:
    meter = Meter(warmup=2, every=1, clock=clock)
    for i, steps in enumerate([0, 0, 1, 2]):
        loop(meter, clock, 1, 9.0 if i < 2 else 1.0)
        assert (meter.steady.steps, meter.steady.seconds) == (steps, float(steps))


def test_accumulated_batches(clock: Clock) -> None:
    with Meter(warmup=0, clock=clock) as meter:
        for _ in range(3):
            clock.after(1.0)
            meter.batch(samples=2)
            clock.after(3.0)
            meter.step(samples=6)
    rates = meter.rates()
    assert rates is not None and (rates.steps, rates.samples_per_step, rates.samples_per_sec) == (3, 8.0, 2.0)
    assert meter.total.step_seconds == 4.0 and meter.total.batches == 6


def test_an_error_asks_nobody(monkeypatch: Any, clock: Clock) -> None:
    """After an error the device may be gone: it is not synchronised, and what was open does not count."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(KeyError), Meter("cuda", warmup=0, every=2, clock=clock, energies={"device": counting(clock)}) as meter:
        loop(meter, clock, 3, 1.0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: 1 // 0)
        raise KeyError
    meter.stop()
    assert meter.total.steps == 2 and not meter.energies["device"].available


def test_counters_are_read_between_edges(clock: Clock) -> None:
    """A counter that wraps every 100 s is followed through a stretch of 300."""
    counter = EnergyCounter("a", lambda: int(clock.now * 1e4) % 10**6, 1e-2, (10**6,), 500.0, clock)
    joules = EnergyMeter("fake", lambda: [counter])
    meter = Meter(warmup=0, every=0, clock=clock, energies={"cpu": joules})
    loop(meter, clock, 320, 0.95)
    meter.stop()
    meter.resume()
    assert meter.total.energy["cpu"].total_joules == pytest.approx(100 * 304.0, abs=0.1)
    rates = meter.rates()
    assert rates is not None and rates.joules_per_sample == pytest.approx(95.0 / 4), "what is trained on is the processors"


def test_no_energy_where_nothing_is_measured(clock: Clock) -> None:
    """On the CPU nothing is looked for unless asked; no keys, no zeros."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meter = Meter("cpu", warmup=0, clock=clock)
        loop(meter, clock, 3, 2.0)
        meter.stop()
    rates = meter.rates()
    assert meter.total.energy == {} and rates is not None and rates.joules_per_sample is None and rates.peak_nbytes is None


def test_a_reset_leaves_the_sum_unknown(clock: Clock) -> None:
    """Throughput goes on with other stretches; a sum over all of them is none any more."""
    count = [0]
    energy = EnergyMeter("fake", lambda: [EnergyCounter("a", lambda: count[0], 1.0, (1 << 64,), 500.0, clock)])
    meter = Meter(warmup=0, every=1, clock=clock, energies={"device": energy})
    for value in (100, 200, 0, 100):
        count[0] = value
        loop(meter, clock, 1, 2.0)
    meter.stop()
    energies = meter.total.energy["device"]
    assert energies.total_joules is None and (energies.joules, energies.seconds, energies.samples) == (300.0, 6.0, 12)


# -- rates in a file -----------------------------------------------------------------------------------

RATES = Throughput(device="cpu", steps=5, samples_per_step=8.0, samples_per_sec=100.5, joules_per_sample=0.25, approximate=True)


def test_rates_in_a_file(tmp_path: Path) -> None:
    for rates in (RATES, replace(RATES, joules_per_sample=None, peak_nbytes=1 << 33, approximate=False)):
        rates.write(tmp_path / "rates.json")
        assert read_throughput(tmp_path / "rates.json") == rates
        older = json.loads((tmp_path / "rates.json").read_text())
        older |= {"schema": 1, "peak_bytes": older.pop("peak_nbytes")}
        (tmp_path / "older.json").write_text(json.dumps(older))
        assert read_throughput(tmp_path / "older.json") == rates
    assert "about 0.25 J/sample (the whole device, other programs included)" in RATES.text(), "O3"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "plan"},
        {"schema": 3},
        {"steps": None},
        {"steps": -1},
        {"steps": True},
        {"steps": 1.5},
        {"device": 3},
        {"approximate": 1},
        {"samples_per_sec": "fast"},
        {"other": 1},
    ],
    ids=str,
)
def test_bad_files_of_rates(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "rates.json"
    RATES.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanFileError, match="rates"):
        read_throughput(path)
