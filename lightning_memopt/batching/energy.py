"""Measure the joules of training steps, and predict the joules of other batch sizes.

The hardware updates its energy counters every 20 to 100 ms, and most steps are shorter. So a step is repeated for
`MIN_SECONDS`, without being observed, because recording keeps the device waiting. A line through two measured batch sizes
predicts any other size. Seconds that were not measured (rebuilds, copies) are priced at the measured watts. All joules are of
the whole device, other programs on it included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.errors import ConfigError, EnergyUnavailableError
from lightning_memopt.telemetry import EnergyMeter, Meter, nvml_source
from lightning_memopt.telemetry.sources import Clock
from lightning_memopt.telemetry.throughput import MIN_SECONDS

_MOST_STEPS = 5000
"""Maximum number of steps of one batch size that are run to fill `MIN_SECONDS`."""


@dataclass(frozen=True)
class MeasuredEnergy:
    """The energy that several steps of one batch size took.

    size: samples of a step.
    steps: number of steps.
    seconds: duration of all steps.
    joules: energy of all steps.
    """

    size: int
    steps: int
    seconds: float
    joules: float

    @property
    def joules_per_step(self) -> float:
        return self.joules / self.steps

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class EnergyModel:
    """Predicts the joules of a step of any batch size.

    watts: power that every second beyond the measured step takes; if `measured` is false, power of the whole step.
    source: where the numbers come from, for messages.
    fixed: joules of a measured step that do not depend on the batch size.
    per_sample: joules that each sample adds to a measured step.
    measured: whether `fixed` and `per_sample` are known.
    """

    watts: float
    source: str
    fixed: float = 0.0
    per_sample: float = 0.0
    measured: bool = False

    def joules(self, size: int, seconds: float, beyond: float) -> float:
        """Joules of a step of `size` samples, at least 0.

        `seconds`: duration of the unmodified step. `beyond`: seconds that come on top of them; negative if the step is shorter.
        """
        unmodified = self.fixed + self.per_sample * size if self.measured else self.watts * seconds
        return max(0.0, unmodified + self.watts * beyond)


def given(watts: float) -> EnergyModel:
    """The model of a device that always draws `watts`."""
    return EnergyModel(watts, f"at the given {watts:g} W")


def fitted(small: MeasuredEnergy | None, large: MeasuredEnergy, approximate: bool) -> EnergyModel:
    """The model from measurements at one or two batch sizes; `small` is the smaller one, None if there is only one.

    Neither the slope nor the constant of the line is negative: if one would be, the line only goes through the larger size.
    """
    source = f"by the device's {'sampled power' if approximate else 'counter'}"
    if small is None:
        return EnergyModel(large.watts, f"{source}, as watts at batch {large.size}")
    per_sample = max(0.0, (large.joules_per_step - small.joules_per_step) / (large.size - small.size))
    fixed = large.joules_per_step - per_sample * large.size
    if fixed < 0:
        fixed = 0.0
        per_sample = large.joules_per_step / large.size
    return EnergyModel(large.watts, f"{source} at batches {small.size} and {large.size}", fixed, per_sample, True)


class StepEnergy:
    """Measures the energy of steps on one device. Its constructor raises ConfigError if that energy cannot be read."""

    def __init__(self, device: torch.device, clock: Clock = perf_counter) -> None:
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
        """Whether joules are integrated from power samples, not read from an energy counter."""
        return self._meter.approximate

    def measure(self, step: Callable[[], None], size: int) -> MeasuredEnergy:
        """Repeat `step`, of `size` samples, for `MIN_SECONDS`. Raises EnergyUnavailableError if no energy could be read."""
        meter = Meter(self._device, every=0, warmup=0, clock=self._clock, energies={"device": self._meter})
        steps, seconds, next_steps = 0, 0.0, 1
        while seconds < MIN_SECONDS and steps < _MOST_STEPS:
            for _ in range(next_steps):
                step()
                meter.step(size)
            steps += next_steps
            seconds += meter.lap().seconds
            missing = math.ceil((MIN_SECONDS - seconds) * steps / seconds) if seconds > 0 else 1
            next_steps = min(max(1, missing), _MOST_STEPS - steps)
        energy = meter.steady.energy.get("device")
        if energy is None or not energy.joules or not energy.samples:
            raise EnergyUnavailableError(
                f"the energy of {steps} steps of batch {size}, {seconds:.3g} s in all, could not be read. Give watts=, or use "
                "mode='throughput'"
            )
        return MeasuredEnergy(size, steps, energy.seconds, energy.joules)

    def close(self) -> None:
        self._meter.close()
