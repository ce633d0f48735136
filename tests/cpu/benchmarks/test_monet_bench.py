"""MONeT's networks and what is put beside its figures: real sizes, plans within budgets and above bounds, counted FLOPs."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.lib.bench import Bench
from benchmarks.models import monet
from benchmarks.papers.monet import CASES, Planned, convolution_flops, recorded
from lightning_memopt.runtime import Program
from lightning_memopt.solvers import planner

pytestmark = pytest.mark.long


def test_networks_have_the_sizes_that_they_are_known_by() -> None:
    """ResNet-50 as torchvision documents it, the U-Net as counted by hand: weights, biases and two numbers a norm's channel."""
    channels = [(3, 64, 64), (64, 128, 128), (128, 256, 256), (256, 512, 512), (512, 512, 512)]
    channels += [(1024, 512, 256), (512, 256, 128), (256, 128, 64), (128, 64, 64)]
    by_hand = sum(9 * (a * b + b * c) + 3 * (b + c) for a, b, c in channels) + 64 + 1
    assert sum(p.numel() for p in monet.unet(1)[0].parameters()) == by_hand
    assert sum(p.numel() for p in monet.resnet50(1)[0].parameters()) == 25_557_032


LESS = 1.2, 1.5, 2.0


@pytest.mark.parametrize("name", CASES)
def test_plans_keep_their_budgets_and_no_bound_is_above_them(name: str) -> None:
    planned = Planned(recorded(CASES[name].build, 32 if name == "resnet50" else 2), LESS)
    assert all(op.seconds > 0 for op in planned.graph.ops if op.flops)
    spent = []
    for less in LESS:
        row = planned.row(less)
        for which in ("fewest_flops", "fastest"):
            assert 0 <= row["least_flops"] <= row[which]["extra_flops"]
            assert 0 < row["least_seconds"] <= row[which]["extra_seconds"]
            assert row[which]["peak_nbytes"] <= row["budget_nbytes"] < planned.unmodified_nbytes / (less - 0.01)
        spent.append(row["fastest"]["extra_seconds"])
    assert 0 < spent[0] <= spent[1] <= spent[2]
    assert planned.row(1000.0)["fastest"] is None


def test_flops_that_run_again_are_counted() -> None:
    """Those of convolutions, from the profiler's shapes: exactly what the plan predicts, where nothing else has any."""
    bench = Bench("resnet50")
    graph = bench.observe(steps=1)
    frontier = planner.solve(graph, objective="flops")
    plan = frontier.plan(frontier.smallest_nbytes)
    forward = bench.planned(Program(graph, plan.lives))
    bench.step(forward)
    again = convolution_flops(lambda: bench.step(forward)) - convolution_flops(bench.step)
    assert again == plan.predicted.extra_flops > 0
