"""Joules of training steps, as a meter of the device has them, and what they say of steps that were not measured.

Counters of energy are read every 20 to 100 ms by what they count, and most steps take less: a step is repeated, for
`MIN_SECONDS`, and unwatched, because recording keeps a device waiting. A line through two batch sizes gives any other; what a
step takes beyond what was measured (rebuilds, copies) is priced at its watts. All is of the whole device, whoever uses it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_memopt.errors import ConfigError, EnergyUnavailableError
from lightning_memopt.telemetry import EnergyMeter, Meter, nvml_source
from lightning_memopt.telemetry.rates import MIN_SECONDS
from lightning_memopt.telemetry.sources import Clock

_MOST_STEPS = 5000
"""Of one batch size: no more are run to fill `MIN_SECONDS`."""


@dataclass(frozen=True)
class Spent:
    """What `steps` steps of `size` samples took of the device."""

    size: int
    steps: int
    seconds: float
    joules: float

    @property
    def each(self) -> float:
        """Joules of one step."""
        return self.joules / self.steps

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class Joules:
    """Joules of a step: `fixed + a_sample * size` of one that is as it was measured, `watts` for every second on top of that.

    Where `measured` is false, `watts` for every second is all there is. `source` says where the numbers come from.
    """

    watts: float
    source: str
    fixed: float = 0.0
    a_sample: float = 0.0
    measured: bool = False

    def of(self, size: int, seconds: float, beyond: float) -> float:
        """Of a step of `size` samples that takes `seconds` as it is and `beyond` on top; less where that is negative."""
        whole = self.fixed + self.a_sample * size if self.measured else self.watts * seconds
        return max(0.0, whole + self.watts * beyond)


def given(watts: float) -> Joules:
    """Of a device that draws `watts` whatever it does."""
    return Joules(watts, f"at the given {watts:g} W")


def fitted(small: Spent | None, large: Spent, approximate: bool) -> Joules:
    """From one or two batch sizes, the smaller one first. A line that falls, or begins below 0, goes through the larger one."""
    source = f"by the device's {'sampled power' if approximate else 'counter'}"
    if small is None:
        return Joules(large.watts, f"{source}, as watts at batch {large.size}")
    a_sample = max(0.0, (large.each - small.each) / (large.size - small.size))
    fixed = large.each - a_sample * large.size
    if fixed < 0:
        fixed, a_sample = 0.0, large.each / large.size
    return Joules(large.watts, f"{source} at batches {small.size} and {large.size}", fixed, a_sample, True)


class StepEnergy:
    """Measures steps of one device. Raises ConfigError, before anything is run, where the device's energy cannot be read."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        try:
            source = nvml_source(device, clock)
        except EnergyUnavailableError as error:
            raise ConfigError(
                f"mode='energy' needs the power that the device draws, and that of {device} cannot be read: {error}. Give "
                "watts=, or use mode='throughput'."
            ) from error
        self._device, self._clock = device, clock
        self._meter = EnergyMeter(str(device), lambda: [source])

    @property
    def approximate(self) -> bool:
        """Whether joules are integrated from samples of power."""
        return self._meter.approximate

    def measure(self, step: Callable[[], None], size: int) -> Spent:
        """`step` again and again for `MIN_SECONDS`. Raises EnergyUnavailableError where that gave no number."""
        meter = Meter(self._device, every=0, warmup=0, clock=self._clock, energies={"device": self._meter})
        steps, seconds, more = 0, 0.0, 1
        while seconds < MIN_SECONDS and steps < _MOST_STEPS:
            for _ in range(more):
                step()
                meter.step(size)
            steps += more
            seconds += meter.lap().seconds
            missing = math.ceil((MIN_SECONDS - seconds) * steps / seconds) if seconds > 0 else 1
            more = min(max(1, missing), _MOST_STEPS - steps)
        energy = meter.steady.energy.get("device")
        if energy is None or not energy.joules or not energy.samples:
            raise EnergyUnavailableError(
                f"the energy of {steps} steps of batch {size}, {seconds:.3g} s in all, could not be read. Give watts=, or use "
                "mode='throughput'"
            )
        return Spent(size, steps, energy.seconds, energy.joules)

    def close(self) -> None:
        self._meter.close()
