"""Parameter topology: tied, frozen, unused and changing parameters get the plain run's gradients, or None where it has None."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.record import Tape
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.inside import states_of
from tests.cpu.lib.loops import Small, assert_same, batches, loss_of, sgd, small, state

STEPS = 6


def grads_of(build: Callable[[], nn.Module], budget: Any, between: Callable[[nn.Module, int], None] = lambda *_: None) -> Any:
    """Gradients (None where there is none) of every step, and the final state; the run where a budget is given."""
    model = build()
    optimizer = sgd(model)
    found = []

    def loop() -> None:
        torch.manual_seed(4)
        for i, batch in enumerate(batches(STEPS)):
            between(model, i)
            loss_of(model, batch).backward()
            found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()

    if budget is None:
        loop()
        return found, state(model), None
    with optimize(model, optimizer, budget=budget, verbose=False, profile_steps=2) as run:
        loop()
    return found, state(model), run


def assert_exact(build: Callable[[], nn.Module], between: Callable[[nn.Module, int], None] = lambda *_: None) -> Any:
    plain, end, _ = grads_of(build, None, between)
    found, end_found, run = grads_of(build, "min", between)
    for one, other in zip(plain, found, strict=True):
        assert one.keys() == other.keys()
        assert all(same_bits(one[name], other[name]) for name in one)
    assert_same(end, end_found)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    return run


def test_d1_tied_weights() -> None:
    """D1: tied weights get the plain run's gradient, and a hook on them fires once a backward."""
    count = [0]

    def build() -> nn.Module:
        model = small()
        model.embed.weight.register_post_accumulate_grad_hook(lambda _: count.__setitem__(0, count[0] + 1))
        return model

    assert_exact(build)
    assert count[0] == 2 * STEPS


class Adapted(nn.Module):
    """A frozen base with two low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = small().requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(32, 4, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(4, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.base.embed(x)
        for layer, down, up in zip(self.base.layers, self.down, self.up, strict=False):
            h = nn.functional.gelu(layer(h) + up(down(h)))
        return self.base.head(h)


def test_d2_p2_frozen_base() -> None:
    """D2: with a frozen base and adapters, the same parameters have no gradient, the others the same bits."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Adapted()

    assert_exact(build)


def test_d3_p2_unused_parameters() -> None:
    """D3: parameters that no output depends on have no gradient, as in the plain run."""

    def build() -> nn.Module:
        model = small()
        model.spare = nn.Linear(3, 3)
        return model

    assert_exact(build)


class TwoHeads(nn.Module):
    """One of its outputs does not enter the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.other = nn.Linear(24, 64)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.unused = torch.tanh(self.other(out))
        return out


def test_d4_unused_outputs() -> None:
    """D4: outputs that do not enter the loss: the same gradients; what was packed for them goes with their graph."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return TwoHeads()

    assert_exact(build)
    model = build()
    tapes: list[weakref.ref[Tape]] = []
    made = Tape.__init__

    def watched(self: Tape, *args: Any) -> None:
        made(self, *args)
        tapes.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch, optimize(model, sgd(model), budget="min", verbose=False, profile_steps=1):
            patch.setattr(Tape, "__init__", watched)
            for batch in batches(4):
                loss_of(model, batch).backward()
            del model.unused
            assert len(tapes) >= 4 and sum(tape() is not None for tape in tapes) <= 1, "at most the step that is observed"
        assert all(tape() is None for tape in tapes)
    finally:
        gc.enable()


def test_d6_unfreezing() -> None:
    """D6: layers that are unfrozen in the middle get a plan of their own, and the plain run's gradients."""

    def build() -> nn.Module:
        model = small()
        model.embed.requires_grad_(False)
        model.norm.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        return model

    def unfreeze(model: nn.Module, i: int) -> None:
        if i == 3:
            model.requires_grad_(True)

    run = assert_exact(build, unfreeze)
    plans = [s.plan for s in states_of(run).values() if isinstance(s, Running)]
    assert len(plans) == 2 and plans[0].fingerprint != plans[1].fingerprint


@pytest.mark.filterwarnings("ignore:MemOpt. the forward left the plan")
def test_d6_modules_replaced() -> None:
    """D6: modules that are added or replaced in the middle: what does not match the plan is kept, gradients are exact."""

    def change(model: Small, i: int) -> None:
        if i == 4:
            torch.manual_seed(9)
            model.layers[1] = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        if i == 5:
            model.layers.append(nn.Linear(32, 32))

    assert_exact(small, change)  # type: ignore[arg-type]
