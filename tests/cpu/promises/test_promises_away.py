"""Promises P4 and P13 to P18 where tensors go away: what is rejected, what comes back, what stays within its bounds.

| promise | where |
|---|---|
| P4 | tests/cpu/parking/test_away_changes.py: every way to change a tensor in place; here, what a user holds |
| P13 | tests/cpu/hazards/test_hazards_i.py `test_p13_...`, tests/cpu/parking/test_tiers_host.py, tests/gpu/test_tiers_cuda.py |
| P14 | `test_i10_i11_...`, `test_i8_...` of tests/cpu/hazards/test_hazards_i.py; tests/cpu/parking/test_tiers_host.py |
| P15 | here |
| P16 | tests/cpu/parking/test_codecs.py `test_bools_come_back`; here for what moves: all bit patterns of 16 bits |
| P17, P18 | tests/cpu/parking/test_codecs.py, tests/cpu/hazards/test_hazards_j.py |
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memopt.plan import simulate
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.parked import Depot, ParkedTensor
from lightning_memopt.runtime.tiers import DiskTier, HostTier
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.stepped import Stepped, held, same

W = 32


class Net(nn.Module):
    """Two layers around `f(h)`."""

    def __init__(self, f: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.f = f
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.x = torch.randn(16, W, generator=torch.Generator().manual_seed(2))

    def forward(self) -> Tensor:
        return self.f(self, torch.tanh(self.a(self.x))).abs().mean()


def images(h: Tensor) -> Tensor:
    return h.reshape(4, 4, 8, 4)


CASES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "transposed": lambda m, h: (h.t() @ h).sin().t().exp(),
    "slices of one storage": lambda m, h: sum(p.sin() * p.exp() for p in m.b(h).chunk(4, 1)),  # type: ignore[return-value]
    "offset and step": lambda m, h: m.b(h)[3::2, 1::3].sin().exp(),
    "expanded": lambda m, h: (m.b(h)[:1].expand(64, W).sin() * h[:1]).exp(),
    "zero size": lambda m, h: torch.cat([m.b(h[:0]).sin().exp(), m.b(h).sin()]).exp(),
    "no dimension": lambda m, h: m.b(h).sum().sin().exp(),
    "complex": lambda m, h: torch.view_as_real(torch.complex(m.b(h), h).sin().conj() * torch.complex(h, h)).sin(),
    "fft": lambda m, h: torch.fft.irfft(torch.fft.rfft(m.b(h)).sin() * torch.fft.rfft(h)).exp(),
    "negative bit": lambda m, h: torch.complex(m.b(h), h).conj().imag.sin().exp(),
    "bfloat16": lambda m, h: m.b(h).bfloat16().sin().exp().float().sin(),
    "float64": lambda m, h: m.b(h).double().sin().exp().float(),
    "channels last": lambda m, h: m.norm(m.conv(images(m.b(h)).to(memory_format=torch.channels_last))).relu().sin(),
    "batch norm": lambda m, h: m.norm(m.conv(images(m.b(h)))).relu_().sin(),
    "dropout": lambda m, h: F.dropout(m.b(h).sin(), 0.4).exp(),
    "in place on a result": lambda m, h: m.b(h).sin().mul_(2).add_(1).exp(),
    "in place on a slice": lambda m, h: _sliced(m.b(h).sin()).exp(),
    "indices": lambda m, h: m.b(h).gather(1, h.argsort(1)).sin()[h.argmax(1) % 3].exp(),
    "max pool": lambda m, h: F.max_pool2d(m.conv(images(m.b(h))), 2, 1).sin(),
    "attention": lambda m, h: F.scaled_dot_product_attention(*m.b(h).reshape(4, 4, W).expand(3, 1, 4, 4, W)),
    "lstm cell": lambda m, h: _lstm(m, h),
    "checkpoint": lambda m, h: checkpoint(lambda t: m.b(t.sin()).exp().sin(), h, use_reentrant=False),  # type: ignore[return-value]
    "autocast": lambda m, h: _cast(m, h),
    "user hooks": lambda m, h: _hooked(m, h),
    "grad inside": lambda m, h: _penalty(m, h),
    "custom function": lambda m, h: Twice.apply(m.b(h)).sin(),
    "shared by name": lambda m, h: m.b(m.b(h).sin()).sin() @ m.b.weight.t().sin(),
    "no grad inside": lambda m, h: m.b(h).sin() * torch.no_grad()(lambda: m.b(h).exp())(),
    "scan": lambda m, h: m.b(h).cumsum(0).sin().cumprod(1).exp(),
}


def _sliced(y: Tensor) -> Tensor:
    z = y * 2
    z[:, ::2] = y[:, 1::2].sin()
    return z


def _lstm(m: Net, h: Tensor) -> Tensor:
    i, f, g = m.b(h)[:, :30].unsafe_chunk(3, 1)  # pieces of one storage, as torch's cells have them
    return i.sigmoid_() * g.tanh_() + f.sigmoid_()


def _cast(m: Net, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.b(m.b(h).sin()).exp()


def _hooked(m: Net, h: Tensor) -> Tensor:
    y = m.b(h).sin()
    with torch.autograd.graph.save_on_cpu():
        y = m.b(y).exp().sin()
    return m.b(y).exp()


def _penalty(m: Net, h: Tensor) -> Tensor:
    y = m.b(h).sin()
    (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y + g.square()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, y = ctx.saved_tensors
        again = ctx.saved_tensors
        return g * (x.cos() * again[0] + y)


@pytest.fixture(params=CASES)
def one(request: pytest.FixtureRequest) -> Iterator[Stepped]:
    model = Net(CASES[request.param])
    found = Stepped(model, model)
    yield found
    found.depot.close()


def programs(one: Stepped) -> list[Program]:
    return [one.away(least=0), *(one.away(held(one.graph, every), least=0) for every in (2, 3))]


def test_p15_what_comes_back_is_as_it_was(one: Stepped) -> None:
    """EXACT: any size, stride, offset and dtype; alone and with recomputation; the peak is what is predicted."""
    expected = one.step()
    allowed = None
    for program in programs(one):
        for _ in range(3):
            assert same(expected, one.step(program))
            assert not one.deviation.out_of_order
        assert one.used_nbytes() == 0
        found = over(one, program)
        if found > 1024:
            allowed = allowed or over(one, Program(one.graph, keep_all(one.graph)))
            assert found <= allowed


def over(one: Stepped, program: Program) -> float:
    """By how many bytes the measured peak is above the predicted one and 1 % (torch's checkpoint is not seen in full)."""
    return one.peak_nbytes(program) - 1.01 * simulate(one.graph, program.lives).predicted.peak_nbytes


def test_p1_double_backward_and_threads(one: Stepped) -> None:
    """E7, E8, E10: gradients of gradients, twice, and from another thread."""
    some = [one.model.a.weight, one.model.b.weight]

    def found(p: Program | None) -> list[Tensor]:
        loss = one.forward(p)
        grads = torch.autograd.grad(loss, some, create_graph=True, allow_unused=True)
        both = sum(g.square().sum() for g in grads if g is not None)
        assert isinstance(both, Tensor)
        failed: list[RuntimeError] = []

        def run() -> None:
            try:
                both.backward(retain_graph=True)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed.pop()
        loss.backward()
        return one.outcome(loss)

    try:
        expected = found(None)
    except RuntimeError as error:
        pytest.skip(f"not in plain either: {str(error)[:60]}")
    for program in programs(one)[:2]:
        assert same(expected, found(program))
        gc.collect()
        assert one.used_nbytes() == 0


def test_p4_what_the_user_holds_is_read_where_autograd_would() -> None:
    """C11: hidden states that are handed out: read after the forward, unharmed, and the same gradients."""
    kept: list[Tensor] = []
    flag = [False]

    def f(m: Net, h: Tensor) -> Tensor:
        y = m.b(h).sin()
        if flag[0]:
            kept.append(y)
        return y.exp().sin()

    model = Net(f)  # type: ignore[arg-type]
    one = Stepped(model, model)
    flag[0] = True
    for p in (None, *programs(one)):
        loss = one.forward(p)
        values = kept.pop()
        before = values.detach().clone()
        loss.backward()
        found = [*one.outcome(loss), before]
        assert torch.equal(values.detach(), before)
        if p is None:
            expected = found
        assert same(expected, found)
        del loss, values
        assert one.used_nbytes() == 0
    one.depot.close()


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64], ids=str)
def test_p16_every_pattern_of_bits_comes_back(tier: str, dtype: torch.dtype) -> None:
    """NaN payloads and signed zeros: all patterns of 16 bits, and random ones of wider types."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if dtype.itemsize > 2:
        bits = torch.randint(-(1 << 15), 1 << 15, (1 << 18,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    t = bits.view(dtype)
    depot = Depot({"disk": DiskTier(1 << 22), "host": HostTier(1 << 22, "cpu")})
    away = ParkedTensor(depot, t, tier, "patterns")
    away.wait_copied()
    assert same_bits(away.value(), t) and away.value().dtype is dtype
    del away
    depot.close()


def test_p8_a_plan_without_trips_moves_nothing() -> None:
    """What is kept is not copied, and evaluation packs nothing (E17, P24)."""
    model = Net(CASES["dropout"])
    one = Stepped(model, model)
    assert same(one.step(), one.step(Program(one.graph, keep_all(one.graph))))
    with torch.no_grad():
        one.forward(one.away(least=0))
    assert one.depot.moved_nbytes == 0 and one.used_nbytes() == 0
    one.depot.close()
