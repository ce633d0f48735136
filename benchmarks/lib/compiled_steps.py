"""Trainings of a model that its user compiles with Inductor: as torch splits forward and backward, and with plans."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.digests import hashed
from benchmarks.models.registry import MODELS
from lightning_memopt import InfeasibleError, optimize
from lightning_memopt.bench.torch_compiled import torch_splits
from lightning_memopt.session.regions import region_choice
from lightning_memopt.trace import metered_cpu

STEPS = 14
"""A region is compiled up to six times, and a step in which code is compiled is not planned from."""
TIMED = 3
"""Number of steps, the last ones, that are timed."""

Row = dict[str, Any]


class Training:
    """A model of the registry with AdamW, compiled whole: by Inductor, or by the backend behind a `/` (nothing: eager)."""

    def __init__(self, name: str) -> None:
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        name, slash, backend = name.partition("/")
        self.model, self.batch, _ = MODELS[name]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        compiles = not slash or backend
        self.call: Any = torch.compile(self.model, backend=backend or "inductor") if compiles else self.model
        self.losses: list[float] = []
        self.seconds: list[float] = []
        torch.manual_seed(2)

    def step(self) -> None:
        began = time.perf_counter()
        loss = self.call(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.item())

    def metered_step(self) -> tuple[int, int]:
        """A step without us. Bytes that are there before it, and the most that it takes above these."""
        held = held_nbytes()
        with metered_cpu() as events:
            self.step()
        return held, events.peak_nbytes

    def row(self) -> Row:
        tensors: list[torch.Tensor] = [*self.model.parameters(), *self.model.buffers()]
        state = [*tensors, torch.tensor(self.losses, dtype=torch.float64)]
        return {"hash": hashed(state), "step_seconds": statistics.median(self.seconds[-TIMED:])}


def as_torch(name: str, memory_budget: float = 1.0) -> Row:
    """Trained without us. `resident_nbytes`: what is there between steps."""
    with torch_splits(memory_budget) as flops:
        training = Training(name)
        for _ in range(STEPS):
            held, above = training.metered_step()
    extra = flops["all"] / flops["joint"] - 1 if flops["joint"] else 0.0
    return training.row() | {"peak_nbytes": held + above, "resident_nbytes": held, "extra_flops": extra}


def planned(name: str, budget: str | int) -> Row:
    """Trained within a budget; a row with `smallest_nbytes` alone where no plan fits."""
    training = Training(name)
    try:
        with optimize(
            training.model, training.optimizer, budget=budget, profile_steps=1, solver_seconds=10, verbose=False
        ) as run:
            for _ in range(STEPS):
                training.step()
            status, stages = run.status(), list(run.session._compiled._now.stages.values())
    except InfeasibleError as error:
        return {"smallest_nbytes": error.smallest_nbytes}
    assert status.plan is not None
    joint = sum(op.flops for stage in stages for op in stage.region.graph.ops)
    again = sum(stage.option.extra_flops for stage in stages if stage.option is not None)
    return training.row() | {
        "peak_nbytes": status.measured_peak_nbytes,
        "budget_nbytes": status.plan.budget_nbytes,
        "predicted_nbytes": status.plan.predicted.peak_nbytes,
        "extra_flops": (again + status.plan.predicted.extra_flops) / max(1, joint),
        "regions": len(stages),
        "said": status.compiled,
    }


def keep_all(name: str) -> Row:
    """Everything is saved, nothing runs again."""
    keeping: Callable[..., list[int]] = lambda choice, stages, limit: [0] * len(stages)  # noqa: E731
    with mock.patch.object(region_choice.Choice, "better", keeping):
        return planned(name, "min")
