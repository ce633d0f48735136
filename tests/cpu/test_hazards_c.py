"""Hazards of saved tensors: in-place changes, views, layouts, exotic tensors, and memory written behind our back."""

import ctypes
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memopt.record import View
from lightning_memopt.runtime.execute import below_autograd
from tests.cpu.harness import dropping, same_bits
from tests.cpu.models import Body, data, exact, made, same_error, squares, train, trains, verified

torch.set_num_threads(1)
X = data(8, 16)
W = data(16, 16, seed=4)
CHANGED = "modified by an inplace operation"


class Layer(nn.Module):
    """One weight and a function of (x, w) that a test supplies."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.w = nn.Parameter(W.clone())

    def forward(self, x):
        return self.f(x, self.w)


def exact_f(f, x=X, drops=True):
    """`f(x, w)` under replay, summed to a loss."""
    return exact(lambda: Layer(f), lambda m: m(x).abs().square().sum(), drops=drops)


def leaf():
    return W.clone().requires_grad_()


# -- C1, C2, C3: in place --------------------------------------------------------------------------


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
        if drop:
            with dropping() as engine:
                loss, y = step(False)
            assert engine.evictions > 0
        else:
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

        def forward(w=w):
            y = (X @ w).exp()
            if inside:
                y.data.mul_(2)
            return y

        if drop:
            with dropping() as engine:
                y = forward()
                loss = y.sin().sum()
            assert engine.evictions > 0
        else:
            y = forward()
            loss = y.sin().sum()
        if not inside:
            y.data.mul_(2)
        loss.backward()
        results.append(w.grad)
    assert same_bits(*results)


def test_c1_changed_where_no_version_counts_and_let_go():
    """EXACT: the same, where nobody holds the tensor and it is rebuilt; overwritten by a recorded op and by an opaque one."""

    def recorded(x, w):
        y = (x @ w).exp()  # saved by exp, overwritten, saved by sin: backward of both reads the new bytes
        y.data.mul_(2)
        y.data.add_(1)
        return y.sin()

    def opaque(x, w):
        y = (x @ w).exp()
        torch._foreach_mul_([y.data], 2.0)
        return y.sin()

    exact_f(recorded)
    exact_f(opaque, drops=False)
    for f in (recorded, opaque):
        trains(lambda f=f: Layer(f), [X] * 3, drops=False)


def test_c1_other_version_counter_of_the_same_memory():
    """EXACT: `.data` of a tensor that was written in place counts versions of its own; no false alarm, no missed one."""

    def f(x, w):
        y = (x @ w).mul_(2).exp()
        y = y.clone().add_(1)
        return (y * y.data).sin() + y.sin()

    exact_f(f)


def test_c1_planned_steps_raise_too():
    """The error of plain autograd, in a planned step, for a tensor that the plan dropped and for one that it kept."""
    from lightning_memopt import optimize

    class Leaky(Body):
        def between(self, h, i):
            self.seen = h
            return h

    for meddle in (False, True):
        model = made(Leaky)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
            train(model, [data(32, 16, seed=s) for s in range(2)], optimizer=optimizer)
            assert run.plan is not None
            loss = squares(model, data(32, 16))
            with torch.no_grad():
                if meddle:
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
        exact_f(f)
        trains(lambda f=f: Layer(f), [X] * 3, drops=False)


def test_c4_held_value_overwritten_later():
    """EXACT: a result is saved by a branch without gradient, then overwritten; what follows is rebuilt from the old bytes."""
    graphs = []

    def f(x, w):
        y = (x @ w).sin()
        graphs.append(y * y)  # saves y; never run backward
        z = y.add_(1)
        return z.exp().sin()

    exact_f(f)


# -- C5 to C11: storages ---------------------------------------------------------------------------


def test_c5_views_of_parameters_are_kept_as_themselves():
    """A parameter and its views are never copied and never dropped."""
    w = nn.Parameter(W.clone())
    with dropping() as engine:
        loss = (X @ w.t()).exp().sum() + w.view(-1)[4:8].sin().sum()
    slots = [s for s in engine.tape.slots.values() if s.value is not None]
    held = [s for s in slots if s.value.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()]
    assert len(held) == 1 and held[0].external and held[0].value is w
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
    sizes = [s.nbytes for s in engine.tape.slots.values() if s.call is not None and "exp" in s.call.func.name()]
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
    assert engine.replayed.count(min(engine.replayed)) == 1


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
    kept = set(engine.replayed)
    held.clear()
    with dropping() as engine:
        loss = f(X, w).sum()
    held.clear()
    loss.backward()
    assert kept < set(engine.replayed)


def test_c11_what_the_user_holds_and_changes():
    """EXACT: a held result is changed after the forward; autograd did not save it, a rebuild must not start from it."""
    results = []
    for drop in (False, True):
        w = leaf()

        def forward(w=w):
            y = (X @ w).sort(-1).values  # an opaque result, which rebuilds start from
            z = (X @ w) + 1  # a recorded one
            return y, z, (y + 1).exp().sin() + (z + 1).exp().sin()

        if drop:
            with dropping() as engine:
                y, z, out = forward()
                loss = out.sum()
            assert engine.evictions > 0
        else:
            y, z, out = forward()
            loss = out.sum()
        with torch.no_grad():
            z.zero_()
        loss.backward()
        results.append(w.grad)
    assert same_bits(*results)
    with dropping():
        y, z, out = forward()
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match=CHANGED):  # REFUSED: nothing else can make it again
        out.sum().backward()


# -- C12 to C17: exotic tensors --------------------------------------------------------------------


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

    exact_f(f)
    trains(lambda: Layer(f), [X] * 3, drops=False)


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

    exact_f(f)
    trains(lambda: Layer(f), [X] * 3, drops=False)


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


# -- memory that is written behind our back --------------------------------------------------------


def by_numpy(t):
    t.detach().numpy()[0] = 0.5


def by_asarray(t):
    np.asarray(t.detach())[0] = 0.5


def by_dlpack(t):
    np.from_dlpack(t.detach())[0] = 0.5


def by_capsule(t):
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).numpy()[0] = 0.5


def by_ctypes(t):
    (ctypes.c_float * 4).from_address(t.data_ptr())[0] = 0.5


def by_storage_pointer(t):
    (ctypes.c_float * 4).from_address(t.untyped_storage().data_ptr())[0] = 0.5


def by_storage(t):
    t.untyped_storage()[2] = 7


@pytest.mark.parametrize(
    "write", [by_numpy, by_asarray, by_dlpack, by_capsule, by_ctypes, by_storage_pointer, by_storage], ids=lambda f: f.__name__
)
def test_exposed_memory_written(write):
    """EXACT: an activation is written through its raw memory, before, between and after ops that read it."""

    def f(x, w):
        y = (x @ w).sin()
        before = y + 1
        write(y)
        return before.exp().sin() + (y + 1).exp().sin() + (y @ w).tanh()

    # the plain run saves some of `y` before and some after; both must be as they are there
    exact_f(f)
    trains(lambda: Layer(f), [X] * 3, drops=False)


def test_exposed_memory_written_later():
    """EXACT: the array is taken early and written after ops have read the tensor."""

    def f(x, w):
        y = (x @ w).sin()
        array = y.detach().numpy()
        between = (y + 1).exp().sin()
        array[0] = 0.5
        return between + (y + 1).exp().sin()

    exact_f(f)
    trains(lambda: Layer(f), [X] * 3, drops=False)


def test_exposed_buffer_written():
    """EXACT: a buffer that numpy updates in the forward, after an op has read it."""

    class Counts(Body):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(16))

        def between(self, h, i):
            h = (h + self.scale).exp()
            self.scale.numpy()[:] *= 0.5
            return h

    exact(Counts, lambda m: squares(m, X))
    trains(Counts)


def test_exposure_watch_is_put_back():
    """Nothing of torch is left replaced after a recorded forward."""
    names = [(torch.Tensor, n) for n in ("data_ptr", "numpy", "__array__", "__dlpack__")]
    names += [(torch.UntypedStorage, n) for n in ("data_ptr", "__setitem__", "fill_", "copy_")]
    names += [(torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch._C._autograd, "_saved_tensors_hooks_disable")]
    before = [(getattr(o, n), n in vars(o)) for o, n in names]
    with pytest.raises(ValueError), dropping():
        assert any(getattr(o, n) is not b for (o, n), (b, _) in zip(names, before, strict=True))
        raise ValueError
    assert before == [(getattr(o, n), n in vars(o)) for o, n in names]


def test_changed_in_another_thread():
    """EXACT: a tensor is overwritten by a thread, where no dispatch mode sees it."""

    def f(x, w):
        y = (x @ w).sin()
        before = (y + 1).exp().sin()

        def work():
            with torch.no_grad():
                y.mul_(2)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return before + (y + 1).exp().sin()

    exact_f(f)
    trains(lambda: Layer(f), [X] * 3, drops=False)


@pytest.mark.parametrize("opaque", [False, True])
def test_changed_in_another_thread_and_not_read_again(opaque):
    """EXACT where a recipe makes the old bytes again; REFUSED where nothing does. Never the new bytes."""

    def f(x, w):
        y = (x @ w).sort(-1).values if opaque else (x @ w).sin()
        out = (y + 1).exp().sin()

        def work():
            with torch.no_grad():
                y.mul_(2)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return out

    if not opaque:
        exact_f(f)
        return
    f(X, leaf()).sum().backward()  # plain autograd needs `y` no more
    with dropping() as engine:
        loss = f(X, leaf()).sum()
    assert engine.evictions > 0
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
