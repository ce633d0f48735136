"""Gradients in the host's memory from backward until the update: bits, bytes, and the order of copies and kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.runtime.tiers.shelf import is_away
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

MIB = 1 << 20


def train(budget: Any, rounds: int = 1, aside: bool = False, nesterov: bool = False, **kind: bool) -> tuple[list[Tensor], Any]:
    """Weights, state and gradients after some steps that clip gradients, and the run's status. `rounds`: backwards of a step.
    `aside`: another stream reads the gradients.
    """
    torch.manual_seed(0)
    sizes = (1024, 4096, 1024, 4096, 1024)
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in itertools.pairwise(sizes))).cuda()
    other = torch.cuda.Stream()
    if nesterov:
        optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, **kind)
    else:
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, **kind)
    away = []

    def loop() -> None:
        for _ in range(8):
            for _ in range(rounds):
                model(torch.randn(16, 1024, device="cuda")).square().mean().backward()
            away.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None and is_away(p.grad)))
            if aside:
                other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                torch.cuda.current_stream().wait_stream(other)
                del norms
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=rounds == 1)

    status = None
    if budget is None:
        loop()
    else:
        with optimize(model, optimizer, budget=budget, offload="host", max_slowdown=1e6) as run:
            loop()
            status = run.status()
        assert away[-1] >= (4 if budget == "min" else 3) * 16 * MIB  # a larger budget needs fewer
        away.append(sum(is_away(p.grad) for p in model.parameters() if p.grad is not None))
        assert not away[-1]
    state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().cpu() for t in (*model.parameters(), *state, *gradients)], status


@pytest.mark.parametrize(
    "options",
    [
        dict(fused=True),
        dict(foreach=True, rounds=2),
        dict(foreach=True, nesterov=True, rounds=2),
        dict(fused=True, aside=True),
    ],
    ids=str,
)
def test_gradients_are_away_until_their_update(options: dict[str, Any]) -> None:
    """Clipping and other backwards write to them where they are. Nothing reads a gradient before its copy has ended."""
    plain, _ = train(None, **options)
    before = device.races()
    found, status = train("min", **options)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    assert sum(state.nbytes for state in status.plan.states if state.what == "gradient") >= 4 * 16 * MIB
    own_segment = 2 * MIB if options.get("aside") else 0  # of the other stream: the norms, of which no plan knows
    assert status.measured_peak_nbytes - own_segment <= status.predicted_peak_nbytes <= status.plan.budget_nbytes


def test_weights_and_gradients_that_exceed_the_card() -> None:
    """They take 128 MiB, one matrix with its moments 64: observed steps have no gradients on the card either."""
    plain, _ = train(None, fused=True)
    before = device.races()
    torch.cuda.empty_cache()
    found, status = train(144 * MIB, fused=True)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    assert status.measured_peak_nbytes <= status.predicted_peak_nbytes <= 144 * MIB
