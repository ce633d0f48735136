"""Hazards of what else is around a forward: checkpointing, saved-tensor hooks, functional transforms, threads."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memopt.runtime import ObservingEngine
from lightning_memopt.session.forward.recording import Recording
from tests.cpu.lib.harness import dropping, outcome
from tests.cpu.lib.models import (
    BATCHES,
    Body,
    X,
    data,
    exact,
    grads,
    made,
    planned,
    same_when_dropped,
    squares,
    trains,
)


class Checkpoints(Body):
    """Checkpoints its own layers."""

    reentrant = False

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = checkpoint(self.block, layer, x, i, use_reentrant=self.reentrant)
        return x.exp()

    def block(self, layer, x, i):
        return F.dropout(torch.tanh(layer(x)).exp().sin().exp(), 0.2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_e13_model_that_checkpoints_itself(reentrant):
    """EXACT: its own checkpointing works as without us."""

    class Model(Checkpoints):
        pass

    Model.reentrant = reentrant
    exact(Model, lambda m: squares(m, X.clone().requires_grad_()))
    trains(Model, loss=lambda m, x: squares(m, x.clone().requires_grad_()), drops=False)


def held_nbytes(model, recording):
    """Bytes of the storages made in forward that are alive after it."""
    storages = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    s = t.untyped_storage()
                    storages.append((weakref.ref(s), s.nbytes()))
            return out

    gc.collect()
    with recording(), Watch():
        loss = squares(model, data(64, 16).requires_grad_())
    found = {id(ref()): nbytes for ref, nbytes in storages if ref() is not None}
    loss.backward()
    return sum(found.values())


def test_e13_checkpointed_memory_does_not_rise():
    """Rule 9: what the model's own checkpoint lets go is not held by us."""
    plain = held_nbytes(made(Checkpoints), contextlib.nullcontext)

    def keeping():
        engine = ObservingEngine()
        return Recording(engine, engine.make_recorder(), own_mode=True)

    assert held_nbytes(made(Body), contextlib.nullcontext) > plain  # the fixture frees something
    assert held_nbytes(made(Checkpoints), keeping) <= plain
    assert held_nbytes(made(Checkpoints), dropping) <= plain


def test_e13_transformers_gradient_checkpointing():
    """EXACT with gradient_checkpointing_enable()."""
    transformers = pytest.importorskip("transformers")

    def factory():
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
        model = transformers.GPT2LMHeadModel(config)
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
        return model.train()

    ids = torch.arange(16).view(2, 8)
    exact(factory, lambda m: m(ids, labels=ids).loss)


def test_e14_users_own_hooks():
    """EXACT: inside, the user's pair wins and sees what it would see; around the loop, it is there again afterwards. A pair
    around the loop that may change bits: test_around_forward.py.
    """

    class Hooked(Body):
        def __init__(self):
            super().__init__()
            self.packed = []

        def between(self, h, i):
            def pack(t):
                self.packed.append(tuple(t.shape))
                return t.clone()

            with saved_tensors_hooks(pack, lambda t: t), save_on_cpu() if i == 1 else contextlib.nullcontext():
                return h.exp().sin()

    plain, rebuilt = made(Hooked), made(Hooked)
    outcome(plain, lambda m: squares(m, X), drop=False)
    outcome(rebuilt, lambda m: squares(m, X), drop=True)
    assert plain.packed == rebuilt.packed and plain.packed
    exact(Hooked, lambda m: squares(m, X))
    trains(Hooked)
    with save_on_cpu():
        trains(Body)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def test_e15_functional_transforms_inside():
    """EXACT: torch.func.grad, vmap and jvp inside of the forward, which forbid hooks."""

    class Functional(Body):
        def between(self, h, i):
            slope = torch.func.grad(lambda z: (z.sin() * self.layers[0].weight.sum()).sum())(h)
            rows = torch.vmap(lambda r: r.tanh().exp())(h)
            _, tangent = torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))
            return rows + 0.1 * slope + tangent

    exact(Functional, lambda m: squares(m, X))
    trains(Functional)


def test_e15_model_inside_functional_transforms():
    """The region is run unmodified: functional_call under grad and vmap, in an attached run."""

    def use(model):
        weights = dict(model.named_parameters())
        out = torch.func.grad(lambda w: torch.func.functional_call(model, w, (X,)).sum())(weights)
        rows = torch.vmap(lambda x: model(x))(X)
        return [*out.values(), rows.detach()]

    planned(use)


def test_e15_hooks_disabled_around_and_inside():
    """EXACT: a scope that disables saved-tensor hooks works, and the user's own hooks inside of it still raise."""

    class Disables(Body):
        def between(self, h, i):
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                h = h.exp().sin()
                if i == 0:
                    with pytest.raises(RuntimeError, match="not here"), save_on_cpu():
                        pass
            return h.exp()

    exact(Disables, lambda m: squares(m, X))
    trains(Disables)

    def around(model):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            loss = squares(model, data(128, 16))
        loss.backward()
        return grads(model)

    planned(around)

    class Hooked(Body):
        def between(self, h, i):
            with save_on_cpu(), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                return h

    for recording in (contextlib.nullcontext, dropping):
        with pytest.raises(RuntimeError, match="not here"), recording():
            made(Hooked)(X)


class Threaded(Body):
    """Runs a part of itself in a worker thread."""

    def between(self, h, i):
        out = []
        thread = threading.Thread(target=lambda: out.append(h.exp().sin() * 2))
        thread.start()
        thread.join()
        return h.tanh() + out[0].exp()


def test_e16_forward_in_worker_threads():
    """EXACT: hooks and modes belong to a thread, so what other threads make is opaque; whole forwards there are plain."""
    exact(Threaded, lambda m: squares(m, X))
    trains(Threaded, drops=False)

    def elsewhere(model):
        losses = []
        threads = [threading.Thread(target=lambda b=b: losses.append((b, squares(model, BATCHES[b])))) for b in range(3)]
        for thread in threads:
            thread.start()
            thread.join()
        for _, loss in sorted(losses):
            loss.backward()
        return grads(model)

    planned(elsewhere)


def test_e16_backward_in_another_thread():
    """EXACT: unpacked on a thread that never saw the forward."""

    def use(model, recording=contextlib.nullcontext):
        with recording():
            loss = squares(model, data(128, 16))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return grads(model)

    same_when_dropped(use)
    planned(use)
