"""Mixed precision: autocast, its cache of weight copies, parameters of two and eight bytes."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.graph import resident_nbytes
from tests.cpu.lib.models import (
    BATCHES,
    Body,
    X,
    attached,
    data,
    exact,
    grads,
    made,
    planned,
    same,
    sgd,
    squares,
    train,
    trains,
)

BF16, FP16 = torch.bfloat16, torch.float16


class Mixed(Body):
    """Enters and leaves autocast by itself: a layer in half precision, a part that is excepted from it."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.dtype = dtype
        self.seen: list[torch.dtype] = []

    def between(self, h: torch.Tensor, i: int) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            h = nn.functional.gelu(self.layers[i](h))
            self.seen.append(h.dtype)
            with torch.autocast("cpu", enabled=False):
                h = torch.tanh(h.float() @ self.layers[0].weight)
        self.seen.append(h.dtype)
        return h.exp()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around too"])
def test_g1_autocast_is_as_it_was(dtype: torch.dtype, around: bool) -> None:
    """EXACT: rebuilds run in the types that forward ran in, wherever autocast is entered, and user code sees them once."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=around):
            return squares(model, x)

    exact(partial(Mixed, dtype), lambda m: loss(m, X))
    trains(partial(Mixed, dtype), BATCHES, loss)
    model = made(partial(Mixed, dtype))
    train(model, BATCHES, loss)
    watched = made(partial(Mixed, dtype))
    with attached(watched, o := sgd(watched)):
        train(watched, BATCHES, loss, optimizer=o)
    assert watched.seen == model.seen and {dtype, torch.float32} == set(model.seen)


@pytest.mark.parametrize("first", [torch.no_grad, torch.enable_grad])
def test_g2_weight_cast_before_without_gradients(first: Any) -> None:
    """EXACT: the copy of a weight in autocast's cache was made by another forward in the same block."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            with first():
                model(x[:2])
            return squares(model, x).float()

    exact(Body, lambda m: loss(m, X))
    trains(Body, BATCHES, loss)


def test_g2_forwards_that_share_the_cache() -> None:
    """EXACT: forwards of one step, or all steps of the loop, in one autocast block: only the first one casts the weights."""

    def accumulate(model: nn.Module) -> list[torch.Tensor | None]:
        with torch.autocast("cpu", BF16):
            losses = [squares(model, x) for x in BATCHES[:3]]
            sum(losses).backward()
        return grads(model)

    planned(accumulate)

    def loop(attach: bool) -> list[torch.Tensor | None]:
        model = made(Body)
        optimizer = sgd(model)
        with attached(model, optimizer) if attach else contextlib.nullcontext(), torch.autocast("cpu", BF16):
            train(model, BATCHES, optimizer=optimizer)
        return [p.detach() for p in model.parameters()]

    assert same(loop(False), loop(True))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64])
def test_g3_parameters_of_other_types(dtype: torch.dtype) -> None:
    """EXACT: bfloat16, float16 and float64 parameters, also where float16 overflows to Inf and NaN."""
    data = [b.to(dtype) for b in BATCHES]
    factory = lambda: Body().to(dtype)  # noqa: E731
    exact(factory, lambda m: squares(m, X.to(dtype)))
    trains(factory, data)
    if dtype is FP16:
        overflowing = lambda m, x: (m(x * 300) * 300).square().sum()  # noqa: E731
        assert not torch.isfinite(overflowing(made(factory), data[0]))
        exact(factory, lambda m: overflowing(m, data[0][:8]))


def test_g4_copies_of_weights_are_cast_again() -> None:
    """Autocast's copies of the weights are not held over the step: the plan casts them again where backward needs them."""
    wide = partial(Body, width=128, depth=4)
    batches = [data(64, 128, seed=s) for s in range(4)]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            h = model(x)
        return h.expand(32, 64, 128).exp().sum()  # the peak is here, when no copy is needed, whatever a product's workspace is

    run = trains(wide, batches, loss)
    plan, graph = run.plan, run.status().frontier.graph
    nbytes = 128 * 128 * 2
    weights = {t.id for t in graph.tensors if t.kind == "parameter" and t.nbytes == 2 * nbytes}
    casts = {o for op in graph.forward for o in op.outputs if "_to_copy" in op.name and weights.intersection(op.inputs)}
    saved = {s.tensor for s in graph.saves} & casts
    assert len(casts) == 4 and saved, "autograd saves no copies: the test tests nothing"
    held = {life.tensor for life in plan.lives if life.how == "original"} & casts
    again = {life.tensor for life in plan.lives if life.how == "rebuild"} & casts
    assert again == saved and not held, f"{len(held)} copies are held"
    assert plan.predicted_peak_nbytes - resident_nbytes(graph) < plan.unmodified_peak_nbytes - resident_nbytes(graph)
