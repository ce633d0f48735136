"""Hazards of randomness and determinism: user code runs once, so its random numbers are drawn once."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.cpu.lib.harness import assert_exact, dropping, outcome, same_bits
from tests.cpu.lib.models import Body, data, exact, made, squares, stock_is_wrong, trains

X = data(8, 16)


class Dropout(Body):
    def between(self, h, i):
        return F.dropout(h, 0.4)


class PrivateGenerator(Body):
    """Draws its noise from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def between(self, h, i):
        return h * torch.rand(h.shape, generator=self.generator)


class NumpyNoise(Body):
    def __init__(self):
        super().__init__()
        np.random.seed(5)

    def between(self, h, i):
        return h * torch.from_numpy(np.random.rand(*h.shape).astype("float32"))


class PythonNoise(Body):
    def __init__(self):
        super().__init__()
        random.seed(5)

    def between(self, h, i):
        return h * random.random()


class NoiseInPlace(Body):
    """Fills memory in place, from the global stream and from a private one."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def between(self, h, i):
        noise = torch.empty_like(h).normal_().add_(torch.empty_like(h).uniform_(generator=self.generator))
        return (h * noise).exp()


def test_a1_dropout_masks_are_the_same():
    """EXACT masks, for dropout and for noise filled in place."""
    exact(Dropout, lambda m: squares(m, X))
    exact(NoiseInPlace, lambda m: squares(m, X))
    trains(Dropout)
    trains(NoiseInPlace)


def test_a1_dropout_inside_attention():
    """EXACT: dropout inside scaled_dot_product_attention and inside a transformer layer."""

    def factory():
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    exact(factory, lambda m: squares(m, data(2, 5, 16)))
    trains(factory, [data(16, 16, 16, seed=s) for s in range(3)])


@pytest.mark.parametrize("factory", [Dropout, PrivateGenerator], ids=["global", "private"])
def test_a2_position_of_the_stream(factory):
    """EXACT: what is drawn after the step is what the plain run draws, from the global and from a private generator."""
    plain, rebuilt = made(factory), made(factory)
    assert_exact(outcome(plain, lambda m: squares(m, X), drop=False), outcome(rebuilt, lambda m: squares(m, X), drop=True))
    if factory is PrivateGenerator:
        assert torch.equal(plain.generator.get_state(), rebuilt.generator.get_state())


@pytest.mark.parametrize("factory", [PrivateGenerator, NumpyNoise, PythonNoise])
def test_a3_p3_private_generator_and_numpy_and_python_random(factory):
    """EXACT gradients with random numbers that stock checkpoint does not restore; the streams end where they would."""
    stock_is_wrong(factory, lambda m, call: call(m, X).square().sum())
    exact(factory, lambda m: squares(m, X))
    draws = []
    for drop in (False, True):
        random.seed(8), np.random.seed(8)
        model = made(factory)
        outcome(model, lambda m: squares(m, X), drop=drop)
        draws.append((random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    trains(factory)


class RReLU(Body):
    def forward(self, x):
        for layer in self.layers[1:]:
            x = layer(x).tanh().exp().sin()
        return F.rrelu(self.layers[0](x).sin(), training=True)


def test_a7_rrelu_saves_noise_that_its_kernel_fills_later():
    """EXACT: the op whose kernel fills an argument that autograd has already saved."""
    stock_is_wrong(RReLU, lambda m, call: call(m, X).square().sum())
    exact(RReLU, lambda m: squares(m, X))
    trains(RReLU)


class Choices(Body):
    """Routes by top-k and sorts: choices that one ulp could flip."""

    def between(self, h, i):
        values, indices = h.topk(8, dim=-1)
        return torch.zeros_like(h).scatter(-1, indices, values.exp()) + h.sort(dim=-1).values


def test_a8_choices_are_kept():
    """EXACT: results of top-k and sort are never made again."""
    exact(Choices, lambda m: squares(m, X))
    with dropping() as engine:
        loss = squares(made(Choices), X)
    loss.backward()
    calls = [version.call for version in engine.tape.versions.values() if version.call is not None]
    names = {call.func.name() for call in calls if call.op in engine.rebuilt_ops}
    assert names and not any("topk" in n or "sort" in n for n in names)
    trains(Choices)


def test_a9_deterministic_algorithms():
    """EXACT with deterministic algorithms, which fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        exact(NoiseInPlace, lambda m: squares(m, X))
        trains(NoiseInPlace)
    finally:
        torch.use_deterministic_algorithms(False)


