"""Train a compiled model within a budget, and what came of it."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memopt import optimize
from lightning_memopt.native import counter
from lightning_memopt.session import RunStatus
from lightning_memopt.session.regions import region_choice
from lightning_memopt.trace import count_all

Forward = Callable[[torch.Tensor], torch.Tensor]


class Residual(nn.Module):
    """Four layers with dropout; the mean square of the last one's result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.1, self.training)
        return x.square().mean()


class Trained(NamedTuple):
    """A training run. (It holds no tensor: all bytes of the process count in the next run.)

    losses: of each step.
    state: a digest of the weights after the last step.
    status: that of the run after its last step.
    unmodified_nbytes: the peak of the first observed step that counts: regions are as their user compiled them.
    options: for each region, the number of plans of which one was chosen.
    """

    losses: list[float]
    state: str
    status: RunStatus
    unmodified_nbytes: int
    options: list[int]

    @property
    def nbytes(self) -> int:
        """The measured peak of a planned step."""
        assert self.status.measured_peak_nbytes is not None, self.status
        return self.status.measured_peak_nbytes

    @property
    def predicted_nbytes(self) -> int:
        assert self.status.plan is not None, self.status
        return self.status.plan.predicted.peak_nbytes

    @property
    def text(self) -> str:
        """What the report says of compiled regions."""
        return self.status.compiled or ""

    def has_bits_of(self, other: Trained) -> bool:
        return (self.state, self.losses) == (other.state, other.losses)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def counted() -> None:
    """Skip the test where bytes of compiled code cannot be counted."""
    count_all(lambda _: None)
    if counter() is None:
        pytest.skip("bytes of compiled code are counted by the native counter, which needs a C++ compiler, as Inductor does")


def losses_of(
    call: Forward,
    optimizer: torch.optim.Optimizer,
    steps: int,
    shape: tuple[int, ...] = (512, 48),
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The losses of a training loop on random batches of `shape`. It holds nothing from one step to the next."""
    losses = []
    for step in range(steps):
        loss = call(torch.randn(shape))
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


def train(
    made: Callable[[], tuple[nn.Module, Forward]],
    budget: str | int,
    shape: tuple[int, ...] = (512, 48),
    steps: int = 9,
    warned: str | None = None,
) -> Trained:
    """`made()`: the model, and the function that is called with a batch of `shape` and gives a loss.

    A warning of ours fails the run. `warned`: the text of the one that is expected.
    """
    counted()
    torch._dynamo.reset()
    gc.collect()  # what other trainings left in cycles counts as well, until it is collected
    torch.manual_seed(0)
    model, call = made()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", message="MemOpt")
        if warned is not None:
            stack.enter_context(pytest.warns(UserWarning, match=re.escape(warned)))
        with optimize(model, optimizer, budget=budget, profile_steps=1, solver_seconds=2, verbose=False) as run:
            losses = losses_of(call, optimizer, steps, shape)
            status, regions = run.status(), run.session._compiled
            unmodified = next((m.peak_nbytes for m in regions._now.choice.measured), 0)
            options = [len(stage.options) for stage in regions.stages_of_step()]
    return Trained(losses, _digest(model), status, unmodified, options)


def keeping_all(made: Callable[[], tuple[nn.Module, Forward]], **options: Any) -> Trained:
    """As `train`, and regions are compiled so that all is saved and no op runs again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(region_choice.Choice, "better", lambda choice, stages, limit: [0] * len(stages))
        return train(made, "min", **options)
