"""Train a compiled model within a budget, and what came of it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.native import counter
from lightning_memopt.session import RunStatus, compiled_regions
from lightning_memopt.trace import count_all

Forward = Callable[[torch.Tensor], torch.Tensor]


class Trained(NamedTuple):
    """A training run.

    losses: of each step.
    state: the weights after the last step.
    status: that of the run after its last step.
    unmodified_nbytes: the highest peak of an observed step.
    regions: what the run knows of the compiled regions.
    """

    losses: list[float]
    state: list[torch.Tensor]
    status: RunStatus
    unmodified_nbytes: int
    regions: Any

    @property
    def nbytes(self) -> int:
        """The measured peak of a planned step."""
        assert self.status.measured_peak_nbytes is not None, self.status
        return self.status.measured_peak_nbytes

    @property
    def predicted_nbytes(self) -> int:
        assert self.status.plan is not None, self.status
        return self.status.plan.predicted.peak_nbytes

    def has_bits_of(self, other: Trained) -> bool:
        same = all(torch.equal(a, b) for a, b in zip(self.state, other.state, strict=True))
        return same and self.losses == other.losses


def counted() -> None:
    """Skip the test where bytes of compiled code cannot be counted."""
    count_all(lambda _: None)
    if counter() is None:
        pytest.skip("bytes of compiled code are counted by the native counter, which needs a C++ compiler, as Inductor does")


def train(
    made: Callable[[], tuple[nn.Module, Forward]],
    budget: str | int,
    shape: tuple[int, ...] = (512, 48),
    steps: int = 9,
) -> Trained:
    """`made()`: the model, and the function that is called with a batch of `shape` and gives a loss.

    A warning of ours fails the run.
    """
    counted()
    torch._dynamo.reset()
    gc.collect()  # what other trainings left in cycles counts as well, until it is collected
    torch.manual_seed(0)
    model, call = made()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1)
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="MemOpt")
        with optimize(model, optimizer, budget=budget, profile_steps=1, solver_seconds=2, verbose=False) as run:
            for _ in range(steps):
                loss = call(torch.randn(shape))
                loss.backward()
                losses.append(loss.item())
                del loss
                optimizer.step()
                optimizer.zero_grad()
            status, regions = run.status(), run.session._compiled
            unmodified = max((m.peak_nbytes for m in regions._now.measured), default=0)
    return Trained(losses, [p.detach().clone() for p in model.parameters()], status, unmodified, regions)


def keeping_all(made: Callable[[], tuple[nn.Module, Forward]], **options: Any) -> Trained:
    """As `train`, and regions are compiled so that all is saved and no op runs again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiled_regions, "_cheapest", lambda step, stages, target: [0] * len(stages))
        return train(made, "min", **options)
