"""What `plan/readers.py` claims that backward needs, run: with that, or with garbage, its result has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.plan.readers import LOSSY, NEEDS, lossy, need, short
from lightning_memopt.runtime.codecs import codec
from tests.cpu.lib.harness import same_bits


class Swapping(TorchDispatchMode):
    """Gives an op another tensor instead of one argument. `count`: how often."""

    def __init__(self, op: str, argument: str, swap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.argument, self.swap, self.count = op, argument, swap, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if short(func._name) == self.op:
            position = [a.name for a in func._schema.arguments].index(self.argument)
            args = (*args[:position], self.swap(args[position]), *args[position + 1 :])
            self.count += 1
        return func(*args, **(kwargs or {}))


def garbage(t: Tensor) -> Tensor:
    return torch.full_like(t, float("nan"))


def decoded(t: Tensor) -> Tensor:
    """As `positive` gives it back."""
    c = codec("positive")
    encoded = torch.empty(c.encoded_nbytes(tuple(t.shape), t.dtype), dtype=torch.uint8, device=t.device)
    out = torch.empty_like(t)
    c.encode(t, encoded)
    c.decode(encoded, out)
    return out


def image(*size: int) -> Tensor:
    x = torch.randn(2, 3, *size, dtype=torch.float64).float()
    x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    return x


LABELS = torch.tensor([0, 2])
IMAGE, VOLUME, LINE = image(8, 8), image(6, 6, 6), image(9)
RUNS: dict[tuple[str, str], tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    ("threshold_backward", "self"): (IMAGE, F.relu),
    ("max_pool2d_with_indices_backward", "self"): (IMAGE, lambda x: F.max_pool2d(x, 3, 2)),
    ("max_pool3d_with_indices_backward", "self"): (VOLUME, lambda x: F.max_pool3d(x, 2)),
    ("avg_pool2d_backward", "self"): (IMAGE, lambda x: F.avg_pool2d(x, 3, 2)),
    ("avg_pool3d_backward", "self"): (VOLUME, lambda x: F.avg_pool3d(x, 2)),
    ("_adaptive_avg_pool2d_backward", "self"): (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 3)),
    ("_adaptive_avg_pool3d_backward", "self"): (VOLUME, lambda x: F.adaptive_avg_pool3d(x, 4)),
    ("adaptive_max_pool2d_backward", "self"): (IMAGE, lambda x: F.adaptive_max_pool2d(x, 3)),
    ("adaptive_max_pool3d_backward", "self"): (VOLUME, lambda x: F.adaptive_max_pool3d(x, 4)),
    ("fractional_max_pool2d_backward", "self"): (IMAGE, lambda x: F.fractional_max_pool2d(x, 2, 4)),
    ("fractional_max_pool3d_backward", "self"): (VOLUME, lambda x: F.fractional_max_pool3d(x, 2, 3)),
    ("reflection_pad1d_backward", "self"): (LINE, lambda x: F.pad(x, (2, 1), "reflect")),
    ("reflection_pad2d_backward", "self"): (IMAGE, lambda x: F.pad(x, (2, 1, 1, 0), "reflect")),
    ("reflection_pad3d_backward", "self"): (VOLUME, lambda x: F.pad(x, (2, 1, 1, 0, 1, 1), "reflect")),
    ("replication_pad1d_backward", "self"): (LINE, lambda x: F.pad(x, (2, 1), "replicate")),
    ("replication_pad2d_backward", "self"): (IMAGE, lambda x: F.pad(x, (2, 1, 1, 0), "replicate")),
    ("replication_pad3d_backward", "self"): (VOLUME, lambda x: F.pad(x, (2, 1, 1, 0, 1, 1), "replicate")),
    ("nll_loss_backward", "self"): (torch.randn(2, 5), lambda x: F.nll_loss(x, LABELS.to(x.device))),
    ("nll_loss2d_backward", "self"): (
        torch.randn(2, 5, 4, 4),
        lambda x: F.nll_loss(x, LABELS.to(x.device).view(2, 1, 1).expand(2, 4, 4)),
    ),
    ("new_zeros", "self"): (LINE, lambda x: x.gather(2, torch.tensor([[[1, 4, 4]]], device=x.device).expand(2, 3, 3))),
    ("zeros_like", "self"): (LINE, lambda x: x.take(torch.tensor([3, 5, 5], device=x.device))),
}
CHANGES = {
    ("hardtanh_backward", "self"): (IMAGE, F.relu6),
    ("leaky_relu_backward", "self"): (IMAGE, F.leaky_relu),
    ("threshold_backward", "self"): (IMAGE, lambda x: F.threshold(x, 0.5, 0.0)),
    ("nll_loss_backward", "total_weight"): (torch.randn(2, 5), lambda x: F.nll_loss(x, LABELS.to(x.device))),
}
"""Claims that would be wrong: the same check finds them."""


def gradient(x: Tensor, f: Callable[[Tensor], Tensor], mode: Swapping | None = None) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        y = f(x)
        grad = torch.randn(y.shape).to(y.device)
    if mode is None:
        y.backward(grad)
    else:
        with mode:
            y.backward(grad)
        assert mode.count
    assert x.grad is not None
    return x.grad


def test_every_claim_is_run() -> None:
    assert RUNS.keys() == NEEDS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("key", RUNS, ids="-".join)
def test_what_is_not_needed_changes_nothing(key: tuple[str, str], dtype: torch.dtype) -> None:
    x, f = RUNS[key]
    x = x.to(dtype)
    try:
        plain = gradient(x, f)
    except (NotImplementedError, RuntimeError) as error:
        assert "not implemented for" in str(error)
        pytest.skip(f"torch: {error}")
    swap = decoded if need(*key) == "sign" else garbage
    assert same_bits(plain, gradient(x, f, Swapping(*key, swap)))


@pytest.mark.parametrize("key", CHANGES, ids="-".join)
def test_the_check_finds_a_claim_that_is_wrong(key: tuple[str, str]) -> None:
    x, f = CHANGES[key]
    swap = decoded if key in NEEDS or "relu" in key[0] else garbage
    assert not same_bits(gradient(x, f), gradient(x, f, Swapping(*key, swap)))


def test_a_threshold_that_is_not_0_needs_the_values() -> None:
    assert need("aten::threshold_backward", "self") == "sign"
    assert need("aten.threshold_backward.default", "self", threshold=0.5) == "value"
    assert need("aten::threshold_backward", "grad_output") == need("aten::mul.Tensor", "self") == "value"


def test_who_may_be_given_lossy_values() -> None:
    assert lossy("aten::convolution_backward", "input") and not lossy("aten::convolution_backward", "weight")
    assert lossy("aten.mm.default", "mat2") and not lossy("aten::native_layer_norm_backward", "input")
    ops = {op for op, _ in (*LOSSY, *NEEDS)}
    unknown = {op for op in ops if not hasattr(torch.ops.aten, op)}
    assert not unknown, f"torch has no such ops: {unknown}"
