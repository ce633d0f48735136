"""A plan may be made from the first step. Its update makes state that later steps begin with, and do not make again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.graph import BEFORE, Graph, base_levels

COUNTERS_NBYTES = 8 * 4
"""Each of 8 parameters has a counter of steps, which no op makes."""


def observed(foreach: bool, steps: int) -> Graph:
    """The graph from which a plan is made after this many observed steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    with optimize(model, optimizer, config=MemOptConfig(budget="min", profile_steps=steps, verbose=False)) as run:
        for _ in range(steps + 1):
            model(torch.ones(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        graph = run.status().graph
    assert graph is not None
    return graph


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_the_state_of_the_first_step_is_there_throughout(foreach: bool) -> None:
    first, third = observed(foreach, 1), observed(foreach, 3)
    lasting = [
        sum(t.nbytes for t in graph.tensors if t.kind == "optimizer_state" and t.spans == ((BEFORE, len(graph.points) - 1),))
        for graph in (first, third)
    ]
    assert lasting[0] == lasting[1] - COUNTERS_NBYTES > 0
    made = sum(t.nbytes for t in first.tensors if t.kind == "optimizer_state" and t.born_at > BEFORE)
    assert made <= COUNTERS_NBYTES
    levels = [base_levels(graph)[graph.backward_begins :] for graph in (first, third)]
    assert abs(max(levels[0]) - max(levels[1])) <= COUNTERS_NBYTES
