"""What every front trains: a case, in one run or in two with a checkpoint between them.

A front is a function `(case, watch, log) -> results`. It trains `case.steps` optimizer steps, around which it puts what `watch`
gives for this front: the package within a budget, or nothing. It calls `log(...)` with what the front logs after every step,
and returns what training leaves: model, optimizer, average.

With `case.resumes`, a first run trains half of the steps and saves a checkpoint, and a second one, with everything made anew,
loads it and goes on. One of the two is the plain run: `"from plain"` watches the second, `"to plain"` the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.robustness.front_models import Sample, Samples, collated
from benchmarks.robustness.scripts import Log, Watch

BATCH, LEARNING_RATE, CLIP = 4, 1e-2, 0.5
VARIANTS = ("plain", "accumulation", "clipping", "schedule", "average", "from plain", "to plain")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Case:
    """One training run.

    model: a name of `MODELS`.
    precision: "fp32", or "bf16" (autocast).
    variant: one of `VARIANTS`.
    steps: optimizer steps.
    """

    model: str
    precision: str = "fp32"
    variant: str = "plain"
    steps: int = 20

    @property
    def accumulate(self) -> int:
        return 2 if self.variant == "accumulation" else 1

    @property
    def clip(self) -> float | None:
        return CLIP if self.variant == "clipping" else None

    @property
    def resumes(self) -> bool:
        return self.variant.endswith("plain") and self.variant != "plain"

    def samples(self) -> Samples:
        return Samples(self.model, self.steps * self.accumulate * BATCH)

    def loader(self) -> DataLoader[Sample]:
        """Batches in a shuffled order, which is the same in every run."""
        samples = self.samples()
        order = RandomSampler(samples, generator=torch.Generator().manual_seed(3))
        return DataLoader(samples, BATCH, sampler=order, collate_fn=collated)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """A warm-up of five steps and a decay with "schedule", else a constant rate."""
        moves = self.variant == "schedule"
        rate = lambda step: min((step + 1) / 5, 1 - step / (2 * self.steps)) if moves else 1.0  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def average(self, model: nn.Module) -> AveragedModel | None:
        if self.variant != "average":
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


Part = Callable[[Watch | None, int, Path | None, Path | None], dict[str, Any]]
"""A run `(watch, last step, checkpoint to load, checkpoint to save)`; without `watch` it is the plain run."""


def in_parts(case: Case, watch: Watch, part: Part) -> dict[str, Any]:
    """All steps in one run, or in two with a checkpoint between them."""
    if not case.resumes:
        return part(watch, case.steps, None, None)
    half = case.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        part(watch if case.variant == "to plain" else None, half, None, path)
        return part(watch if case.variant == "from plain" else None, case.steps, path, None)


Front = Callable[[Case, Watch, Log], dict[str, Any]]