def meddling(change, undo, make=Body, x=X):
    """Gradients when `change` happens between forward and backward, plainly and dropped; and what was set afterwards."""
    results = []
    for drop in (False, True):
        model = made(make)
        try:
            if drop:
                with dropping():
                    loss = squares(model, x)
            else:
                loss = squares(model, x)
            setting = change()
            loss.backward()
            assert setting is None or setting() is True, "the setting of the user was not put back"
        finally:
            undo()
        results.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


class Denormal(nn.Module):
    """Its activations are denormal numbers: rebuilt with them flushed, its gradient would be another one."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((64,), 1.5))

    def forward(self, x):
        tiny = (self.w * 1e-39).neg()  # denormal in float32
        return (tiny * 1e38).exp().sin().exp() * x


def test_a10_flush_denormal_changed_before_backward():
    """EXACT: a rebuild flushes denormals as the forward did, and the user's setting is there again afterwards."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    flushed = made(Denormal)(torch.ones(64))
    torch.set_flush_denormal(False)
    assert not same_bits(flushed, made(Denormal)(torch.ones(64)))  # the fixture is sensitive
    tiny = torch.tensor(1e-39)

    def change():
        torch.set_flush_denormal(True)
        return lambda: (tiny * 1.0).item() == 0.0

    meddling(change, lambda: torch.set_flush_denormal(False), Denormal, torch.ones(64))


def test_a10_matmul_precision_changed_before_backward():
    """EXACT: rebuilt under the precision of the forward, by the old setting and by the ones per backend."""

    def old():
        torch.set_float32_matmul_precision("medium")
        return lambda: torch.get_float32_matmul_precision() == "medium"

    meddling(old, lambda: torch.set_float32_matmul_precision("highest"))

    def new():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        return lambda: torch.backends.mkldnn.matmul.fp32_precision == "bf16"

    def undo():
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")

    meddling(new, undo)


def test_a10_precision_set_per_backend_does_not_break_a_run():
    """EXACT under settings that torch's own legacy getters refuse to report."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        exact(Body, lambda m: squares(m, X))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


class DefaultDtype(Body):
    def between(self, h, i):
        return h * torch.linspace(0, 1, 16).exp()  # its dtype is the default


def test_a10_default_dtype_changed_before_backward():
    """EXACT: an op that asks for the default dtype gets that of the forward."""

    def change():
        torch.set_default_dtype(torch.float64)
        return lambda: torch.get_default_dtype() is torch.float64

    meddling(change, lambda: torch.set_default_dtype(torch.float32), DefaultDtype)


def test_a10_autocast_left_before_backward():
    """EXACT: what was computed under autocast is rebuilt as it was, and autocast in backward changes nothing."""

    def step(model, x=X):
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, x).float()

    exact(Body, step)
    autocast = torch.autocast("cpu", torch.bfloat16)
    meddling(lambda: autocast.__enter__() and None, lambda: autocast.__exit__(None, None, None))
    trains(Body, loss=step)


class LargeSum(nn.Module):
    """A sum that is split by the number of threads."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(data(1 << 17))

    def forward(self, x):
        return (self.w * self.w.exp().sum().log().sin()).sin().mean() * x


def test_a11_number_of_threads_changed_before_backward():
    """EXACT: a sum is rebuilt with the number of threads of the forward."""

    def change():
        torch.set_num_threads(2)
        return lambda: torch.get_num_threads() == 2

    # both runs do their own backward with two threads; only the rebuild must not
    meddling(change, lambda: torch.set_num_threads(1), LargeSum, torch.ones(()))
