"""Transforms of `torch.func`, forward-mode AD and batched backwards, inside of forwards and around them: all bits are equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_memopt.runtime import Program
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.loops import agrees, sgd
from tests.cpu.lib.stepped import held, stepped

WIDTH = 32
Middle = Callable[[nn.Module, Tensor], Tensor]


def layers(norm: bool = True) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *([nn.LayerNorm(WIDTH)] if norm else [nn.Dropout(0.3)])]


class Net(nn.Module):
    """Layers, then `middle(inner, h)`, where `inner` are layers that a plan may leave alone, then layers again."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Sequential(*layers(), *layers())
        linear = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
        self.inner = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
        self.after = nn.Sequential(*layers(), *layers())
        self.x, self.middle = torch.randn(64, WIDTH), middle

    def forward(self) -> Tensor:
        return self.after(self.middle(self.inner, self.before(self.x))).square().mean()


def slope(inner: nn.Module, h: Tensor) -> Tensor:
    return torch.func.grad(lambda z: inner(z).square().sum())(h)


def slopes(inner: nn.Module, h: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda z: inner(z).square().sum()))(h)


def curvature(inner: nn.Module, h: Tensor) -> Tensor:
    return h + torch.func.hessian(lambda z: inner(z).square().sum())(h[0]).sum(0)


def rows(inner: nn.Module, h: Tensor) -> Tensor:
    return h + torch.func.jacrev(lambda z: inner(z).sum(0))(h).sum(0)


def tangent(inner: nn.Module, h: Tensor) -> Tensor:
    return sum(torch.func.jvp(inner, (h,), (torch.ones_like(h),)), h)


def dual(inner: nn.Module, h: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = inner(forward_ad.make_dual(h, torch.ones_like(h)))
        return h + sum(forward_ad.unpack_dual(out))


def adapted(inner: nn.Module, h: Tensor) -> Tensor:
    """A step of gradient descent on the inner weights, then a call with what it gives."""
    weights = dict(inner.named_parameters())
    call = torch.func.functional_call
    found = torch.func.grad(lambda w: call(inner, w, (h,)).square().sum())(weights)
    return call(inner, {name: w - 0.1 * found[name] for name, w in weights.items()}, (h,))


@pytest.mark.parametrize("middle", [slope, slopes, curvature, rows, tangent, dual, adapted], ids=lambda f: f.__name__)
def test_levels_inside_of_a_forward(middle):
    """Transforms call modules that run without the recorder, and save zeros of tangents, which have no bytes."""
    with stepped(Net(middle)) as one:
        for every in (1000, 2):
            one.agrees(Program(one.graph, held(one.graph, every)))
        one.agrees(one.away(held(one.graph, 2)))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "dropout"])
def test_a_forward_that_opens_a_dual_level(norm):
    """Under a dispatch mode torch takes other formulas for tangents, with other last bits: the level is left to itself."""

    class Tangents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before, self.inner = nn.Sequential(*layers(), *layers()), nn.Sequential(*layers(norm), *layers(norm))

        def forward(self, x: Tensor) -> Tensor:
            return dual(self.inner, self.before(x))

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(3)
        losses = []
        for _ in range(5):
            loss = model(torch.randn(64, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, torch.rand(3)]

    run = agrees(use, build=Tangents)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops


def test_a_dual_level_that_is_left_open():
    """An exception may skip the end of the level: nothing is left behind, and the next step is as ever."""

    class Opens(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                forward_ad.enter_dual_level()
                raise ValueError("in the forward")
            return super().forward(x).tanh().exp()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Opens(WIDTH, WIDTH)

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for step in range(8):
            Opens.fails = step in (1, 5)
            try:
                model(torch.ones(8, WIDTH)).sum().backward()
            except ValueError:
                forward_ad.exit_dual_level()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return []

    agrees(use, build)


def steps_around(backward: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]]) -> list[Tensor]:
    """Gradients of one step whose saved tensors are rebuilt, beside those of the plain step."""
    found = []
    for drops in (False, True):
        with stepped(Net(lambda inner, h: inner(nn.functional.dropout(h, 0.3)))) as one:
            program = Program(one.graph, held(one.graph, 1000)) if drops else None
            loss = one.forward(program)
            found.append(backward(loss, list(one.model.parameters())))
            assert not drops or one.rebuilt
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    return list(found[0])


def test_batched_gradients():
    """Rebuilds draw random numbers, which torch forbids under vmap: they run below it."""
    directions = torch.tensor([1.0, 2.0])
    steps_around(lambda loss, weights: torch.autograd.grad(loss, weights, directions, is_grads_batched=True))
    backward = lambda loss, weights: torch.func.vmap(  # noqa: E731
        lambda v: torch.autograd.grad(loss, weights, v, retain_graph=True)
    )(directions)
    steps_around(backward)


def test_a_forward_under_a_dual_level_runs_as_it_is():
    """Forward over reverse: the model is called on a level that the loop has opened."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for _ in range(5):
            with forward_ad.dual_level():
                x = torch.ones(8, WIDTH, requires_grad=True)
                loss, along = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))).square().mean())
                (loss + along).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*layers(), *layers())

    agrees(use, build, sgd)
