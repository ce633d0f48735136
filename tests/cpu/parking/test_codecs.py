"""Every codec: sizes known before, guards untouched, dtype, strides and what is not finite kept, the bound not broken."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import Tensor

from benchmarks.gpu.codecs import error_bound
from lightning_memopt.errors import ConfigError, UnsupportedError
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime.codecs import NAMES, Codec, block, codec
from lightning_memopt.trace import metered_cpu
from tests.cpu.lib.harness import same_bits

SOME = [name for name in NAMES if not name.startswith("gated") or name in ("gated4", "gated8")]
LOSSY = [codec(name) for name in SOME if not codec(name).exact]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
GUARD = 7
ZFP = {
    **{("noise", 4): 0.258, ("noise", 8): 0.0161, ("noise", 16): 6.3e-05},
    **{("relu", 4): 0.158, ("relu", 8): 0.00986, ("relu", 16): 3.84e-05},
    **{("walk", 4): 0.516, ("walk", 8): 0.035, ("walk", 16): 0.000136},
    **{("walks", 4): 0.536, ("walks", 8): 0.0372, ("walks", 16): 0.000145},
    **{("odd", 4): 0.255, ("odd", 8): 0.0168, ("odd", 16): 6.32e-05},
    **{("odd walks", 4): 0.427, ("odd walks", 8): 0.0271, ("odd walks", 16): 0.000108},
}
"""RMSE of zfpy 1.0.1 at a fixed rate on `maps()`: the best of one, two and three dimensions (`python -m benchmarks codecs`)."""
given_quickly = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def round_trip(c: Codec, t: Tensor) -> Tensor:
    """Encode between guards, at an odd address, twice over other garbage; decode over garbage."""
    nbytes = c.encoded_nbytes(tuple(t.shape), t.dtype)
    seen = []
    for fill in (0x00, 0xFF):
        around = torch.full((nbytes + 2 * GUARD,), fill, dtype=torch.uint8)
        c.encode(t, around[GUARD:-GUARD])
        assert (around[:GUARD] == fill).all() and (around[-GUARD:] == fill).all(), "written beside what it was given"
        seen.append(around[GUARD:-GUARD])
    assert torch.equal(*seen), "not all of it written, or not the same twice"
    out = torch.empty_like(t)
    out.fill_(True if t.dtype is torch.bool else 12345.0)
    c.decode(seen[0], out)
    assert out.stride() == t.stride()
    return out


def assert_within(c: Codec, t: Tensor, out: Tensor) -> None:
    finite = t.isfinite()
    assert same_bits(t.isnan(), out.isnan()) and torch.equal(t[t.isinf()], out[t.isinf()])
    assert out[finite].isfinite().all(), "what was finite is not any more"
    error = (out[finite].double() - t[finite].double()).abs()
    bound = error_bound(c, t)
    assert math.isfinite(bound)
    assert not error.numel() or float(error.max()) <= bound, (float(error.max()), bound)


def permuted(values: Tensor, order: list[int]) -> Tensor:
    """The same values, in a memory whose dimensions are in this order."""
    out = torch.empty([values.shape[d] for d in order], dtype=values.dtype)
    out = out.permute([order.index(d) for d in range(values.dim())])
    assert out.shape == values.shape
    return out.copy_(values)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Sizes with and without multiples of 4, any order of strides, and values that codecs dislike."""
    size = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 12, 17]), max_size=4))
    dtype = draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "mean", "wide", "sparse", "constant", "extreme", "smooth", "alternating"]))
    if kind == "mean":
        values += 1000
    elif kind == "wide":
        values *= torch.exp2(torch.randint(-40, 40, size, generator=generator))
    elif kind == "sparse":
        values *= torch.rand(size, generator=generator) < 0.1
    elif kind == "constant":
        values = torch.full_like(values, 0.3)
    elif kind == "extreme":
        values = values.sign() * torch.finfo(dtype).max
    elif kind == "smooth":
        values = values.flatten().cumsum(0).view(size)
    elif kind == "alternating":
        values = (
            (-1.0) ** torch.arange(values.numel(), dtype=torch.float64).view(size) * values[..., :1].abs() if size else values
        )
    exponent = draw(st.sampled_from([0, 0, 0, -20, -140, 10, 100]))
    most = torch.finfo(dtype).max
    values = (values * 2.0**exponent).clamp(-most, most).to(dtype)
    for value in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -0.0, most, 1e-40]), max_size=3)):
        if values.numel():
            values.view(-1)[int(torch.randint(values.numel(), (1,), generator=generator))] = value
    return permuted(values, draw(st.permutations(range(len(size)))))


