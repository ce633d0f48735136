"""The block is left while tensors are away: backward outside of it fetches them, and the tier ends with the last of them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from tests.cpu.lib.loops import QUIET, assert_same, batches, loss_of, sgd, small, state, train

OFFLOAD = QUIET | {"budget": "min", "offload": "disk", "profile_steps": 1}


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memopt-io")]


def before(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Training, and a forward whose backward is still to come."""
    train(model, optimizer, batches(2, size=64))
    torch.manual_seed(5)
    return loss_of(model, batches(1, size=64)[0])


def after(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, times: int) -> dict[str, Tensor]:
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    optimizer.step()
    return state(model)


@pytest.mark.parametrize("times", [1, 2])
def test_backward_after_the_block(times: int) -> None:
    model = small(width=64, depth=6)
    optimizer = sgd(model)
    loss = before(model, optimizer)
    expected = after(model, optimizer, loss, times)

    model = small(width=64, depth=6)
    optimizer = sgd(model)
    threads = len(workers())
    with optimize(model, optimizer, **OFFLOAD) as run:
        loss = before(model, optimizer)
        ((_, depot),) = run.session._offloading.depots._of_plan.values()
        assert depot is not None and depot.used_nbytes, "nothing is away: the test tests nothing"
        file = depot.tiers["disk"].file._file  # type: ignore[attr-defined]
    assert not file.closed
    assert_same(expected, after(model, optimizer, loss, times))
    del loss
    assert file.closed and len(workers()) == threads
    assert "parked" in run.report()


def test_a_forward_that_is_forgotten_after_the_block() -> None:
    model = small(width=64, depth=6)
    optimizer = sgd(model)
    with optimize(model, optimizer, **OFFLOAD) as run:
        loss = before(model, optimizer)
        ((_, depot),) = run.session._offloading.depots._of_plan.values()
        assert depot is not None and depot.used_nbytes
        file = depot.tiers["disk"].file._file  # type: ignore[attr-defined]
    del loss
    assert file.closed
