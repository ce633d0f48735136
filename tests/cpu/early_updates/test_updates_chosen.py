"""A plan updates as few parameters early as its budget needs: measured, with the bits of the plain loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import early
from lightning_memopt.session import RunStatus
from tests.cpu.lib.early import OPTIMIZERS
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.loops import counted_nbytes
from tests.cpu.lib.times import Known

STEPS = 8
UNSEEN = 4096
ROOM = 96 << 10
AT_END = 32 << 10
"""What backward still holds where its last gradient is made: a prediction has the usual update there, which comes later."""


@pytest.fixture(autouse=True)
def updates_take_time(free_updates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Known, "of_early_update", lambda self, measure: 1e-4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)))


def after(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run | None) -> None:
    """Gradients are freed after the step."""
    loss = model(torch.randn(16, 128)).square().mean()
    with run.last_backward() if run else contextlib.nullcontext():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def before_backward(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run | None) -> None:
    """The gradients of a step stay until the forward of the next one is over."""
    loss = model(torch.randn(16, 128)).square().mean()
    optimizer.zero_grad()
    with run.last_backward() if run else contextlib.nullcontext():
        loss.backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run | None) -> None:
    """Of two backwards, the second may update early; the first has made all gradients."""
    model(torch.randn(16, 128)).square().mean().backward()
    after(model, optimizer, run)


Loop = Callable[[nn.Module, torch.optim.Optimizer, "Run | None"], None]


class Trained(NamedTuple):
    """What came of a run: its status, the parameters at the end, and the bytes that the process held before it."""

    status: RunStatus
    parameters: list[Tensor]
    held_nbytes: int


def trained(loop: Loop, make: Callable[..., torch.optim.Optimizer], above: int | str) -> Trained:
    """`above`: the budget, beside what the process holds; "" for the plain loop."""
    gc.collect()
    held = counted_nbytes()
    net = model()
    optimizer = make(net.parameters())
    torch.manual_seed(1)
    budget = held + above if isinstance(above, int) else above
    options: dict[str, Any] = dict(budget=budget, profile_steps=2, verbose=False, optimizer_in_backward="auto")
    run: Any
    with optimize(net, optimizer, **options) if budget else contextlib.nullcontext() as run:
        for _ in range(STEPS):
            loop(net, optimizer, run)
    return Trained(run.status() if run else RunStatus(phase="off"), [p.detach().clone() for p in net.parameters()], held)


@pytest.mark.parametrize("loop", [after, before_backward, accumulated])
@pytest.mark.parametrize("name", ["sgd", "adam", "adam foreach"])
def test_the_fewest_that_a_budget_needs(name: str, loop: Loop, updates: list[Tensor]) -> None:
    make = OPTIMIZERS[name]
    plain = trained(loop, make, "").parameters
    smallest = trained(loop, make, "min")
    assert smallest.status.plan is not None
    least = smallest.status.plan.predicted.needed_nbytes - smallest.held_nbytes
    most = smallest.status.plan.unmodified_peak_nbytes - smallest.held_nbytes
    del smallest
    counts = []
    for share in (0.0, 0.3, 0.6, 0.9, 1.1):
        budget = int(least + share * (most - least)) + ROOM
        updates.clear()
        status, parameters, held = trained(loop, make, budget)
        plan, graph, measured = status.plan, status.graph, status.measured_peak_nbytes
        assert plan is not None and graph is not None and measured is not None
        assert all(map(same_bits, parameters, plain))
        assert measured <= held + budget
        assert measured - UNSEEN <= plan.predicted.needed_nbytes <= measured + AT_END
        assert len(updates) == len(early(graph)) + (STEPS - 2) * len(plan.updates)
        counts.append(len(plan.updates))
        del status, plan, graph, parameters
        updates.clear()
    assert counts[-1] == 0 and counts == sorted(counts, reverse=True)
    assert loop is accumulated or counts[0] > 0