@pytest.mark.parametrize("c", LOSSY, ids=lambda c: c.name)
@given_quickly
@given(t=tensors())
@example(t=torch.empty(0, 4))
@example(t=torch.tensor(3.0))
@example(t=torch.tensor([math.nan]))
@example(t=torch.full((4, 4), torch.finfo(torch.float32).max))
@example(t=torch.full((4, 4), 1e-45))
@example(t=torch.tensor([3.4e38, -3.4e38] * 40))
def test_lossy_codecs_keep_their_bound_and_what_is_not_finite(c: Codec, t: Tensor) -> None:
    assert_within(c, t, round_trip(c, t))


@pytest.mark.parametrize("c", LOSSY, ids=lambda c: c.name)
def test_the_bound_says_something(c: Codec) -> None:
    """Of normal values: no more than 40 times the error there is."""
    t = torch.randn(64, 64)
    error = (round_trip(c, t) - t).abs().max()
    assert error_bound(c, t) <= 40 * float(error)


@pytest.mark.parametrize("c", LOSSY, ids=lambda c: c.name)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5])
def test_a_constant_comes_back(c: Codec, value: float) -> None:
    """J3."""
    t = torch.full((3, 20), value)
    gated = c.name.startswith("gated")
    assert torch.allclose(round_trip(c, t), t.relu() if gated else t, rtol=2.0**-8 if gated else 2.0**-10, atol=0)


def maps() -> dict[str, Tensor]:
    """Noise, half of it cut off as by ReLU, and random walks along one side and along both, 7 wide and 32 wide."""
    noise = torch.randn(64, 32, 32, generator=torch.Generator().manual_seed(0))
    walk = noise.cumsum(1)
    odd = noise[:, :7, :7].contiguous()
    return {
        "noise": noise,
        "relu": noise.relu(),
        "walk": walk,
        "walks": walk.cumsum(2),
        "odd": odd,
        "odd walks": odd.cumsum(1).cumsum(2),
    }


@pytest.mark.parametrize("kind, rate", ZFP)
def test_the_error_is_no_more_than_that_of_zfp(kind: str, rate: int) -> None:
    t = maps()[kind]
    error = (round_trip(codec(f"block{rate}"), t) - t).double().square().mean().sqrt()
    assert error <= 1.25 * ZFP[kind, rate]


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_last_group_is_filled_up_with_values_of_its_own(name: str) -> None:
    t = 1000 + torch.rand(70)
    assert error_bound(codec(name), t) < 0.04 and (round_trip(codec(name), t) - t).abs().max() < 0.04


@pytest.mark.parametrize("c", LOSSY, ids=lambda c: c.name)
def test_what_is_not_finite_stays_in_its_block(c: Codec) -> None:
    """J2."""
    t = torch.randn(64, 64)
    plain = round_trip(c, t)
    t[0, 0], t[40, 20] = math.nan, -math.inf
    changed = round_trip(c, t) != plain
    assert 2 <= int(changed.sum()) <= 2 * 64


@given_quickly
@given(t=tensors(), double=st.booleans())
def test_positive_gives_the_gradient_of_relu(t: Tensor, double: bool) -> None:
    """J1: NaN, both zeros, infinities, denormals, in every dtype."""
    t = t.double() if double else t
    grad = torch.randn(t.shape).to(t.dtype)
    decoded = round_trip(codec("positive"), t)
    backward = torch.ops.aten.threshold_backward
    assert same_bits(backward(grad, t, 0), backward(grad, decoded, 0))


