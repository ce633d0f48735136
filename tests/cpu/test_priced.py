"""A step priced for a card at any batch size (benchmarks/priced.py): against the same step recorded at that size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks import recurrent
from benchmarks.priced import Price, PricedFit, priced
from benchmarks.throughput import Model, ours
from benchmarks.throughput_models import Setup, _adam, _words, observe
from lightning_memopt.batching.plans import largest
from lightning_memopt.graph import Op
from lightning_memopt.plan import LoweringError, simulate
from lightning_memopt.session.buckets import unmodified_peak

SETUP = Setup(
    title="tiny",
    build=lambda: recurrent.Translator(40, 16, 0.2, fused=False),
    data=_words(40, 2),
    optimizer=_adam,
    batch=None,
)
PRICE = Price(flops_per_second=1e8, bytes_per_second=1e8, launch_seconds=5e-6)


@cache
def fitted() -> PricedFit:
    return priced((observe(SETUP, 2), observe(SETUP, 4)), (2, 4), PRICE)


def test_bytes_and_seconds_of_any_size_are_those_recorded_there() -> None:
    there = observe(SETUP, 7)
    graph = fitted().at(7)
    assert [fitted().bytes_moved(op.id, 7) for op in graph.ops] == list(there.moved)
    assert [op.flops for op in graph.ops] == [op.flops for op in there.graph.ops]
    grows = [fitted().moved[0][op.id] != fitted().moved[1][op.id] for op in graph.ops]
    direct = [PRICE.seconds(op, op.flops, nbytes, g) for op, nbytes, g in zip(there.graph.ops, there.moved, grows, strict=True)]
    assert [op.seconds for op in graph.ops] == pytest.approx(direct, abs=1e-15)
    assert unmodified_peak(graph) == unmodified_peak(there.graph)


class _Sliced(nn.Module):
    """Reads one row of its input, of many."""

    def forward(self, x: torch.Tensor) -> recurrent.Output:
        return recurrent.Output((x[0] * self.w).sum())

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))


def test_a_view_moves_its_own_bytes() -> None:
    setup = replace(SETUP, build=_Sliced, data=lambda size: {"x": torch.ones(100, size, 8)})
    step = observe(setup, 2)
    product = next(op for op in step.graph.ops if op.name == "aten::mul.Tensor")
    assert step.moved[product.id] == 4 * (16 + 8 + 16)  # the row, the weights, the result: not 100 rows


def _op(**options: object) -> Op:
    fields = {"id": 0, "name": "aten::add.Tensor", "phase": "backward", "inputs": (), "outputs": (1,)} | options
    return Op(**fields)  # type: ignore[arg-type]


def test_what_an_op_takes() -> None:
    hidden, free = replace(PRICE, hidden=True), replace(PRICE, adds_free=True)
    assert PRICE.seconds(_op(), 200, 100, True) == pytest.approx(7e-6)  # compute-bound
    assert PRICE.seconds(_op(), 100, 200, True) == pytest.approx(7e-6)  # bound by the memory
    assert hidden.seconds(_op(), 100, 200, True) == pytest.approx(5e-6)
    assert hidden.seconds(_op(), 100, 2000, True) == pytest.approx(20e-6)
    assert PRICE.seconds(_op(outputs=()), 100, 200, True) == 0.0  # a view
    assert PRICE.seconds(_op(name="aten::empty_like"), 0, 200, True) == 0.0
    assert free.seconds(_op(), 0, 200, False) == 0.0
    assert free.seconds(_op(), 0, 200, True) > 0.0  # of activations
    assert free.seconds(_op(phase="forward"), 0, 200, False) > 0.0


def test_how_far_a_plan_goes() -> None:
    """The line through two sizes never says more than the simulator, and little less."""
    fit = fitted()
    model = Model(fit, unmodified_peak(fit.at(12)))
    assert model.unmodified() == 12
    found = []
    for _, lives in ours(fit.at(13))[::6]:
        plan = model.pooled("", lives, 12, 200)
        if plan is None:
            continue

        def fits(size: int, lives: tuple = lives) -> bool:
            try:
                return simulate(fit.at(size), lives).predicted.peak_bytes <= model.budget_nbytes - 4096
            except LoweringError:
                return False

        exact = largest(fits, 1, 200)
        assert not plan.again.any() or exact - 1 <= plan.most <= exact
        found.append(plan.most)
    assert max(found) > 14


def test_more_seconds_again_and_no_sample_for_free() -> None:
    fit = fitted()
    model = Model(fit, unmodified_peak(fit.at(12)))
    pool = model.pool(ours, 12)
    plan, size = model.fastest(pool, range(4, 30), PRICE)
    row = model.row("ours", plan, size, PRICE)
    assert row.peak_bytes <= model.budget_nbytes
    graph = fit.at(size)
    again = simulate(graph, plan.lives).predicted.extra_seconds
    assert row.samples_per_second == pytest.approx(size / (graph.step_seconds + again))
    assert row.extra_percent == pytest.approx(100 * again / graph.step_seconds)
    assert model.rate(plan, size, PRICE, recorder_seconds=1.0)[0] < row.samples_per_second or not plan.again.any()
