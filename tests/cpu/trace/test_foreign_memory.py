"""Memory of numpy that a step reads beside its batch: no step is metered with it, so no plan counts it, and planned forwards
are recognised all the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.native import counter
from tests.cpu.lib.loops import QUIET, assert_same, sgd, state

pytestmark = pytest.mark.skipif(counter() is None, reason="nothing counts without a compiler")

ROWS, WIDTH = 1024, 8


class Agent(nn.Module):
    """It is called by a method: the loss after it is part of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def value(self, x: Tensor) -> Tensor:
        return self.net(x).view(-1)


def train(model: Agent, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(1)
    obs, returns, weights = torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS), torch.rand(4 * ROWS)
    order = np.random.RandomState(0).permutation(4 * ROWS)
    for step in range(steps):
        rows = order[step % 4 * ROWS :][:ROWS]
        value = model.value(obs[rows])
        loss = ((value - returns[rows]).square() * weights[rows] + 0.1 * weights[rows] * value).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_rows_taken_by_numpys_indexes(budget: str) -> None:
    torch.manual_seed(0)
    model = Agent()
    train(model, sgd(model), 6)
    expected = state(model)

    torch.manual_seed(0)
    model = Agent()
    optimizer = sgd(model)
    with optimize(model, optimizer, budget=budget, **QUIET) as run:
        train(model, optimizer, 6)
        status = run.status()
    assert_same(expected, state(model))
    assert status.plan is not None and status.measured_peak_nbytes is not None
    assert abs(status.plan.predicted.needed_nbytes - status.measured_peak_nbytes) < 256
    assert not status.deviates