@given_quickly
@given(t=tensors(), name=st.sampled_from(["gated4", "gated6", "gated16"]))
def test_gated_opens_and_closes_no_gate(t: Tensor, name: str) -> None:
    """The gradient of ReLU has the same bits; what is not above 0 comes back as 0."""
    grad = torch.randn(t.shape).to(t.dtype)
    decoded = round_trip(codec(name), t)
    backward = torch.ops.aten.threshold_backward
    assert same_bits(backward(grad, t, 0), backward(grad, decoded, 0))
    assert not decoded[(t <= 0) & t.isfinite()].any()


def test_gated_spends_no_bits_on_the_edges_that_relu_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not above 0 is coded as the mean of its block: less error than as 0, in the same bytes."""
    t = maps()["relu"]
    with_mean = (round_trip(codec("gated4"), t) - t).square().mean()
    monkeypatch.setattr(block, "_filled", lambda c, open: c.mul_(open))
    assert with_mean < 0.8 * (round_trip(codec("gated4"), t) - t).square().mean()


@given_quickly
@given(t=tensors())
def test_bools_come_back(t: Tensor) -> None:
    mask = t > 0
    assert torch.equal(round_trip(codec("bools"), mask), mask)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("numel", [(1 << 20) + 5, 3000])
def test_the_workspace_is_no_more_than_it_says(name: str, numel: int) -> None:
    c = codec(name)
    for dtype in [torch.bool] if name == "bools" else [torch.float32, torch.bfloat16]:
        for size in ((numel,), (numel // 512 * 4, 128)):
            t = torch.randn(size).to(dtype)
            t.view(-1)[5] = math.nan
            encoded = torch.empty(c.encoded_nbytes(size, dtype), dtype=torch.uint8)
            out = torch.empty_like(t)
            said = c.workspace_nbytes(size, dtype)
            assert said <= 8 << 20
            with metered_cpu() as encoding:
                c.encode(t, encoded)
            with metered_cpu() as decoding:
                c.decode(encoded, out)
            assert encoding.available and encoding.peak_nbytes <= said
            assert decoding.available and decoding.peak_nbytes <= said
            if numel > 1 << 20:
                assert max(encoding.peak_nbytes, decoding.peak_nbytes) >= said / 3, "it says far too much"


@pytest.mark.parametrize("name", SOME)
def test_below_autograd_and_outside_of_modes(name: str) -> None:
    c = codec(name)
    t = torch.randn(5, 8, 8)
    t = t > 0 if name == "bools" else t.requires_grad_()
    expected = round_trip(c, t.detach())
    with below_autograd():
        out = round_trip(c, t)
    assert torch.equal(out, expected) and not out.requires_grad


@pytest.mark.parametrize("name", SOME)
def test_accepts_only_what_it_makes_smaller(name: str) -> None:
    """J6, J7."""
    c = codec(name)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.complex64, torch.float64, *FLOATS):
        for size in ((), (0,), (1,), (2,), (40,), (64, 64)):
            if c.accepts(size, dtype):
                assert c.encoded_nbytes(size, dtype) < math.prod(size) * dtype.itemsize
                assert dtype in FLOATS or (c.exact and dtype is (torch.bool if name == "bools" else torch.float64))
    assert c.accepts((64, 64), torch.bool if name == "bools" else torch.float32)
    assert not c.accepts((2,), torch.float32) or name == "positive"


def test_what_is_refused() -> None:
    c, t = codec("block8"), torch.randn(8, 8)
    with pytest.raises(ConfigError, match="block5.*block4"):
        codec("block5")
    with pytest.raises(UnsupportedError, match="64 contiguous bytes"):
        c.encode(t, torch.empty(63, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="dense"):
        c.encode(torch.randn(8, 16)[:, ::2], torch.empty(64, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="dense"):
        c.decode(torch.empty(64, dtype=torch.uint8), torch.randn(8).expand(8, 8))
