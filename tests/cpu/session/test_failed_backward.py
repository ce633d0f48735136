"""A backward raises in an observed step. No plan is made from the half that ran: it would drop too much."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.robustness.leak import Left, Steps
from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run


def raises_halfway(steps: Steps) -> None:
    def raises(grad: torch.Tensor) -> None:
        raise Left

    handle = steps.model.layers[1].weight.register_hook(raises)
    with contextlib.suppress(Left):
        nn.functional.cross_entropy(steps.model(steps.x), steps.y).backward()
    handle.remove()


def another_shape(steps: Steps) -> None:
    """The user goes on with a batch of another shape."""
    raises_halfway(steps)
    steps.optimizer.zero_grad()
    steps.step("shape")


def updates_anyway(steps: Steps) -> None:
    """The user updates with the gradients that exist so far."""
    raises_halfway(steps)
    steps.optimizer.step()
    steps.optimizer.zero_grad()


def trained(goes_on: Callable[[Steps], None], planned: bool) -> tuple[list[torch.Tensor], Run | None]:
    steps = Steps()
    options: dict[str, Any] = {"budget": "min", "profile_steps": 1, "verbose": False}
    with optimize(steps.model, steps.optimizer, **options) if planned else contextlib.nullcontext() as run:
        if goes_on is another_shape:
            steps.step("shape")  # this shape has a plan
        goes_on(steps)
        for _ in range(3):
            steps.step()
    return [*steps.model.parameters(), *steps.model.buffers(), torch.get_rng_state()], run


@pytest.mark.parametrize("goes_on", [another_shape, updates_anyway])
def test_half_a_backward_makes_no_plan(goes_on: Callable[[Steps], None]) -> None:
    plain, _ = trained(goes_on, planned=False)
    planned, run = trained(goes_on, planned=True)
    assert all(map(torch.equal, plain, planned))
    status = run.status() if run is not None else None
    assert status is not None and status.plan is not None and status.plan.predicted.rebuilt_ops and status.graph is not None
    asked = [bool(save.unpacked_at) for save in status.graph.saves]
    assert sum(asked) > 0.9 * len(asked), "the plan is of a whole backward"
