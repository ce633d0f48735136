"""A step as a chain of stages: its cuts, and plans that cost what the chain's programme says."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from build import Step

from lightning_memopt.graph import Graph
from lightning_memopt.plan import lower, simulate, validate
from lightning_memopt.solvers import chain as dp
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute import stage_chain
from lightning_memopt.solvers.rollout import keep_all


def blocks(seed: int) -> Graph:
    """Blocks of a few ops that save what they make or read, with little between two blocks."""
    rng = random.Random(seed)
    step = Step()
    t = step.given(8)
    for _ in range(3 + seed % 5):
        for _ in range(rng.randint(2, 5)):
            saves = [saved for saved in ("out", t) if rng.random() < 0.6]
            size, seconds = rng.randint(20, 120), rng.randint(1, 9) / 8
            (t,) = step.op(t, makes=(size,), saves=saves, seconds=seconds, workspace=rng.choice((0, 9)))
        (t,) = step.op(t, makes=(rng.randint(3, 9),), saves=(t,), seconds=rng.randint(1, 9) / 8)
    return step.build(gradient=rng.randint(0, 9))


@pytest.mark.parametrize("seed", range(10))
def test_plans_cost_what_the_chain_says(seed: int) -> None:
    """Every tree of every table has legal lives. They take the table's seconds (or less: two stages may need the same tensor
    at once), and no more bytes.
    """
    graph = blocks(seed)
    most = simulate(graph, keep_all(graph)).predicted.peak_nbytes
    equal = trees = 0
    for _, model in planner._chains(graph):
        table = dp.solve_chain(model.chain, most, bucket_nbytes=1)
        for level in table.levels():
            seconds, peak_nbytes = dp.simulate(model.chain, table.tree(level))
            lives = stage_chain.lives(model, table.tree(level))
            assert validate(graph, lives, lower(graph, lives)).ok
            predicted = simulate(graph, lives).predicted
            assert predicted.extra_seconds <= seconds + 1e-9 and predicted.peak_nbytes <= peak_nbytes
            equal += abs(predicted.extra_seconds - seconds) < 1e-9
            trees += 1
    assert equal > 0.8 * trees > 0


@pytest.mark.parametrize("seed", range(10))
def test_stages_follow_each_other(seed: int) -> None:
    """Their ops are those of the forward, what leaves one enters the next, and backward is asked for them in reverse order."""
    graph = blocks(seed)
    for _, model in planner._chains(graph):
        spans = model.stages.spans
        assert [op for span in spans for op in range(span.first, span.last + 1)] == [op.id for op in graph.forward]
        assert not spans[0].enters and not spans[-1].leaves
        for one, other in pairwise(spans):
            assert one.leaves == other.enters != frozenset()
            made = {t for op in graph.ops[one.first : one.last + 1] for t in op.outputs}
            assert one.leaves <= made | one.enters
            assert other.begins_at <= other.ends_at < one.begins_at
        saves = sorted(save.id for span in spans for save in span.saves)
        assert saves == [save.id for save in graph.saves if save.tensor in graph.producers]


def test_what_is_written_over_takes_no_more_memory() -> None:
    """x, then x in its new version, then y: the peak is both sizes once."""
    step = Step()
    (x,) = step.op(step.given(), makes=(100,))
    (x,) = step.op(mutates=(x,), makes=())
    (y,) = step.op(x, makes=(30,), saves=("out",))
    graph = step.build()
    none: Any = SimpleNamespace(given=frozenset(), enters=frozenset())
    assert stage_chain._sweep(graph, none, none, frozenset({y})) == (3.0, 130)
    assert stage_chain._sweep(graph, none, none, frozenset({x})) == (2.0, 100)
