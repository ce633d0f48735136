"""Hazards of what users do with autograd: several forwards and backwards, double backward, saved attributes, own functions."""

import contextlib

import pytest
import torch

from lightning_memopt.runtime import ObservingEngine
from lightning_memopt.session.forward.recording import Recording
from tests.cpu.lib.harness import dropping, outcome, same_bits
from tests.cpu.lib.models import (
    BATCHES,
    Body,
    Noisy,
    X,
    data,
    exact,
    grads,
    made,
    planned,
    same,
    same_when_dropped,
    squares,
    trains,
)


def test_e6_several_forwards_then_one_backward():
    """EXACT, dropped and in planned steps, backwards in any order."""

    def together(model):
        losses = [squares(model, b) for b in BATCHES]
        torch.stack(losses).sum().backward()
        return grads(model)

    def reversed_(model):
        losses = [squares(model, b) for b in BATCHES]
        for loss in losses[::-1]:
            loss.backward()
        return grads(model)

    for use in (together, reversed_):
        planned(use)

    def engines(model, recording):
        losses = []
        for b in BATCHES:
            with recording():
                losses.append(squares(model, b))
        losses[2].backward()
        losses[0].backward()
        (losses[1] * losses[3]).backward()
        return grads(model)

    same_when_dropped(engines)
    trains(Body, loss=lambda m, x: squares(m, x) + squares(m, x + 1))  # contrastive, also while observing


@pytest.mark.parametrize("factory", [Body, Noisy])
def test_e7_two_backwards_with_retain_graph(factory):
    """EXACT: the second backward gives what the first gave, also where the plan has let everything go."""

    def twice(model, recording=None):
        torch.manual_seed(0)
        with recording() if recording else contextlib.nullcontext():
            loss = squares(model, data(128, 16))
        loss.backward(retain_graph=True)
        first = grads(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return first + grads(model) + [torch.rand(3)]

    same_when_dropped(twice, factory)
    planned(twice, factory)
    trains(factory, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward()), drops=False)


def test_e7_random_results_whose_state_was_not_noted():
    """EXACT: without the generator's state a random op is never run again; what is made from it is kept."""

    class Stateless(ObservingEngine):
        def wants_state(self, name):
            return False

    plain = made(Noisy)
    torch.manual_seed(0)
    squares(plain, X).backward()
    model = made(Noisy)
    torch.manual_seed(0)
    engine = Stateless(pressure=lambda: 1 << 62)
    with Recording(engine, engine.make_recorder(), own_mode=True):
        loss = squares(model, X)
    loss.backward()
    assert same(grads(model), grads(plain)) and engine.evictions > 0


def test_e7_third_access_after_the_graph_was_freed():
    """The error of plain autograd."""
    with dropping():
        loss = squares(made(Body), X)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def second_order(model, recording=contextlib.nullcontext):
    """A gradient penalty: double backward through `create_graph`."""
    x = data(128, 16).requires_grad_()
    with recording():
        loss = squares(model, x)
    (gx,) = torch.autograd.grad(loss, x, create_graph=True)
    gx.square().sum().backward()
    return [*grads(model), x.grad]


def test_e8_double_backward():
    """EXACT: create_graph, a gradient penalty, third order."""
    same_when_dropped(second_order)
    planned(second_order)

    def third(model, recording=contextlib.nullcontext):
        x = data(128, 16).requires_grad_()
        with recording():
            y = model(x).exp().sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = g.sin().sum()
        y.backward()
        return [*grads(model), x.grad]

    same_when_dropped(third)
    planned(third)
    trains(Body, loss=second_order_loss, drops=False)


def second_order_loss(model, x):
    x = x.clone().requires_grad_()
    loss = squares(model, x)
    (gx,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gx.square().sum()


def test_e8_autograd_grad_and_jvp():
    """EXACT: autograd.grad of some inputs only, forward-mode differentiation around the model."""

    def some(model, recording=contextlib.nullcontext):
        with recording():
            loss = squares(model, data(128, 16))
        return torch.autograd.grad(loss, [model.layers[1].weight, model.layers[2].bias])

    same_when_dropped(some)
    planned(some)

    def tangents(model):
        forward_ad = torch.autograd.forward_ad
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(X, torch.ones_like(X)))
            primal, tangent = forward_ad.unpack_dual(out)
            return (primal * tangent).sum()

    exact(Body, tangents, drops=False)  # such a level is left to itself


class Physics(Body):
    """Differentiates with respect to its input inside its forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).exp().sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force.sin().exp() + energy[:, None]


def test_e9_backward_inside_forward():
    """EXACT, once and nested."""
    exact(Physics, lambda m: squares(m, X))
    trains(Physics, drops=False)

    def nested(model):
        x = X.clone().requires_grad_()
        y = model(x).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = y + g.sin().square().sum()
        return y

    exact(Body, nested)


def test_e10_saved_attributes_are_read_outside_of_backward():
    """EXACT: `grad_fn._saved_*` before and after, any number of times, does not disturb backward."""
    plain = outcome(made(Body), lambda m: squares(m, X), drop=False)
    model = made(Body)
    with dropping():
        y = (model.layers[0](X)).tanh().exp()
        loss = squares(model, X) + y.sum()
    first, second = y.grad_fn._saved_result, y.grad_fn._saved_result
    assert same_bits(first, y) and same_bits(second, y)
    node, seen = loss.grad_fn, 0
    while node is not None:
        seen += sum(1 for n in dir(node) if n.startswith("_saved_") and getattr(node, n) is not None)
        node = node.next_functions[0][0] if node.next_functions else None
    assert seen
    loss.backward()
    assert plain.loss is not None and all(p.grad is not None for p in model.parameters())
    same_when_dropped(read_saved)


def read_saved(model, recording):
    with recording():
        y = model(X).exp()
    values = [y.grad_fn._saved_result.clone(), y.grad_fn.next_functions[0][0]._saved_self.clone()]
    y.sum().backward()
    return values + grads(model)


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice, saves an input and an output, and stashes one on the context."""

    @staticmethod
    def forward(ctx, x, scale):
        y = x.exp() * scale
        ctx.save_for_backward(x, y)
        ctx.stash = x.sin()
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * (y + again * 0 + x.cos() * 0) + ctx.stash * 0.1 * grad, None


class Dirty(torch.autograd.Function):
    """Works in place."""

    @staticmethod
    def forward(ctx, x):
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class Custom(Body):
    def between(self, h, i):
        return Dirty.apply(Twice.apply(h, 0.5).sin() + 1).exp()


def test_e11_e12_custom_functions():
    """EXACT: saved tensors read twice, outputs saved, tensors stashed on the context, in-place with mark_dirty."""
    exact(Custom, lambda m: squares(m, X))
    trains(Custom, drops=False)
    same_when_dropped(read_twice, Custom)


def read_twice(model, recording):
    with recording():
        loss = squares(model, X)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)
