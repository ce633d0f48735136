"""Reduce the laps of all ranks with torchmetrics, sum them since training began, and name them as metrics."""

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
    """A vector that is summed over ranks and a number whose maximum is taken: one reduction for all logged values."""

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
    """Turns a rank's lap into metrics of all ranks. All ranks must create it, and call it, together.

    Each rank measures the energy of its devices. A device that several ranks share (or the processors of a host) counts once.
    If one rank cannot measure an energy, or no longer can, that energy is not reported.

    Args:
        world_size: number of ranks.
        device: the training device, on which ranks are reduced.
        meters: name of a group of metrics ("device", "cpu") -> energy meter.
    """

    def __init__(self, world_size: int, device: torch.device, meters: Mapping[str, EnergyMeter]) -> None:
        self.world_size = world_size
        self._meters = dict(sorted(meters.items()))
        self._places = _places(world_size, self._meters)
        distributed_run = world_size > 1
        ranks = _Ranks(4 + _WIDTH * len(self._meters), sync_on_compute=distributed_run)
        self._ranks = ranks.to(device) if distributed_run else ranks  # the backend of the process group needs its own device
        self._seconds = self._batches = self._samples = 0.0
        self._joules: dict[str, float | None] = dict.fromkeys(self._meters, 0.0)

    def __call__(self, lap: Tally, peak_nbytes: int | None) -> dict[str, float]:
        """The metrics of a lap, without the prefix "train/"; an empty dict if no rank had a batch.

        `peak_nbytes`: peak of this rank; None if it was not measured.
        """
        values: list[float] = [lap.samples, lap.batches, lap.steps, lap.seconds]
        for name in self._meters:
            values += self._weighted(name, lap.energy.get(name, Energy()))
        self._ranks.update(values, -1.0 if peak_nbytes is None else float(peak_nbytes))
        sums, most = self._ranks.compute()
        self._ranks.reset()
        samples, batches, steps, seconds = (value / self.world_size for value in sums[:4])
        self._seconds += seconds
        self._batches += batches
        self._samples += samples
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
        """The `_WIDTH` values of one meter that are summed over ranks, weighted by this rank's share of the device."""
        share = self._places[name][0] if name in self._places else 0.0
        known = [share * value for value in (energy.total_joules or 0.0, energy.joules, energy.seconds)]
        return [float(self._meters[name].failed), float(energy.total_joules is None), *known, float(energy.samples)]

    def _energy(self, name: str, sums: list[float]) -> dict[str, float]:
        """The metrics of one meter from the summed values. Watts are of the ranks that read their energy in this lap."""
        failed, unknown, total, joules, seconds, samples = sums
        if failed:
            self._places.pop(name, None)
        if name not in self._places:
            return {}
        before = self._joules[name]
        since_begin = None if unknown or before is None else before + total
        self._joules[name] = since_begin
        if not joules:
            return {}  # no rank read its energy in this lap, or only after stretches that were too short
        metrics = {f"{name}/power_watts": joules / seconds}
        if samples:
            metrics[f"{name}/energy_joules_per_sample"] = joules / samples
        if since_begin is not None:
            metrics[f"{name}/energy_joules"] = since_begin / self._places[name][1]
            if self.world_size > 1:
                metrics["energy_joules" if name == "device" else f"all_{name}/energy_joules"] = since_begin
        if self._meters[name].approximate:
            metrics[f"{name}/energy_approximate"] = 1.0
        return metrics


_WIDTH = 6
"""Number of values of one meter: failed, unknown, total joules, joules, seconds, samples (see `Energy`)."""


def _places(world_size: int, meters: Mapping[str, EnergyMeter]) -> dict[str, tuple[float, int]]:
    """Name of a meter -> (this rank's share of its device, number of different devices of all ranks).

    The share is 1 / the number of ranks with the same device. Meters that do not work on every rank are left out.
    """
    mine = {name: (socket.gethostname(), *meter.keys) if meter.available else None for name, meter in meters.items()}
    of_ranks: list[Any] = [mine]
    if world_size > 1:
        of_ranks = [None] * world_size
        distributed.all_gather_object(of_ranks, mine)
    places = {}
    for name, device in mine.items():
        counts = Counter(rank.get(name) for rank in of_ranks)
        if None not in counts:
            places[name] = (1 / counts[device], len(counts))
    return places
