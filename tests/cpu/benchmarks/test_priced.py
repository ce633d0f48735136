"""A step priced for a card at any batch size (benchmarks/lib/priced.py): against the same step recorded at that size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.batch import throughput_away
from benchmarks.batch.throughput import Model, ours, with_host
from benchmarks.batch.throughput_away import Assumed, HostPlans
from benchmarks.lib.priced import Price, PricedFit, priced
from benchmarks.models import recurrent
from benchmarks.models.full_size import Setup, _adam, _words, observe
from lightning_memopt.batching.plans import largest
from lightning_memopt.graph import Op
from lightning_memopt.plan import LoweringError, Plan, lower, simulate, validate
from lightning_memopt.plan.rates import Coding, Link, MachineRates
from lightning_memopt.session.solve.foresight import unmodified_peak

pytestmark = pytest.mark.long

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

        def peak(size: int, lives: tuple = lives) -> int:
            try:
                return simulate(fit.at(size), lives).predicted.peak_nbytes
            except LoweringError:
                return 1 << 60

        exact = largest(peak, model.budget_nbytes - 4096, 1, 200)
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


BARE, MORE = 100, (120, 160)
"""With these batches, tensors of the tiny model are large enough to go away."""


@cache
def alone() -> tuple[Model, tuple]:
    """Within what the unmodified step takes at `BARE`: plans that only recompute."""
    fit = fitted()
    model = Model(fit, unmodified_peak(fit.at(BARE)))
    return model, tuple(model.pool(ours, BARE))


def host(bytes_per_second: float) -> HostPlans:
    """The same with a host, codecs as fast as its link."""
    model, pool = alone()
    rate = Coding(encode_bytes_per_second=bytes_per_second, decode_bytes_per_second=bytes_per_second)
    link = Link(out_bytes_per_second=bytes_per_second, in_bytes_per_second=bytes_per_second)
    rates = MachineRates(name="test", links={"host": link}, codecs={"bools": rate, "positive": rate})
    return HostPlans(model.fit, model.budget_nbytes, rates, [(p.solver, p.lives) for p in pool])


def rate_alone(size: int) -> float:
    """The most samples a second of the plans that only recompute."""
    model, pool = alone()
    return max(model.rate(p, size, PRICE)[0] for p in pool if p.most >= size)


def checked(plans: HostPlans, size: int) -> Plan:
    """A plan that the validator, which counts on its own, finds right and within the budget."""
    graph, plan = fitted().at(size), plans.plan(size)
    report = validate(graph, plan.lives, lower(graph, plan.lives))
    assert report.ok and report.peak_nbytes <= plans.budget_nbytes
    return plan


@pytest.mark.parametrize("size", MORE)
def test_a_host_that_takes_no_time_never_slows_a_step_down(size: int) -> None:
    plans = host(1e15)
    assert any(life.how == "fetch" for life in checked(plans, size).lives)
    assert plans.rate(size, Assumed(price=PRICE), fitted().at(size)) > rate_alone(size)


@pytest.mark.parametrize("size", MORE)
def test_a_host_that_takes_forever_is_left_alone(size: int) -> None:
    plans = host(1e-9)
    assert all(life.how != "fetch" for life in checked(plans, size).lives)
    assert plans.rate(size, Assumed(price=PRICE), fitted().at(size)) == pytest.approx(rate_alone(size))


def test_no_copy_is_for_free() -> None:
    """No step is shorter than its ops, and what its copies take in either direction, as far as they can overlap with them."""
    plans, size = host(1e6), MORE[1]
    graph, plan = fitted().at(size), checked(plans, MORE[1])
    moved = sum(life.parked_nbytes for life in plan.lives if life.how == "fetch" and "host" in life.form)
    assert moved
    price = Assumed(price=PRICE)
    for link in (1.0, 0.01, 0.0001):
        took = size / plans.rate(size, replace(price, link=link), graph)
        assert took >= max(graph.step_seconds, 2 * moved / (1e6 * link))  # nothing is back before it is gone
    assert took > graph.step_seconds * 10
    slow = size / plans.rate(size, replace(price, recorder_seconds=1.0), graph)
    assert slow > len(graph.forward)


def test_rows_with_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput_away, "_SIZES", 2)
    model, pool = alone()
    plans, most = host(1e7), max(p.most for p in pool)
    rows = {row.policy.rpartition(", ")[2]: row for row in with_host(model, plans, BARE, (BARE, most))}
    assert all(row.peak_bytes <= model.budget_nbytes for row in rows.values())
    assert rows["largest"].batch >= most
    fastest = rows["fastest"]
    assert fastest.samples_per_second >= max(rate_alone(size) for size in (BARE, *MORE)) * (1 - 1e-9)
    predicted, graph = plans.predicted(fastest.batch), fitted().at(fastest.batch)
    beyond = predicted.extra_seconds + predicted.stall_seconds + predicted.codec_seconds
    assert fastest.samples_per_second == pytest.approx(fastest.batch / (graph.step_seconds + beyond))
    again = host(1e7)
    assert again.plan(fastest.batch).lives == plans.plan(fastest.batch).lives
