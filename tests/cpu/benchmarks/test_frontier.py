"""The budget, kept: models of `benchmarks` at five budgets each, measured by the allocator, equal bit by bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks.lib.bench import MIB, Bench, equal  # noqa: E402
from benchmarks.recompute.frontier import SHARES  # noqa: E402
from lightning_memopt.errors import InfeasibleError  # noqa: E402
from lightning_memopt.graph import resident_nbytes  # noqa: E402
from lightning_memopt.plan import lower, validate  # noqa: E402
from lightning_memopt.runtime import Program  # noqa: E402
from lightning_memopt.solvers import planner  # noqa: E402
from lightning_memopt.solvers.rollout import keep_all  # noqa: E402

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.long]


BATCH = {"llama": 2, "resnet50": 16, "t5": 4, "unet": 8}
"""Model -> a batch, as small as it can be where most of the memory is to be activations."""


@pytest.mark.parametrize("name", BATCH)
def test_budget_is_kept_and_bits_are_equal(name: str) -> None:
    bench = Bench(name, batch=BATCH[name])
    bench.step()
    graph = bench.observe(steps=2)
    loss, reference = bench.step(), bench.outcome()
    resident = resident_nbytes(graph)
    frontier = planner.solve(graph)
    activations = frontier.unmodified_peak_nbytes - resident
    assert activations >= 0.8 * frontier.unmodified_peak_nbytes, "the configuration must be made of activations"
    predicted_mib = frontier.unmodified_peak_nbytes / MIB
    assert abs(bench.peak() + resident / MIB - predicted_mib) <= 0.01 * predicted_mib

    with bench.per_block():
        per_block_mib = bench.peak()

    seconds, peaks = [], []
    for share in SHARES:
        budget = int(resident + share * activations)
        try:
            plan = frontier.plan(budget)
        except InfeasibleError as error:
            # INFEASIBLE counts only where it names a smallest budget that works and that lies below per-block checkpointing
            assert error.smallest_nbytes is not None
            plan = frontier.plan(error.smallest_nbytes)
            budget = error.smallest_nbytes
            assert budget <= resident + per_block_mib * MIB
        report = validate(graph, plan.lives, lower(graph, plan.lives))
        assert report.ok, report.problems[:3]
        assert report.peak_nbytes == plan.predicted_peak_nbytes
        forward = bench.planned(Program(graph, plan.lives))
        got = bench.step(forward)
        assert torch.equal(got, loss), f"loss at f={share}"
        assert equal(reference, bench.outcome()), f"gradients, buffers or generator at f={share}"
        measured = bench.peak(forward) * MIB + resident
        assert measured <= budget * 1.0005, f"f={share}: {measured} bytes measured against a budget of {budget}"
        assert abs(measured / plan.predicted_peak_nbytes - 1) <= 0.01
        seconds.append(plan.predicted.extra_seconds)
        peaks.append(plan.predicted_peak_nbytes)
        assert plan.lower_bound_seconds <= plan.predicted.extra_seconds
    noise = random.Random(0)
    slower = [replace(op, seconds=3 * noise.uniform(0.5, 2) * op.seconds) for op in graph.ops]
    assert planner.solve(replace(graph, ops=tuple(slower))).smallest_nbytes == frontier.smallest_nbytes
    assert peaks == sorted(peaks, reverse=True), "ask for less, never get more"
    assert seconds == sorted(seconds), "a larger budget is never slower"


def test_p8_plan_is_the_identity_where_the_budget_has_room() -> None:
    bench = Bench("resnet50")
    frontier = planner.solve(bench.observe(steps=1))
    plan = frontier.plan(frontier.unmodified_peak_nbytes)
    assert plan.predicted.extra_seconds <= 1e-12
    assert Program(frontier.graph, keep_all(frontier.graph)).empty
