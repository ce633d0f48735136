"""Meter: samples per second, joules per sample and peak memory of any training loop.

    with Meter(device) as meter:
        for x, y in loader:
            ...
            meter.step(samples=len(x))
    print(meter.rates())

Time is divided into *stretches*; the device is synchronised only at their ends. A stretch is *steady* if all its batches are
like all later ones: they come after the warm-up, and `steady` says so (nothing is recorded or verified). Energy is read at the
first end of a stretch that comes `MIN_SECONDS` or more after the last reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.telemetry.energy import EnergyMeter
from lightning_memopt.telemetry.nvml import nvml_source
from lightning_memopt.telemetry.rapl import rapl_sources
from lightning_memopt.telemetry.sources import Clock
from lightning_memopt.telemetry.throughput import MIN_SECONDS, Energy, Tally, Throughput

_POLL_SECONDS = 10.0
"""Maximum seconds between two readings of the counters while batches are counted, because RAPL's counters wrap in minutes."""


class MeterOptions(TypedDict, total=False):
    """The options of a `Meter` that `Run.monitor` passes on; `Run` itself gives `device` and `steady`."""

    cpu: bool
    every: int
    warmup: int
    before: Throughput | None
    clock: Clock
    energies: Mapping[str, EnergyMeter] | None


class Meter:
    """Measures a training loop, beginning when it is created.

    Args:
        device: the training device, which is synchronised. Its energy is read if it is an NVIDIA GPU.
        cpu: also read the energy of the processors' packages (RAPL).
        every: batches of a stretch; 0: only `lap`, `pause` and `stop` end a stretch.
        warmup: number of first batches that are not steady.
        steady: whether the batch that just ended was like all later ones.
        before: throughput of the same training without the change that is measured now; reports show it for comparison.
        clock: gives seconds.
        energies: energy meters to use instead of the default ones, by name: `"device"`, `"cpu"`.

    Attributes:
        total: counts of all stretches.
        steady: counts of the steady stretches.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        cpu: bool = False,
        every: int = 50,
        warmup: int = 3,
        steady: Callable[[], bool] = lambda: True,
        before: Throughput | None = None,
        clock: Clock = perf_counter,
        energies: Mapping[str, EnergyMeter] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._backend = backend_of(self.device)
        self.before = before
        self.total, self.steady = Tally(), Tally()
        self._every, self._warmup, self._is_steady, self._clock = every, warmup, steady, clock
        self.energies = dict(_energies(self.device, cpu, clock) if energies is None else energies)
        self._approximate: dict[str, bool] = {}
        self._lap = Tally()  # since the last `lap`
        self._stretch = Tally()  # the open stretch; its seconds are added at its end
        self._stretch_steady = True
        self._energy_stretch = Tally()  # since energy was last read; one or more stretches
        self._energy_stretch_steady = True
        self._stretch_began: float | None = None  # in seconds of the clock; None between `pause` and `resume`
        self._ended = False
        self._polled_at = clock()
        self.resume()

    # -- a loop ------------------------------------------------------------------------------------

    def batch(self, samples: int) -> None:
        """Count a batch of `samples` samples that ended without an optimizer step (gradients are accumulated)."""
        self._count(Tally(batches=1, samples=samples))

    def step(self, samples: int) -> None:
        """Count a batch of `samples` samples that ended with an optimizer step."""
        self._count(Tally(batches=1, steps=1, samples=samples))

    def pause(self) -> None:
        """Stop measuring until `resume`, for example during evaluation."""
        if self._stretch_began is not None:
            self._end_stretch(read_energy=True)
            self._stretch_began = None

    def resume(self) -> None:
        """Measure again after `pause`."""
        if self._stretch_began is None and not self._ended:
            self._synchronize()
            for energy in self.energies.values():
                energy.take()  # joules of the pause do not count
            self._stretch_began = self._clock()

    def lap(self) -> Tally:
        """The counts since the last lap. Their energy is that of the readings since then, which may cover other stretches."""
        if self._stretch_began is not None:
            self._end_stretch()
        lap, self._lap = self._lap, Tally()
        return lap

    def stop(self) -> None:
        """End the measurement and close the energy meters. The results stay available."""
        self.pause()
        self.abandon()

    def abandon(self) -> None:
        """End the measurement after an error: drop the open stretch, and do not synchronise the device."""
        self._stretch_began = None
        self._stretch = Tally()
        self._ended = True
        for energy in self.energies.values():
            energy.close()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.abandon()

    # -- results -----------------------------------------------------------------------------------

    def rates(self) -> Throughput | None:
        """The throughput of the steady stretches that have ended; None before the first one has."""
        steady = self.steady
        if steady.samples_per_sec is None:
            return None
        # if the training device is the CPU, its energy is that of the processors
        name = "cpu" if on_host(self.device) and "device" not in steady.energy else "device"
        energy = steady.energy.get(name, Energy())
        return Throughput(
            device=self._backend.name,
            steps=steady.steps,
            samples_per_step=steady.samples / steady.steps if steady.steps else None,
            samples_per_sec=steady.samples_per_sec,
            joules_per_sample=energy.joules_per_sample,
            approximate=energy.samples > 0 and self._approximate[name],
            peak_nbytes=self.peak_nbytes(),
        )

    def peak_nbytes(self) -> int | None:
        """Maximum bytes of the device, as a budget counts them, since its statistics were last reset; None on the CPU."""
        return self._backend.peak_nbytes() if self._backend.keeps_statistics else None

    # -- stretches ---------------------------------------------------------------------------------

    def _count(self, batch: Tally) -> None:
        if self._stretch_began is None:
            return
        self._warmup -= 1
        self._stretch += batch
        if self._warmup >= 0 or not self._is_steady():
            self._stretch_steady = False
        if not self._stretch_steady or self._stretch.batches == self._every:
            self._end_stretch()  # the next batch may be steady, so a batch that is not ends its stretch
        elif self.energies and self._clock() - self._polled_at > _POLL_SECONDS:
            self._polled_at = self._clock()
            for energy in self.energies.values():
                energy.poll()

    def _end_stretch(self, read_energy: bool = False) -> None:
        """End the stretch and begin the next. `read_energy`: read energy even if less than `MIN_SECONDS` passed."""
        assert self._stretch_began is not None
        self._synchronize()
        now = self._clock()
        stretch, steady = self._stretch + Tally(seconds=now - self._stretch_began), self._stretch_steady
        self._stretch, self._stretch_steady, self._stretch_began = Tally(), True, now
        self._energy_stretch += stretch
        if stretch.batches and not steady:
            self._energy_stretch_steady = False
        self._add(stretch, steady and stretch.batches > 0)  # a pause right after a lap leaves time without a batch
        if read_energy or self._energy_stretch.seconds >= MIN_SECONDS:
            self._read_energy()

    def _read_energy(self) -> None:
        """Read the joules of the stretches since the last reading, and add them to the results."""
        stretch, steady = self._energy_stretch, self._energy_stretch_steady
        self._energy_stretch, self._energy_stretch_steady = Tally(), True
        long_enough = stretch.seconds >= MIN_SECONDS
        energy = {}
        for name, meter in self.energies.items():
            joules = meter.take()
            if not meter.available:
                continue
            self._approximate[name] = meter.approximate
            if long_enough and joules is not None:
                energy[name] = Energy(joules, joules, stretch.seconds, stretch.samples)
            else:
                energy[name] = Energy(joules)
        self._add(Tally(energy=energy), steady)

    def _add(self, tally: Tally, steady: bool) -> None:
        """Add counts to the results; `steady`: also to those of steady stretches."""
        self.total += tally
        self._lap += tally
        if steady:
            self.steady += tally

    def _synchronize(self) -> None:
        self._backend.synchronize()


def _energies(device: torch.device, cpu: bool, clock: Clock) -> dict[str, EnergyMeter]:
    """Name -> energy meter of the training device (unless it is the CPU) and, with `cpu`, of the processors."""
    meters = {}
    if not on_host(device):
        meters["device"] = EnergyMeter(str(device), lambda: [nvml_source(device, clock)])
    if cpu:
        meters["cpu"] = EnergyMeter("the processors", partial(rapl_sources, clock=clock))
    return meters
