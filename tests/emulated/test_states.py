"""Optimizer state in the host's memory: bits, bytes, and the order of copies and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

MIB = 1 << 20


def train(
    budget: Any, between: Callable[[optim.Optimizer], None] = lambda optimizer: None, **kind: bool
) -> tuple[list[Tensor], Any]:
    """Weights and state after some steps, and the run's status. The state of one matrix is as large as that of two others.
    `between` is called before each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024), *(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
    )
    model.cuda()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, **kind)

    def loop() -> None:
        for _ in range(10):
            between(optimizer)
            optimizer.zero_grad()
            model(torch.randn(16, 1024, device="cuda")).square().mean().backward()
            optimizer.step()

    status = None
    if budget is None:
        loop()
    else:
        with optimize(model, optimizer, budget=budget, offload="host", max_slowdown=1e6) as run:
            loop()
            status = run.status()
    state = [t for each in optimizer.state.values() for t in each.values()]
    return [t.detach().cpu() for t in (*model.parameters(), *state)], status


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_state_comes_while_other_state_goes(kind: str) -> None:
    """Nothing reads state before its copy has ended, and nothing gets memory that a copy uses."""
    plain, _ = train(None, **{kind: True})
    before = device.races()
    found, status = train("min", **{kind: True})
    assert all(map(torch.equal, found, plain)) and device.races() == before
    parked = [state for state in status.plan.states if state.what == "state" and state.nbytes >= 32 * MIB]
    assert len(parked) == 4 and any(state.seconds < state.copy_seconds for state in parked)
    assert status.measured_peak_nbytes <= status.predicted_peak_nbytes <= status.plan.budget_nbytes


def test_state_that_never_is_on_the_card_as_a_whole() -> None:
    """Weights, gradients and state take 384 MiB: observed steps have the state of a chunk on the card, too."""
    plain, _ = train(None, fused=True)
    before = device.races()
    torch.cuda.empty_cache()
    found, status = train(340 * MIB, fused=True)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    assert status.plan.states and status.measured_peak_nbytes <= status.predicted_peak_nbytes <= 340 * MIB


def test_state_that_two_streams_read_between_updates() -> None:
    """Neither of them waits for the other, and one goes on while the next update runs."""
    aside, before = torch.cuda.Stream(), device.races()

    def reads(optimizer: optim.Optimizer) -> None:
        aside.wait_stream(torch.cuda.current_stream())
        for stream in (aside, torch.cuda.current_stream()):
            with torch.cuda.stream(stream):
                for state in optimizer.state.values():
                    state["exp_avg"].norm()
        torch.cuda.current_stream().wait_stream(aside)
        optimizer.step()
        with torch.cuda.stream(aside):
            torch.ones(1 << 20, device="cuda")

    plain, _ = train(None, reads, foreach=True)
    found, status = train("min", reads, foreach=True)
    assert all(map(torch.equal, found, plain)) and device.races() == before and status.plan.states
