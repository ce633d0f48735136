"""Copies of gradients, and of the state of early updates, that run while backward goes on: bits, bytes, and the order of copies
and kernels.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.runtime.tiers.shelf import is_away
from lightning_memopt.session.parked_weights import WeightsAtRest
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

MIB = 1 << 20
WIDTH, DEPTH = 1024, 8
WEIGHT_NBYTES = 4 * WIDTH * WIDTH
BUDGET = 64 * MIB
"""Weights and gradients take 64 MiB, and so does the optimizer state."""

Prepare = Callable[[nn.Module, list[int]], None]


def nothing(model: nn.Module, seen: list[int]) -> None:
    pass


def train(
    budget: int | None, early: bool = False, rounds: int = 1, prepare: Prepare = nothing
) -> tuple[list[Tensor], Any, list[int]]:
    """Weights and state after some steps, the run's status, and what `prepare` lets hooks note. `early`: updates in backward;
    else the loop clips gradients. `rounds`: backwards of a step.
    """
    gc.collect()  # the optimizer of the run before
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).cuda()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen: list[int] = []
    status = None
    with contextlib.ExitStack() as stack:
        run: Any = None
        if budget is not None:
            updates: Any = "always" if early else "auto"
            run = stack.enter_context(
                optimize(model, optimizer, budget=budget, offload="host", max_slowdown=1e6, optimizer_in_backward=updates)
            )
        for step in range(8):
            if step == 5:  # a plan is in force
                prepare(model, seen)
            for _ in range(rounds):
                loss = model(torch.randn(16, WIDTH, device="cuda")).square().mean()
                with run.last_backward() if run and early else contextlib.suppress(Odd):
                    loss.backward()
            if not early:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=rounds == 1)
        status = None if run is None else run.status()
    state = [t for each in optimizer.state.values() for t in each.values()]
    return [t.detach().cpu() for t in (*model.parameters(), *state)], status, seen


@pytest.fixture(autouse=True)
def weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are tests of what else is parked."""
    monkeypatch.setattr(WeightsAtRest, "may_be_parked", lambda self: {})


def parked(status: Any, what: str) -> list[Any]:
    return [state for state in status.plan.states if state.what == what and state.nbytes >= WEIGHT_NBYTES]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() == 2]


def counts_there(model: nn.Module, seen: list[int]) -> None:
    """Notes, before a gradient is accumulated, how many of the others are on the device."""
    for p in weights_of(model):
        p.register_hook(lambda _: seen.append(sum(q.grad is not None and not is_away(q.grad) for q in weights_of(model))))


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_gradient_leaves_while_the_next_one_is_computed(rounds: int) -> None:
    plain, _, _ = train(None, rounds=rounds)
    before = device.races()
    found, status, there = train(BUDGET, rounds=rounds, prepare=counts_there)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    gradients = parked(status, "gradient")
    assert len(gradients) == DEPTH and sum(bool(each.leaves_before) for each in gradients) == DEPTH - 1
    assert sum(each.seconds for each in gradients) < sum(each.copy_seconds for each in gradients)
    assert there[-DEPTH:] == [0] * DEPTH if rounds == 2 else there[-DEPTH:] == [0, *[1] * (DEPTH - 1)]
    assert status.measured_peak_nbytes <= status.predicted_peak_nbytes <= BUDGET


def test_state_of_early_updates_comes_and_goes_meanwhile() -> None:
    plain, _, _ = train(None, early=True)
    before = device.races()
    found, status, _ = train(BUDGET, early=True)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    states = parked(status, "state")
    assert len(states) == DEPTH
    assert sum(bool(each.comes_after) for each in states) == sum(bool(each.leaves_before) for each in states) == DEPTH - 1
    assert sum(each.seconds for each in states) < sum(each.copy_seconds for each in states)
    assert status.measured_peak_nbytes <= status.predicted_peak_nbytes <= BUDGET


def scales_afterwards(model: nn.Module, seen: list[int]) -> None:
    """A hook that no version counter shows, after those of the run."""

    def scale(p: Tensor) -> None:
        assert p.grad is not None
        torch.cuda.synchronize()
        p.grad.data.mul_(0.5)

    for p in weights_of(model):
        p.register_post_accumulate_grad_hook(scale)


def scales_the_one_before(model: nn.Module, seen: list[int]) -> None:
    """Gradients are written after the copy of one, and before it leaves."""

    def scale(_: Tensor) -> None:
        torch.cuda.synchronize()  # copies are late on this device
        for q in weights_of(model):
            if q.grad is not None:
                q.grad.mul_(0.9)

    for p in weights_of(model):
        p.register_hook(scale)


def scales_in_a_module(model: nn.Module, seen: list[int]) -> None:
    def scale(*_: Any) -> None:
        torch.cuda.synchronize()
        for q in weights_of(model):
            if q.grad is not None:
                q.grad.data.mul_(0.9)

    for layer in model:
        if isinstance(layer, nn.Tanh):
            layer.register_full_backward_hook(scale)


@pytest.mark.parametrize("prepare", [scales_afterwards, scales_the_one_before, scales_in_a_module])
def test_gradients_that_hooks_write(prepare: Prepare) -> None:
    plain, _, _ = train(None, prepare=prepare)
    before = device.races()
    found, status, _ = train(BUDGET, prepare=prepare)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    assert any(each.leaves_before for each in parked(status, "gradient"))


class Odd(Exception):
    pass


def raises_once(model: nn.Module, seen: list[int]) -> None:
    def hook(_: Tensor) -> None:
        seen.append(0)
        if len(seen) == 2:
            raise Odd

    weights_of(model)[DEPTH // 2].register_hook(hook)


def test_a_backward_that_raises_halfway() -> None:
    """The loop goes on with the gradients that there are."""
    plain, _, calls = train(None, prepare=raises_once)
    assert len(calls) == 3
    before = device.races()
    found, status, _ = train(BUDGET, prepare=raises_once)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    assert any(each.leaves_before for each in parked(status, "gradient"))
