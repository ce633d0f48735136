"""Hazards of saved tensors that change: in place, through views and `.data`, before and after they were saved."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.cpu.lib.harness import recorded, same_bits
from tests.cpu.lib.models import (
    BATCHES,
    CHANGED,
    Body,
    Layer,
    X,
    exact,
    exact_everywhere,
    exact_f,
    grads,
    in_plan,
    leaf,
    same,
    same_error,
    squares,
    trains,
)


@pytest.mark.parametrize("where", ["in the forward", "after the forward"])
def test_c1_changed_after_it_was_saved_and_dropped(where):
    """The error of plain autograd: a saved result is overwritten, whether we still hold it or not."""

    def step(inside):
        h = (X @ leaf()).sin()
        y = h.exp()
        loss = (y * y).sum()
        if inside:
            y.mul_(2)
        return loss, y

    if where == "in the forward":
        same_error(lambda: step(True)[0], match=CHANGED)
        return
    for drop in (False, True):
        with recorded(drop):
            loss, y = step(False)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_c1_changed_after_it_was_saved_and_kept():
    """The error of plain autograd: leaves and inputs are kept, and their versions are checked."""
    x = X.clone()

    def step():
        loss = (x @ leaf()).sum()
        x.add_(1)
        return loss

    same_error(step, match=CHANGED)


def test_c1_changed_through_a_view():
    """The error of plain autograd: a view of a saved tensor is overwritten."""

    def step():
        y = (X @ leaf()).exp()
        loss = y.sum()
        y[0].zero_()
        return loss

    same_error(step, match=CHANGED)


@pytest.mark.parametrize("inside", [True, False])
def test_c1_changed_where_no_version_counts(inside):
    """EXACT: through `.data` autograd reads the new bytes without an error; so do we while the tensor lives."""
    results = []
    for drop in (False, True):
        w = leaf()
        with recorded(drop):
            y = (X @ w).exp()
            if inside:
                y.data.mul_(2)
            loss = y.sin().sum()
        if not inside:
            y.data.mul_(2)
        loss.backward()
        results.append(w.grad)
    assert same_bits(*results)


def test_c1_changed_where_no_version_counts_and_let_go():
    """EXACT: the same, where nobody holds the tensor and it is rebuilt; overwritten by a recorded op and by an opaque one."""

    def seen(x, w):
        y = (x @ w).exp()  # saved by exp, overwritten, saved by sin: backward of both reads the new bytes
        y.data.mul_(2)
        y.data.add_(1)
        return y.sin()

    def opaque(x, w):
        y = (x @ w).exp()
        torch._foreach_mul_([y.data], 2.0)
        return y.sin()

    exact_everywhere(seen)
    exact_everywhere(opaque, drops=False)


def test_c1_other_version_counter_of_the_same_memory():
    """EXACT: `.data` of a tensor that was written in place counts versions of its own; no false alarm, no missed one."""

    def f(x, w):
        y = (x @ w).mul_(2).exp()
        y = y.clone().add_(1)
        return (y * y.data).sin() + y.sin()

    exact_f(f)


def test_c1_overwritten_through_another_version_counter():
    """EXACT: rebuilds start from what was written in place; then `.data`, with a counter of its own, is overwritten."""

    def saved(x, w):
        y = (x @ w).clone().add_(1)
        z = y.sin().exp()
        y.data.mul_(2)
        return z * y.cos()

    def read_before(x, w):
        y = (x @ w).clone().add_(1)
        z = (y * 2).sin().exp() + y.data.sum()
        y.data.mul_(2)
        y.data.add_(1)
        return z * z.cos()

    exact_everywhere(saved)
    exact_everywhere(read_before)


@pytest.mark.parametrize("always", [True, False])
def test_c1_weights_overwritten_through_another_version_counter(always):
    """EXACT: after an optimizer step a parameter has moved its counter, its `.data` has not; in observed steps or later."""

    class Rescaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16) * 0.2)
            self.u = nn.Parameter(torch.randn(16, 16) * 0.2)
            self.rescales = always

        def forward(self, x):
            h = (x @ self.w).sin().exp()
            if self.rescales:
                self.w.data.mul_(0.9)
            return ((h @ self.u).sin() @ self.w).tanh()

    found = []
    for attach in (False, True):
        with in_plan(Rescaled, attach=attach) as (model, _):
            model.rescales = True
            squares(model, BATCHES[0]).backward()
            found.append(grads(model))
    assert same(*found)


def test_c1_planned_steps_raise_too():
    """The error of plain autograd, in a planned step, for a tensor that the plan dropped and for one that it kept."""

    class Leaky(Body):
        def between(self, h, i):
            self.seen = h
            return h

    for meddle in (False, True):
        with in_plan(Leaky) as (model, _):
            loss = squares(model, BATCHES[0])
            if meddle:
                with torch.no_grad():
                    model.seen.mul_(2)
                with pytest.raises(RuntimeError, match=CHANGED):
                    loss.backward()
            else:
                model.seen = None
                loss.backward()


def test_c2_input_overwritten_inside():
    """EXACT: the input of the model is overwritten by an op of the forward after others have read it."""

    def f(x, w):
        x = x.clone()
        y = torch.exp(x) * (x @ w).exp()
        z = x.add_(1)
        return y.sin() + (z @ w).exp().sin()

    with pytest.raises(RuntimeError):
        f(X, leaf()).sum().backward()  # saved x: refused by autograd itself

    def g(x, w):
        y = (x + w[0]).exp()  # autograd saves y, the recipe reads x
        x.add_(1)
        return y.sin() + (x + w[1]).exp().sin()

    exact(lambda: Layer(g), lambda m: m(X.clone()).square().sum())
    trains(lambda: Layer(g), [X] * 3, loss=lambda m, x: squares(m, x.clone()), drops=False)


def test_c3_views_changed_in_place():
    """EXACT: `x[:].relu_()`, normalisation and ReLU in place, chains of in-place ops, slices filled one by one."""

    def through_view(x, w):
        y = (x @ w).sin()
        y[:].relu_()
        return y.exp()

    def chain(x, w):
        y = (x @ w).mul_(0.5).add_(1)
        return y.sub_(0.2).sigmoid_().mul(2).neg_().exp()

    def slices(x, w):
        y = torch.empty_like(x)
        for i in range(4):
            y[2 * i : 2 * i + 2] = (x[2 * i : 2 * i + 2] @ w).tanh()
        return y.exp().sin()

    def zeros(x, w):
        y = torch.zeros_like(x)
        y[:, ::2] = (x @ w).sin()[:, ::2]
        return y.exp().sin()

    def norm(x, w):
        return F.relu_(F.instance_norm((x @ w).view(2, 4, 16))).exp()

    for f in (through_view, chain, slices, zeros, norm):
        exact_everywhere(f)


def test_c4_held_value_overwritten_later():
    """EXACT: a result is saved by a branch without gradient, then overwritten; what follows is rebuilt from the old bytes."""
    graphs = []

    def f(x, w):
        y = (x @ w).sin()
        graphs.append(y * y)  # saves y; never run backward
        z = y.add_(1)
        return z.exp().sin()

    exact_f(f)
