"""Memory that is written behind our back: through numpy, dlpack, raw pointers, storages and other threads."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from tests.cpu.lib.harness import dropping, recorded
from tests.cpu.lib.models import (
    CHANGED,
    Body,
    X,
    exact,
    exact_everywhere,
    exact_f,
    leaf,
    squares,
    trains,
)


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


def by_torch(t):
    with torch.no_grad():
        t.mul_(2)


def in_a_thread(work, t):
    thread = threading.Thread(target=work, args=(t,))
    thread.start()
    thread.join()


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
    exact_everywhere(f)


def test_exposed_memory_written_later():
    """EXACT: the array is taken early and written after ops have read the tensor."""

    def f(x, w):
        y = (x @ w).sin()
        array = y.detach().numpy()
        between = (y + 1).exp().sin()
        array[0] = 0.5
        return between + (y + 1).exp().sin()

    exact_everywhere(f)


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
        in_a_thread(by_torch, y)
        return before + (y + 1).exp().sin()

    exact_everywhere(f)


@pytest.mark.parametrize("opaque", [False, True])
def test_changed_in_another_thread_and_not_read_again(opaque):
    """EXACT where a recipe makes the old bytes again; REFUSED where nothing does. Never the new bytes."""

    def f(x, w):
        y = (x @ w).sort(-1).values if opaque else (x @ w).sin()
        out = (y + 1).exp().sin()
        in_a_thread(by_torch, y)
        return out

    if not opaque:
        exact_f(f)
        return
    f(X, leaf()).sum().backward()  # plain autograd needs `y` no more
    with recorded(drop=True):
        loss = f(X, leaf()).sum()
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
