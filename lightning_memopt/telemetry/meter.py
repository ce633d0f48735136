"""Meter: samples per second, joules per sample and peak memory of any training loop.

    with Meter(device) as meter:
        for x, y in loader:
            ...
            meter.step(samples=len(x))
    print(meter.rates())

Time is cut into *stretches*; the device is synchronised at their edges, and nowhere else. A stretch counts as *steady* where
all its batches were as all later ones will be: after the warm-up, and where `steady` says so (no recording, no verifying).
Energy is read at the first edge that comes `MIN_SECONDS` or more after it was read last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

import torch

from lightning_memopt.telemetry.energy import EnergyMeter
from lightning_memopt.telemetry.nvml import nvml_source
from lightning_memopt.telemetry.rapl import rapl_sources
from lightning_memopt.telemetry.rates import MIN_SECONDS, Energy, Rates, Tally
from lightning_memopt.telemetry.sources import Clock

_POLL_SECONDS = 10.0
"""Counters are read at least as often, where steps are: RAPL's wrap within minutes."""


class MeterOptions(TypedDict, total=False):
    """What `Run.monitor` passes on: it knows the device, and which steps are steady."""

    cpu: bool
    every: int
    warmup: int
    before: Rates | None
    clock: Clock
    energies: Mapping[str, EnergyMeter] | None


class Meter:
    """Begins to measure at once.

    Args:
        device: what is trained on, and synchronised; energy is read where it is an NVIDIA GPU.
        cpu: also read the energy of the processors' packages (RAPL).
        every: batches in a stretch; 0 leaves the edges to `lap`, `pause` and `stop`.
        warmup: batches at the beginning that do not count as steady.
        steady: whether the batch that just ended was as all later ones will be.
        before: what the same training reached without what is done to it now; shown beside.
        clock: seconds.
        energies: meters to use instead, by name: `"device"`, `"cpu"`.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        cpu: bool = False,
        every: int = 50,
        warmup: int = 3,
        steady: Callable[[], bool] = lambda: True,
        before: Rates | None = None,
        clock: Clock = time.perf_counter,
        energies: Mapping[str, EnergyMeter] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.before = before
        self.total, self.steady = Tally(), Tally()
        self._every, self._warmup, self._is_steady, self._clock = every, warmup, steady, clock
        self.energies = dict(_energies(self.device, cpu, clock) if energies is None else energies)
        self._approximate: dict[str, bool] = {}
        self._lap = self._now = self._long = Tally()
        self._now_steady = self._long_steady = True
        self._at: float | None = None  # where the stretch began; None between `pause` and `resume`
        self._ended = False
        self._polled = clock()
        self.resume()

    # -- a loop ------------------------------------------------------------------------------------

    def batch(self, samples: int) -> None:
        """A batch of so many samples is through, and its optimizer step is still to come (accumulation)."""
        self._count(Tally(batches=1, samples=samples))

    def step(self, samples: int) -> None:
        """A batch of so many samples is through, and the optimizer has stepped."""
        self._count(Tally(batches=1, steps=1, samples=samples))

    def pause(self) -> None:
        """What comes is no training (evaluation), until `resume`."""
        if self._at is not None:
            self._edge(close=True)
            self._at = None

    def resume(self) -> None:
        """Begin, or go on."""
        if self._at is None and not self._ended:
            self._synchronize()
            for energy in self.energies.values():
                energy.take()  # what was used meanwhile
            self._at = self._clock()

    def lap(self) -> Tally:
        """What there was since the last lap; its energy is of the stretches that ended with a reading in it."""
        if self._at is not None:
            self._edge()
        lap, self._lap = self._lap, Tally()
        return lap

    def stop(self) -> None:
        """The end: what was measured stays, what measures is let go."""
        self.pause()
        self.abandon()

    def abandon(self) -> None:
        """The end after an error: the open stretch is dropped, and the device not asked."""
        self._at, self._now, self._ended = None, Tally(), True
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

    def rates(self) -> Rates | None:
        """What the steady stretches come to, those that have ended; None before the first."""
        found = self.steady
        if found.samples_per_sec is None:
            return None
        # where the processors are what is trained on, their energy is the device's
        name = "cpu" if self.device.type == "cpu" and "device" not in found.energy else "device"
        energy = found.energy.get(name, Energy())
        return Rates(
            device=_name(self.device),
            steps=found.steps,
            samples_per_step=found.samples / found.steps if found.steps else None,
            samples_per_sec=found.samples_per_sec,
            joules_per_sample=energy.joules_per_sample,
            approximate=energy.samples > 0 and self._approximate[name],
            peak_nbytes=self.peak_nbytes(),
        )

    def peak_nbytes(self) -> int | None:
        """The most bytes reserved on the device since its statistics were last reset; None where nobody counts."""
        return int(torch.cuda.max_memory_reserved(self.device)) if self.device.type == "cuda" else None

    # -- stretches ---------------------------------------------------------------------------------

    def _count(self, one: Tally) -> None:
        if self._at is None:
            return
        self._warmup -= 1
        self._now += one
        self._now_steady &= self._warmup < 0 and self._is_steady()
        if not self._now_steady or self._now.batches == self._every:
            self._edge()  # the next batch may be steady: one that is not has a stretch of its own
        elif self.energies and self._clock() - self._polled > _POLL_SECONDS:
            self._polled = self._clock()
            for energy in self.energies.values():
                energy.poll()

    def _edge(self, close: bool = False) -> None:
        """End the stretch, and begin the next. `close`: that of the energy too, however short."""
        assert self._at is not None
        self._synchronize()
        at = self._clock()
        now, self._now = self._now + Tally(seconds=at - self._at), Tally()
        steady, self._now_steady = self._now_steady, True
        self._at = at
        self._long += now
        self._long_steady &= steady or not now.batches
        self._book(now, steady and now.batches > 0)  # a pause that follows a lap leaves time without a batch
        if close or self._long.seconds >= MIN_SECONDS:
            self._read()

    def _read(self) -> None:
        """End the stretch of the energy."""
        long, self._long = self._long, Tally()
        steady, self._long_steady = self._long_steady, True
        rated = long.seconds >= MIN_SECONDS
        energy = {}
        for name, meter in self.energies.items():
            joules = meter.take()
            if not meter.available:
                continue
            self._approximate[name] = meter.approximate
            known = rated and joules is not None
            energy[name] = Energy(joules, joules or 0.0, long.seconds, long.samples) if known else Energy(joules)
        self._book(Tally(energy=energy), steady)

    def _book(self, tally: Tally, steady: bool) -> None:
        self.total += tally
        self._lap += tally
        if steady:
            self.steady += tally

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _energies(device: torch.device, cpu: bool, clock: Clock) -> dict[str, EnergyMeter]:
    found = {}
    if device.type != "cpu":
        found["device"] = EnergyMeter(str(device), lambda: [nvml_source(device, clock)])
    if cpu:
        found["cpu"] = EnergyMeter("the processors", partial(rapl_sources, clock=clock))
    return found


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type
