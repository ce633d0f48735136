"""One rank's laps, reduced over ranks by torchmetrics, and summed since training began."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torchmetrics import Metric

from lightning_memopt.telemetry import Energy, EnergyMeter, Tally


class _Ranks(Metric):
    """A vector of sums and one maximum, over ranks: one reduction a log, not one a value."""

    full_state_update = False
    sums: Tensor
    most: Tensor

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("sums", torch.zeros(size, dtype=torch.float64), "sum")
        self.add_state("most", torch.zeros((), dtype=torch.float64), "max")

    def update(self, sums: list[float], most: float) -> None:
        self.sums = self.sums + torch.tensor(sums, dtype=torch.float64).to(self.sums.device)
        self.most = torch.clamp(self.most, min=most)

    def compute(self) -> tuple[list[float], float]:
        return self.sums.tolist(), self.most.item()


class Reduction:
    """Made, and called, by all ranks together. `meters`: of energy, by what their metrics are called.

    What ranks share (a device, the processors of a host) is measured by each of them, and counts once. What one of them cannot
    measure, or no longer, is not reported.
    """

    def __init__(self, world_size: int, device: torch.device, meters: Mapping[str, EnergyMeter]) -> None:
        self.world_size = world_size
        self._meters = dict(sorted(meters.items()))
        self._places = _places(world_size, self._meters)
        several = world_size > 1
        ranks = _Ranks(4 + _WIDTH * len(self._meters), sync_on_compute=several)
        self._ranks = ranks.to(device) if several else ranks  # where the backend wants it
        self._seconds = self._batches = self._samples = 0.0
        self._joules: dict[str, float | None] = dict.fromkeys(self._meters, 0.0)

    def __call__(self, lap: Tally, peak_nbytes: int | None) -> dict[str, float]:
        """The metrics of a lap, without the stage's prefix; none where there was no batch."""
        values: list[float] = [lap.samples, lap.batches, lap.steps, lap.seconds]
        for name in self._meters:
            values += self._weighted(name, lap.energy.get(name, Energy()))
        self._ranks.update(values, -1.0 if peak_nbytes is None else float(peak_nbytes))
        sums, most = self._ranks.compute()
        self._ranks.reset()
        samples, batches, steps, seconds = (value / self.world_size for value in sums[:4])
        self._seconds, self._batches, self._samples = self._seconds + seconds, self._batches + batches, self._samples + samples
        energy: dict[str, float] = {}
        for i, name in enumerate(self._meters):
            energy |= self._energy(name, sums[4 + _WIDTH * i :][:_WIDTH])
        if not batches or not seconds:
            return {}
        metrics = {"time": self._seconds, "batches": self._batches, "device/batches_per_sec": batches / seconds}
        if steps:
            metrics["device/step_seconds"] = seconds / steps
        if samples:
            metrics |= {"samples": self._samples, "device/samples_per_sec": samples / seconds}
            if self.world_size > 1:
                metrics["samples_per_sec"] = self.world_size * samples / seconds
        if most > 0:
            metrics["device/peak_memory_bytes"] = most
        return metrics | energy

    def _weighted(self, name: str, energy: Energy) -> list[float]:
        """What is summed over ranks: `_WIDTH` values."""
        share = self._places[name][0] if name in self._places else 0.0
        known = [share * value for value in (energy.total_joules or 0.0, energy.joules, energy.seconds)]
        return [float(self._meters[name].failed), float(energy.total_joules is None), *known, float(energy.samples)]

    def _energy(self, name: str, sums: list[float]) -> dict[str, float]:
        """Keys of one meter. Rates are of the ranks whose stretch ended in this lap."""
        failed, unknown, total, joules, seconds, samples = sums
        if failed:
            self._places.pop(name, None)
        if name not in self._places:
            return {}
        before = self._joules[name]
        self._joules[name] = since = None if unknown or before is None else before + total
        if not joules:
            return {}  # none ended, or all were too short to say anything
        found = {f"{name}/power_watts": joules / seconds}
        if samples:
            found[f"{name}/energy_joules_per_sample"] = joules / samples
        if since is not None:
            found[f"{name}/energy_joules"] = since / self._places[name][1]
            if self.world_size > 1:
                found["energy_joules" if name == "device" else f"all_{name}/energy_joules"] = since
        if self._meters[name].approximate:
            found[f"{name}/energy_approximate"] = 1.0
        return found


_WIDTH = 6


def _places(world_size: int, meters: Mapping[str, EnergyMeter]) -> dict[str, tuple[float, int]]:
    """By name: this rank's share of what it measures, and how many different things all ranks measure; nothing where one of
    them cannot."""
    mine = {name: (socket.gethostname(), *meter.keys) if meter.available else None for name, meter in meters.items()}
    everybody: list[Any] = [mine]
    if world_size > 1:
        everybody = [None] * world_size
        distributed.all_gather_object(everybody, mine)
    found = {}
    for name, own in mine.items():
        counts = Counter(theirs.get(name) for theirs in everybody)
        if None not in counts:
            found[name] = (1 / counts[own], len(counts))
    return found
