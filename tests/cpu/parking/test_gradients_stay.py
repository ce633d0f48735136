"""Lines that say which gradients and weights stay on the device, and why: only where bytes are missed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.native.engine import without
from lightning_memopt.session.parking.obstacles import obstacle
from tests.cpu.lib.engines import HAS_NATIVE, needs_native
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_gradients import NEVER
from tests.cpu.parking.test_states import MIB, net
from tests.cpu.parking.test_weights import Trained

Backward = Callable[[nn.Module, Any], None]
ENGINE = "the native engine is not there. Install a C++ compiler."


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


def usual(model: nn.Module, run: Any) -> None:
    model(torch.randn(64, 128)).square().mean().backward()


def with_history(model: nn.Module, run: Any) -> None:
    model(torch.randn(64, 128)).square().mean().backward(create_graph=True)
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.detach()


def by_numpy(model: nn.Module, run: Any) -> None:
    """A loop that gives gradients memory of its own, which backward adds to."""
    for p in model.parameters():
        p.grad = torch.from_numpy(torch.zeros(p.shape).numpy().copy())
    usual(model, run)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(256, 128, sparse=True), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.table(x.argmax(-1)))  # type: ignore[no-any-return]


class Joined(nn.Module):
    """Gradients that are views of one tensor, as the backward of `cat` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(64, 128)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.a, self.b])


class Halves(nn.Module):
    """Each call runs one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([net(), net()])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.halves[which](x)  # type: ignore[no-any-return]


def one_by_one(model: nn.Module, run: Any) -> None:
    """Each with a backward of its own."""
    for which in range(2):
        model(torch.randn(64, 128), which).square().mean().backward()


def with_another(params: Any, lr: float) -> optim.Optimizer:
    """It updates a matrix that is not in the model, too."""
    other = nn.Parameter(torch.zeros(64, 64))
    other.grad = torch.ones(64, 64)
    return optim.SGD([*params, other], lr=lr, momentum=0.9)


class Mine(optim.SGD):
    pass


def said_by(
    budget: Any,
    build: Callable[[], nn.Module] = net,
    make: Callable[..., optim.Optimizer] | None = optim.SGD,
    backward: Backward = usual,
    **options: Any,
) -> list[str]:
    """The lines of gradients that stay in a run of this loop, without the beginning that they have in common."""
    torch.manual_seed(0)
    model = build()
    optimizers = [] if make is None else [make(model.parameters(), lr=1e-3)]
    with listening() as said, optimize(model, optimizers, budget=budget, **NEVER | options) as run:
        for _ in range(5):
            backward(model, run)
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                for p in () if optimizers else model.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=1e-3)
            model.zero_grad()
        text = said.taken()
    begins = "MemOpt: gradients stay on the device "
    return [line.removeprefix(begins) for line in text.splitlines() if line.startswith(begins)]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "sparse": ({"build": Words}, "(32.00 KiB): they are sparse. Set sparse=False."),
    "views": ({"build": Joined}, "(64.00 KiB): other tensors have their memory, too."),
    "history": ({"backward": with_history}, "(256.00 KiB): they have a history of their own. Leave create_graph=True out."),
    "numpy": ({"backward": by_numpy}, "(256.00 KiB): other libraries have their memory."),
    "subclass": ({"make": Mine}, "(256.00 KiB): Mine is not known to update each parameter by itself."),
    "outside": ({"make": with_another}, "(16.00 KiB): some parameters are not in the model that was given. Give a module"),
    "earlier": ({"build": Halves, "backward": one_by_one}, "(256.00 KiB): they were made before the forward of this plan."),
    "by hand": ({"make": None}, "(256.00 KiB): no optimizer of the run updates their parameters."),
}


@needs_native
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("case", CASES)
def test_a_line_says_why_gradients_stay(case: str) -> None:
    options, words = CASES[case]
    (line,) = said_by("min", **options)
    assert line.startswith(words)


def test_without_a_compiler_a_line_says_that_gradients_stay() -> None:
    with without():
        assert said_by("min") == [f"(256.00 KiB): {ENGINE}"]


def test_without_a_compiler_a_line_says_that_weights_stay() -> None:
    with without(), listening() as said:
        found = Trained("min")
        text = said.taken()
    assert not found.status.plan.weights and "weights are not parked: the native engine is not there" in text


def test_no_line_where_the_step_fits() -> None:
    with without():
        assert said_by(64 * MIB) == []


def test_a_line_where_the_budget_is_not_kept() -> None:
    """With or without a plan at all."""
    weights = sum(p.nbytes for p in net().parameters())
    said: list[str] = []
    with without(), listening() as heard:
        with contextlib.suppress(InfeasibleError):
            said = said_by(2 * weights + MIB // 16)
        said += [line for line in heard.taken().splitlines() if "gradients stay" in line]
    assert len(said) == 1 and said[0].endswith(ENGINE)


def test_no_line_of_gradients_that_are_updated_early() -> None:
    def marked(model: nn.Module, run: Any) -> None:
        loss = model(torch.randn(64, 128)).square().mean()
        with run.last_backward():
            loss.backward()

    with without():
        assert said_by("min", backward=marked, optimizer_in_backward="always") == []


@pytest.mark.parametrize(
    ("device", "tier", "alone", "what"),
    [
        ("cpu", "disk", True, None if HAS_NATIVE else "the native engine is not there"),
        ("cuda", "host", True, None if HAS_NATIVE else "the native engine is not there"),
        ("cuda", "disk", True, "the device cannot read a file"),
        ("cpu", "disk", False, "several processes train"),
        ("cuda", "host", False, "several processes train"),
    ],
)
def test_what_keeps_gradients_and_weights_from_tiers(device: str, tier: str, alone: bool, what: str | None) -> None:
    offloading: Any = SimpleNamespace(device=torch.device(device), tier=tier)
    reason = obstacle(offloading, alone)
    assert (reason is None) if what is None else (reason is not None and what in reason.what)
