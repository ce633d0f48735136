"""Hazards of what a saved tensor is: views, layouts, shared and exotic storages, what backward and the user hold."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memopt.record import View
from lightning_memopt.record.below import below_autograd
from tests.cpu.lib.harness import dropping, recorded, same_bits
from tests.cpu.lib.models import (
    CHANGED,
    Layer,
    W,
    X,
    data,
    exact,
    exact_everywhere,
    exact_f,
    leaf,
    same_error,
    squares,
    verified,
)


def test_c5_views_of_parameters_are_kept_as_themselves():
    """A parameter and its views are never copied and never dropped."""
    w = nn.Parameter(W.clone())
    with dropping() as engine:
        loss = (X @ w.t()).exp().sum() + w.view(-1)[4:8].sin().sum()
    address = w.untyped_storage().data_ptr()
    versions = [v for v in engine.tape.versions.values() if v.holding.value is not None]
    held = [v for v in versions if v.holding.value.untyped_storage().data_ptr() == address]
    assert len(held) == 1 and held[0].external and held[0].parameter
    loss.backward()


def test_c6_expanded_tensors_cost_their_storage():
    """EXACT, and a rebuild makes only the bytes of the storage: 64 of them, not a megabyte."""

    def f(x, w):
        small = w[0].exp()
        return (small.expand(1024, 16).sin()).sum(0) * x

    exact_f(f)
    w = leaf()
    with dropping() as engine:
        loss = w[0].exp().expand(1 << 14, 16).sin().sum()
    sizes = [v.nbytes for v in engine.tape.versions.values() if v.call is not None and "exp" in v.call.func.name()]
    assert sizes == [64]
    loss.backward()


@pytest.mark.parametrize(
    "window",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:, 2:9],
        lambda t: t[:, ::3],
        lambda t: t[3],
        lambda t: t[0:0],
        lambda t: t[2, 3],
        lambda t: t.as_strided((3, 3), (5, 1), 7),
        lambda t: t.unsqueeze(0).expand(4, -1, -1),
        lambda t: t.view(torch.int32),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t.view(4, 4, 4, 4).to(memory_format=torch.channels_last),
    ],
)
def test_c7_windows_are_found_again_exactly(window):
    """A view has its size, stride, offset, dtype and conjugate and negative bits back."""
    t = window(W.clone())
    base = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    with below_autograd():
        found = View(0, t).on(base)
    form = lambda a: (a.size(), a.stride(), a.storage_offset(), a.dtype, a.is_conj(), a.is_neg())  # noqa: E731
    assert form(found) == form(t) and same_bits(found, t)


def test_c7_channels_last_and_odd_strides():
    """EXACT, in the layouts that kernels choose by."""

    def factory():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU()).to(memory_format=torch.channels_last)

    x = data(2, 3, 9, 9).to(memory_format=torch.channels_last)
    exact(factory, lambda m: squares(m, x))
    exact_f(lambda x, w: ((x @ w).t().exp().t()[:, ::2].sin() @ w[::2, :]).exp().sin())


def test_c8_one_storage_saved_many_times():
    """EXACT, rebuilt once; memory that is used again by another tensor is not confused with it."""

    def f(x, w):
        y = (x @ w).exp()
        return y.sin() * y.cos() * y.view(-1).view(8, 16).tanh() * y[:, :] * y

    exact_f(f)

    def reuse(x, w):
        for _ in range(8):
            x = (x @ w).tanh() * torch.ones(8, 16).exp().mul(0.5)
        return x.exp()

    exact_f(reuse)
    with dropping() as engine:
        loss = f(X, leaf()).sum()
    loss.backward()
    assert engine.rebuilt_ops.count(min(engine.rebuilt_ops)) == 1


class Overwrites(torch.autograd.Function):
    """Its backward overwrites what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos_()


def test_c9_backward_overwrites_what_it_was_given():
    """EXACT where nobody else needs it, also for rebuilds that start from it; else the error of plain autograd."""

    def alone(x, w):
        y = (x @ w).exp()
        return Overwrites.apply(y.sin())

    exact_f(alone)

    def starting_point(x, w):
        y = (x @ w).tanh()
        return Overwrites.apply((y + 1).exp().add(1)) + (y + 2).exp()

    exact_f(starting_point)

    def shared():
        y = (X @ leaf()).sin()
        return (y.exp() + y.cos() + Overwrites.apply(y)).sum()

    same_error(shared, match=CHANGED)


def test_c9_verified_while_observing():
    """The same error when nothing was dropped."""
    with pytest.raises(RuntimeError, match=CHANGED):
        verified(Layer(lambda x, w: (lambda y: y.cos() + Overwrites.apply(y))((x @ w).sin())), lambda m: m(X).sum())


class ReturnsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.view_as(x)


