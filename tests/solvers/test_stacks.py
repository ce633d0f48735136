"""Bytes by purpose at every point, and the log of the three clocks: both add up to what the simulator predicts."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from build import random_step
from test_transfer import Codec, lives_of, named

from lightning_memopt.plan import lower, simulate
from lightning_memopt.plan.clocks import intervals, transfers
from lightning_memopt.plan.peak import STRUCTURES, at_peak, parts_at, stacks
from lightning_memopt.solvers.offload.policies import POLICIES
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.rollout import keep_all

RATES = Codec(300.0, times=3.0)
"""Slow enough that steps wait for copies."""


def plans(seed: int):
    """A random step, and plans that keep all, rebuild, or park tensors."""
    graph = named(random_step(random.Random(seed), 24, mutation=seed % 2 == 0), random.Random(seed))
    yield graph, keep_all(graph)
    yield graph, echo(graph)
    for policy in POLICIES.values():
        yield graph, lives_of(policy, graph, RATES)


@pytest.mark.parametrize("seed", range(12))
def test_stacks_add_up_at_every_point(seed: int) -> None:
    for graph, lives in plans(seed):
        levels = stacks(graph, lives)
        assert tuple(levels) == STRUCTURES and all(min(level) >= 0 for level in levels.values())
        totals = [sum(column) for column in zip(*levels.values(), strict=True)]
        timeline = simulate(graph, lives)
        assert totals == list(timeline.nbytes)
        assert at_peak(graph, lives).total == timeline.predicted.peak_nbytes
        for point in range(0, len(totals), 7):
            assert sum(part.nbytes for part in parts_at(graph, lives, point)) == totals[point]


def test_parked_tensors_have_purposes_of_their_own() -> None:
    seen = {
        name for seed in range(12) for graph, lives in plans(seed) for name, level in stacks(graph, lives).items() if any(level)
    }
    assert {"feature maps", "rebuilt", "fetched", "gradients", "weights"} <= seen


def test_intervals_are_the_clocks() -> None:
    waited = 0.0
    for graph, lives in (plan for seed in range(12) for plan in plans(seed)):
        schedule = lower(graph, lives)
        log, price = intervals(graph, lives, schedule, RATES)
        assert price == transfers(graph, lives, schedule, RATES)
        spent = {(lane, what): 0.0 for lane in ("compute", "out", "in") for what in {i.what for i in log} | {"copy", "wait"}}
        for i in log:
            assert i.ends >= i.begins
            spent[i.lane, i.what] += i.ends - i.begins
        assert spent["out", "copy"] + spent["in", "copy"] == pytest.approx(price.copy_seconds)
        assert spent["compute", "wait"] == pytest.approx(price.stall_seconds)
        ops = sum(op.seconds for op in graph.ops)
        ran = sum(seconds for (_, what), seconds in spent.items() if what in ("forward", "backward", "update"))
        assert ran == pytest.approx(ops)
        assert spent.get(("compute", "rebuild"), 0.0) == pytest.approx(simulate(graph, lives, schedule).predicted.extra_seconds)
        for lane in ("compute", "out", "in"):  # no clock does two things at a time
            spans = [i for i in log if i.lane == lane]
            assert all(b.begins >= a.ends - 1e-12 for a, b in pairwise(spans))
        waited += price.stall_seconds
    assert waited > 0
