"""What freed memory becomes, in the bytes that the model's own batch takes unmodified.

The largest batch of the unmodified step; with plans, the batch with the most samples a second, and the largest. Each is found
by `find_max_batch_size` and then trained for real: samples a second and, where the device counts energy, joules a sample, in
steps that are as all later ones will be; the peak of all of them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import GpuBench, in_time, seconds_left
from benchmarks.lib.bench import MIB
from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.batching import BatchSizeResult
from lightning_memopt.telemetry import Meter

COLUMNS = {
    "size": "size",
    "multiple": "size_ratio",
    "samples/s": "samples_per_sec",
    "against": "rate_ratio",
    "pred.": "predicted_rate_ratio",
    "J/sample": "joules_per_sample",
    "against ": "joules_ratio",
    "peak": "peak_mib",
    "trials": "trial_steps",
}
RATIOS = {
    "size_ratio": "size",
    "rate_ratio": "samples_per_sec",
    "predicted_rate_ratio": "predicted_samples_per_sec",
    "joules_ratio": "joules_per_sample",
}
_MOST = 16
"""Times the model's own batch: no size is larger."""
_STRETCH = 10
"""Steps."""


class _Loop:
    """The model in a plain loop; batches of any size are the builder's samples over and over."""

    def __init__(self, bench: GpuBench) -> None:
        self.model, self.samples = bench.model, bench.batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.size = min(len(value) for value in self.samples.values())

    def make(self, size: int) -> dict[str, Tensor]:
        return {key: value[torch.arange(size, device=value.device) % len(value)] for key, value in self.samples.items()}

    def step(self, batch: dict[str, Tensor]) -> None:
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find(self, budget: int | str, most: int, **options: Any) -> BatchSizeResult:
        return find_max_batch_size(
            self.step, self.make, self.model, self.optimizer, budget=budget, start=self.size, max_size=most, **options
        )


def batch(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int) -> None:
    loop, rows = _Loop(bench), result["rows"]
    began = loop.find("auto", loop.size, planned=False)
    assert began.confirmed_peak_nbytes is not None
    result["budget_bytes"] = budget = began.confirmed_peak_nbytes
    planned = partial(loop.find, budget, _MOST * loop.size, solver_seconds=_solver_seconds(deadline))
    ways = {
        "unmodified, largest": partial(loop.find, budget, _MOST * loop.size, planned=False),
        "planned, fastest": partial(planned, mode="throughput"),
        "planned, largest": partial(planned, mode="largest"),
    }
    for label, find in ways.items():
        in_time(deadline, label)
        found = find()
        rows[label] = _trained(bench, loop, found, None if label.startswith("unmodified") else budget, rounds, deadline)
        _against(rows["unmodified, largest"], rows[label])
        rows[label]["within_budget"] = rows[label]["peak_mib"] <= budget / MIB
        gc.collect()


def _against(plain: dict[str, Any], row: dict[str, Any]) -> None:
    for ratio, key in RATIOS.items():
        if row[key] and plain[key]:
            row[ratio] = row[key] / plain[key]


def _solver_seconds(deadline: float) -> float:
    return min(20.0, seconds_left(deadline) / 8)


def _trained(
    bench: GpuBench, loop: _Loop, found: BatchSizeResult, budget: int | None, rounds: int, deadline: float
) -> dict[str, Any]:
    """A row: training at this size, and what was predicted of it. `budget`: of the plan."""
    samples, peak = loop.make(found.size), found.confirmed_peak_nbytes
    bench.synchronize()
    if bench.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    options: dict[str, Any] = dict(budget=budget, profile_steps=2, verbose=False, solver_seconds=_solver_seconds(deadline))
    within = optimize(loop.model, loop.optimizer, **options) if budget is not None else contextlib.nullcontext()
    with within as planned:
        meter = planned.monitor(every=_STRETCH) if planned is not None else Meter(bench.device, every=_STRETCH)
        steady = 0
        while steady < 2 * _STRETCH or (steady < rounds * _STRETCH and time.perf_counter() < deadline):
            loop.step(samples)
            meter.step(found.size)
            steady += planned is None or planned.session.steady
        if planned is not None:
            peak = planned.status().measured_peak_nbytes or peak
        meter.stop()
    rates = meter.rates()
    assert rates is not None and peak is not None
    return {
        "size": found.size,
        "samples_per_sec": rates.samples_per_sec,
        "predicted_samples_per_sec": found.samples_per_second,
        "joules_per_sample": rates.joules_per_sample,
        "energy_is_approximate": rates.approximate,
        "peak_mib": peak / MIB,
        "predicted_peak_mib": None if found.predicted_peak_nbytes is None else found.predicted_peak_nbytes / MIB,
        "profile_steps": found.profile_steps,
        "trial_steps": found.trial_steps,
        "why": found.why,
        "steps": rates.steps,
    }
