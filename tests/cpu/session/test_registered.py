"""Optimizers of the user's own that are registered: what is done for them, and which steps a rehearsal refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_memopt import optimize, register_optimizer
from lightning_memopt.errors import ConfigError, UnsupportedError
from lightning_memopt.record import is_registered, optimizers
from lightning_memopt.runtime.early_updates import of_optimizers
from lightning_memopt.session.observe import costs
from lightning_memopt.session.solve.rehearsal import UNKNOWN
from tests.cpu.session.test_rehearsal import rehearsed, shaped, taken
from tests.emulated.float32_adamw import STATE, Float32AdamW

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is registered for this test alone."""
    monkeypatch.setattr(optimizers, "_registered", {})


def test_only_what_is_registered_is_rehearsed() -> None:
    """Exactly this class, with the step that it had then."""

    class Changed(Float32AdamW):
        pass

    optimizer, other = Float32AdamW(shaped().parameters()), Changed(shaped().parameters())
    assert rehearsed(optimizer) == UNKNOWN and "is not known to update" in of_optimizers([optimizer])[0].what
    register_optimizer(Float32AdamW)
    assert rehearsed(optimizer).known and not of_optimizers([optimizer])
    assert rehearsed(other) == UNKNOWN and not is_registered(other)
    register_optimizer(Changed)
    assert is_registered(other)
    Changed.step = lambda self, closure=None: None  # type: ignore[method-assign]
    assert not is_registered(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_as_the_allocator_counts(dtype: torch.dtype) -> None:
    """Those of casts, too, which the CPU makes where weights and state differ in type."""
    register_optimizer(Float32AdamW)
    model = shaped().to(dtype)
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.to(dtype)
    optimizer = Float32AdamW(model.parameters())
    update = rehearsed(optimizer)
    made, beside = taken(optimizer)
    assert update.state_nbytes == made and 0 <= update.beside_nbytes - beside <= 64


def trained(budget: Any, early: Any = "never") -> tuple[list[torch.Tensor], Any]:
    """Weights and state after some steps with state in the disk tier, and the run's status."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh()))).bfloat16()
    optimizer = Float32AdamW(model.parameters())
    options: Any = {"offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": early, "verbose": False}
    status = None
    with contextlib.ExitStack() as stack:
        run: Any = None if budget is None else stack.enter_context(optimize(model, optimizer, budget=budget, **options))
        for _ in range(9):
            loss = model(torch.randn(64, 256, dtype=torch.bfloat16)).square().mean()
            with run.last_backward() if run and early != "never" else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        status = None if run is None else run.status()
    state = [optimizer.state[p][name] for p in model.parameters() for name in STATE]
    return [t.detach() for t in (*model.parameters(), *state)], status


@pytest.mark.parametrize("early", ["never", "always"])
def test_float32_state_is_parked_with_the_bits_of_the_plain_run(early: str) -> None:
    register_optimizer(Float32AdamW)
    plain, _ = trained(None)
    found, status = trained("min", early)
    assert all(map(torch.equal, found, plain))
    states = [state for state in status.plan.states if state.what == "state" and state.nbytes >= 8 * 256 * 256]
    assert len(states) == 4 and bool(status.plan.updates) == (early == "always")
    assert status.measured_peak_nbytes == pytest.approx(status.predicted_peak_nbytes, rel=1e-3)


def test_an_early_update_is_timed_by_an_optimizer_of_its_own() -> None:
    """Which has the attributes of the user's, whatever its constructor asks for."""

    class Scaled(optim.Optimizer):
        def __init__(self, params: Any, scale: float) -> None:
            super().__init__(params, {"lr": 0.1})
            self.scale = scale

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=self.scale * group["lr"])

    register_optimizer(Scaled)
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    assert 0 <= costs._of_early_update(Scaled([p], 2.0), CPU) < 1 and torch.equal(p, torch.ones(4, 4))


class Own(optim.Optimizer):
    """What the steps below have in common."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.count = 0


class CountsInGroup(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                p.sub_(p.grad)


class CountsItself(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad)


class GoesTwice(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.clamp_(-1, 1)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad)


class GoesElsewhere(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self._all():
            p.sub_(p.grad)

    def _all(self) -> Any:
        return [p for group in self.param_groups for p in group["params"]]


class Holds(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                twice = p.grad * 2
                p.sub_(twice)


class Draws(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad).add_(torch.rand_like(p), alpha=1e-6)


class Reads(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(torch.as_tensor(p.grad.numpy()))


class Decays(Own):
    """Weights without a gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)
                if p.grad is not None:
                    p.sub_(p.grad)


class DecaysOut(Own):
    """By an op whose result is an argument by keyword."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                torch.mul(p, 0.9, out=p)
                if p.grad is not None:
                    p.sub_(p.grad)


class DecaysMomentum(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p))
                torch._foreach_mul_([state["momentum"]], 0.9)
                if p.grad is not None:
                    p.sub_(state["momentum"].add_(p.grad))


class CountsAlways(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                if p.grad is not None:
                    p.sub_(p.grad)


class Needs(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign())


REFUSED = {
    Decays: "also updates a parameter that has no gradient",
    DecaysOut: "also updates a parameter that has no gradient",
    DecaysMomentum: "also updates a parameter that has no gradient",
    CountsAlways: "also updates a parameter that has no gradient",
    Needs: "fails where a parameter has no gradient",
    CountsInGroup: "changes options of its groups",
    CountsItself: "sets self.count",
    GoesTwice: "goes through self.param_groups 2 times",
    GoesElsewhere: "goes through self.param_groups 0 times",
    Draws: "draws random numbers",
    Holds: "still holds temporary tensors of ",
    Reads: "fails on tensors without memory",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_registered_step_that_does_more_is_refused(kind: Any) -> None:
    register_optimizer(kind)
    model = nn.Linear(64, 64)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.clone() for p in model.parameters()]
    optimizer = kind(model.parameters())
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} is registered.*{REFUSED[kind]}"):
        rehearsed(optimizer)
    assert optimizer.count == 0 and all(map(torch.equal, model.parameters(), before))


def test_what_is_no_class_of_optimizers_is_not_registered() -> None:
    for wrong in (nn.Linear, Float32AdamW(shaped().parameters())):
        with pytest.raises(ConfigError, match="register_optimizer"):
            register_optimizer(wrong)  # type: ignore[arg-type]