def test_c10_backward_returns_what_it_was_given():
    """EXACT: a gradient that is a view of a rebuilt tensor stays what it is."""
    exact_f(lambda x, w: ReturnsView.apply((x @ w).exp().sin()) * 3)
    exact_f(lambda x, w: ReturnsView.apply(ReturnsView.apply((x @ w).exp()).cos()))


def test_c11_what_the_user_holds_is_left_alone():
    """EXACT: hidden states that the user keeps have their bytes after the step, and are used instead of a rebuild."""
    held = []

    def f(x, w):
        for _ in range(3):
            x = (x @ w).tanh().exp()
            held.append(x)
        return x.sin()

    w = leaf()
    with dropping() as engine:
        loss = f(X, w).sum()
    before = [h.detach().clone() for h in held]
    loss.backward()
    assert all(same_bits(a, b) for a, b in zip(held, before, strict=True))
    kept = set(engine.rebuilt_ops)
    held.clear()
    with dropping() as engine:
        loss = f(X, w).sum()
    held.clear()
    loss.backward()
    assert kept < set(engine.rebuilt_ops)


def test_c11_what_the_user_holds_and_changes():
    """EXACT: a held result is changed after the forward; autograd did not save it, a rebuild must not start from it."""

    def forward(w):
        y = (X @ w).sort(-1).values  # an opaque result, which rebuilds start from
        z = (X @ w) + 1  # a recorded one
        return y, z, (y + 1).exp().sin() + (z + 1).exp().sin()

    results = []
    for drop in (False, True):
        w = leaf()
        with recorded(drop):
            _, z, out = forward(w)
            loss = out.sum()
        with torch.no_grad():
            z.zero_()
        loss.backward()
        results.append(w.grad)
    assert same_bits(*results)
    with dropping():
        y, _, out = forward(leaf())
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match=CHANGED):  # REFUSED: nothing else can make it again
        out.sum().backward()


def test_c12_empty_and_tiny_tensors():
    """EXACT: no element, no dimension, one element, losses without batch."""
    exact_f(lambda x, w: (x[:0] @ w).exp().sin().sum() + (x @ w).exp())
    exact_f(lambda x, w: (x @ w).exp().sum().sin().exp())
    exact_f(lambda x, w: (x[:1, :1] * w[:1, :1]).exp().sin())
    exact_f(lambda x, w: F.nll_loss((x @ w).log_softmax(-1)[:0], torch.empty(0, dtype=torch.long), reduction="sum") + w.exp())


def test_c13_integers_and_masks():
    """EXACT: indices, boolean masks, gather and scatter, embeddings, integer arithmetic."""
    index = torch.arange(8) % 3

    def f(x, w):
        rows = w[index * 2 + 1]
        masked = rows.masked_fill(rows > 0.3, -1.0)
        return F.embedding(index + 1, w).exp() * masked.exp() * w.gather(0, (index[:, None] * 3 + torch.arange(16)) % 16)

    exact_everywhere(f)


def test_c14_complex():
    """EXACT: conjugates, real and imaginary parts, Fourier transforms."""

    def f(x, w):
        z = torch.complex(x @ w, (x @ w).tanh())
        z = z.conj() * z.exp() + torch.fft.fft(z).conj()
        return torch.fft.irfft(torch.fft.rfft(z.imag.sin())) * z.real.exp().clamp(max=3) + (z.mH @ z).abs()[:8]

    exact_f(f)


@pytest.mark.parametrize("layout", ["coo", "csr", "jagged", "quantized", "inference", "subclass"])
def test_c15_layouts_and_subclasses_are_left_untouched(layout):
    """EXACT: what is not an ordinary strided tensor is opaque; what surrounds it is still dropped."""

    def f(x, w):
        h = (x @ w).sin()
        if layout == "coo":
            h = torch.sparse.mm(x.relu().to_sparse(), w).tanh() + h
        elif layout == "csr":
            h = (x.relu().to_sparse_csr() @ w).tanh() + h
        elif layout == "jagged":
            nested = torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 3, 8]))
            h = nested.sin().tanh().values() + h
        elif layout == "quantized":
            h = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize() * h
        elif layout == "inference":
            with torch.inference_mode():
                frozen = x.sin() * 2
            h = h + frozen + frozen.clone()
        else:
            h = h.as_subclass(Mine) * 2
            h = h.exp().as_subclass(torch.Tensor)
        return h.exp().sin().exp()

    exact_everywhere(f)


class Mine(torch.Tensor):
    """A user's subclass."""


def test_c16_identity_of_saved_objects_is_no_promise():
    """Documented: a saved tensor has the bytes, not the identity, of the original."""
    w = leaf()
    with dropping():
        y = (X @ w).exp()
    saved = y.grad_fn._saved_result
    assert saved is not y and same_bits(saved, y)


def test_c17_tensors_on_other_devices():
    """EXACT with meta tensors about: they have no bytes and are opaque."""

    def f(x, w):
        shape = torch.empty(8, 16, device="meta").exp().shape
        return (x @ w).exp().view(shape).sin()

    exact_f(f)
