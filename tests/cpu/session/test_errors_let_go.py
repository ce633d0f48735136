"""A budget that no plan keeps, after updates, is a line and no error: what the frames of that step hold does not wait for the
garbage collector, though the solvers raised one.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.session.solve.solving import chosen
from lightning_memopt.solvers.planner import Frontier
from tests.cpu.lib.loops import QUIET, batches, sgd, small, train


class Batch:
    """Stands for the tensors of a forward, in a frame above the solvers."""


def choose_with(batch: Batch, frontier: Frontier) -> None:
    _, plan, warning, _ = chosen(frontier, frontier.graph, 1, MemOptConfig(verbose=False))
    assert plan.predicted.needed_nbytes > 1 and warning is not None


@pytest.mark.parametrize("options", [{}, {"offload": "disk"}], ids=str)
def test_nothing_that_a_refused_step_holds_waits_for_the_collector(options: dict[str, Any]) -> None:
    model = small()
    optimizer = sgd(model)
    with optimize(model, optimizer, budget="min", **QUIET, **options) as run:
        train(model, optimizer, batches(4))
        frontier = run.status().frontier
        assert frontier is not None
        batch = Batch()
        there = weakref.ref(batch)
        gc.disable()
        try:
            choose_with(batch, frontier)
            del batch
            assert there() is None
        finally:
            gc.enable()
