"""Steps in which weights come and go (FSDP2): which rebuilds are legal, what is best among them, and the bound."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from build import Step, random_step
from exhaustive import cheapest, random_small_step
from windows import windowed

from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import (
    BEFORE,
    Graph,
    Tensor,
    base_levels,
    fingerprint,
    graph_from_json,
    graph_to_json,
    resident_nbytes,
    unmodified_levels,
)
from lightning_memopt.plan import LoweringError, lower, simulate, validate
from lightning_memopt.plan.allocator.reserved import reserved
from lightning_memopt.plan.lower import Rebuild
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import per_unit
from lightning_memopt.solvers.recompute.windows import held_at_boundaries, unit_calls

_SCALE = 1 << 14
"""Factor by which bytes are multiplied, because the planner leaves a fixed number of bytes free in its budgets."""


def scaled(graph: Graph) -> Graph:
    tensors = (replace(t, nbytes=_SCALE * t.nbytes) for t in graph.tensors)
    ops = (replace(o, workspace_nbytes=_SCALE * o.workspace_nbytes, state_nbytes=_SCALE * o.state_nbytes) for o in graph.ops)
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops))


def units_step(blocks: int = 4, ops: int = 4, width: int = 8) -> Graph:
    """A chain of units. Each unit has a weight that all its ops read, and is asked for what all its ops made."""
    step = Step()
    x, spans = step.given(width, "input"), []
    for _ in range(blocks):
        first = len(step.ops)
        for _ in range(ops):
            (x,) = step.op(x, makes=[width], saves=["out"], flops=1)
        spans.append((first, len(step.ops)))
    graph = step.build(gradient=1)
    tensors, changed = list(graph.tensors), list(graph.ops)
    for first, end in spans:
        asked = [p for s in graph.saves if first <= s.op < end for p in s.unpacked_at]
        weight = len(tensors)
        windows = ((graph.ops[first].at, graph.ops[end - 1].at), (min(asked), max(asked)))
        tensors.append(
            Tensor(
                id=weight,
                name="weight",
                nbytes=2,
                kind="parameter",
                storage=weight,
                born_at=BEFORE,
                freed_at=windows[-1][1],
                windows=windows,
            )
        )
        for o in range(first, end):
            changed[o] = replace(changed[o], inputs=(*changed[o].inputs, weight))
    return scaled(replace(graph, tensors=tuple(tensors), ops=tuple(changed)))


def test_plans_of_the_solver_are_legal_and_no_better_than_the_best() -> None:
    seeds, equal = range(0, 160, 2), 0
    for seed in seeds:
        rng = random.Random(seed)
        small = windowed(random_small_step(rng, rng.choice((3, 4, 4, 5))), rng)
        best, graph = cheapest(small), scaled(small)
        candidates = planner.solve(graph).candidates
        for c in candidates:
            report = validate(graph, c.lives, lower(graph, c.lives))
            assert report.ok and report.peak_nbytes == c.predicted.peak_nbytes
            assert any(_SCALE * p <= c.predicted.peak_nbytes and s <= c.predicted.extra_seconds for p, s, _ in best)
        equal += candidates[0].predicted.peak_nbytes == _SCALE * best[0][0]
    assert equal > 0.8 * len(seeds)


def test_larger_steps_have_legal_plans() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        graph = windowed(random_step(rng, 40), rng, units=5)
        for c in planner.solve(graph).candidates:
            assert validate(graph, c.lives, lower(graph, c.lives)).ok


def test_a_rebuild_outside_of_a_window_is_rejected() -> None:
    """The plans of the same steps with weights that stay: `lower` refuses, and `validate` finds the reads of what is away."""
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = windowed(random_small_step(rng, 5), rng)
        last = len(graph.points) - 1
        weights = {t: replace(graph.tensors[t], windows=(), freed_at=last) for t in graph.windowed}
        staying = replace(graph, tensors=tuple(weights.get(t.id, t) for t in graph.tensors))
        for _, _, lives in cheapest(staying):
            schedule = lower(staying, lives)
            reads = [
                (t, p)
                for p, steps in schedule.segments.items()
                for step in steps
                if isinstance(step, Rebuild)
                for t in graph.ops[step.op].inputs
            ]
            wrong = [t for t, p in reads if t in graph.windowed and not graph.tensors[t].there(p)]
            problems = validate(graph, lives, schedule).problems
            assert validate(staying, lives, schedule).ok and bool(problems) is bool(wrong)
            if wrong:
                refused += 1
                assert any("weight" in problem and "not in memory" in problem for problem in problems)
                with pytest.raises(LoweringError, match="weight"):
                    lower(graph, lives)
    assert refused > 10


def checked(graph: Graph) -> bool:
    """Whether checkpointing of each unit is legal and lowers the peak; then the planner has a plan that is no worse."""
    lives = per_unit(graph)
    try:
        schedule = lower(graph, lives)
    except LoweringError:  # a tensor that was overwritten is made of weights that are away
        return False
    own, report = simulate(graph, lives, schedule).predicted, validate(graph, lives, schedule)
    assert report.ok and report.peak_nbytes == own.peak_nbytes
    for objective in ("flops", "throughput"):
        frontier = planner.solve(graph, objective=objective)
        best = [c.predicted for c in frontier.candidates if c.predicted.peak_nbytes <= own.peak_nbytes]
        if objective == "flops":
            assert best and min(p.extra_flops for p in best) <= own.extra_flops
        else:
            assert best and min(p.extra_seconds for p in best) <= own.extra_seconds
    assert planner.smallest(graph).predicted.peak_nbytes <= own.peak_nbytes
    return own.rebuilt_ops > 0 and own.peak_nbytes < frontier.unmodified_peak_nbytes


@pytest.mark.parametrize("blocks, ops", [(4, 4), (6, 3), (3, 7)])
def test_checkpointing_of_each_unit_is_never_better(blocks: int, ops: int) -> None:
    graph = units_step(blocks, ops)
    assert unit_calls(graph) == [list(range(first, first + ops)) for first in range(0, blocks * ops, ops)]
    assert checked(graph)


def test_checkpointing_of_each_unit_is_never_better_in_random_steps() -> None:
    lower_peaks = 0
    for seed in range(40):
        rng = random.Random(seed)
        lower_peaks += checked(scaled(windowed(random_step(rng, 30), rng, units=5)))
    assert lower_peaks > 5


def test_units_within_and_before_others() -> None:
    """An op belongs to the innermost unit; and to the unit before one whose weights are there already."""
    graph = units_step(3, 2)
    weights = sorted(graph.windowed)
    windows = {weights[0]: ((0, 5),), weights[1]: ((1, 2),), weights[2]: ((2, 4),)}
    tensors = (replace(t, windows=windows[t.id]) if t.id in windows else t for t in graph.tensors)
    assert unit_calls(replace(graph, tensors=tuple(tensors))) == [[0, 5], [1, 2], [3, 4]]
    kept = tuple(replace(t, windows=((0, len(graph.points)),)) if t.id in windows else t for t in graph.tensors)
    assert unit_calls(replace(graph, tensors=kept)) == []


def test_a_boundary_that_reads_no_weight_may_be_rebuilt() -> None:
    """Two units; between them an op without a weight makes a large tensor from a small one: the small one is held."""
    step = Step()
    x = step.given(8, "input")
    (a,) = step.op(x, makes=[2])
    (b,) = step.op(a, makes=[64], saves=["out"])
    (c,) = step.op(b, makes=[8], saves=["out"])
    step.op(c, makes=[8], saves=["out"])
    graph = step.build(gradient=1)
    asked = {s.tensor: s.unpacked_at[0] for s in graph.saves}
    weights = []
    for windows in (((0, 0),), ((2, 3), (asked[c] - 2, asked[c]))):
        id, end = len(graph.tensors) + len(weights), windows[-1][1]
        weight = Tensor(id=id, name="w", nbytes=1, kind="parameter", storage=id, born_at=BEFORE, freed_at=end, windows=windows)
        weights.append(weight)
    ops = list(graph.ops)
    ops[0] = replace(ops[0], inputs=(*ops[0].inputs, weights[0].id))
    ops[2] = replace(ops[2], inputs=(*ops[2].inputs, weights[1].id))
    graph = replace(graph, ops=tuple(ops), tensors=(*graph.tensors, *weights))
    stuck = [op.id for op in held_at_boundaries(graph).forward if not op.recomputable]
    assert 0 in stuck and 1 not in stuck  # b is rebuilt from a, which is held


def test_files_and_fingerprints() -> None:
    plain, graph = random_step(random.Random(4)), units_step()
    assert graph_to_json(plain)["schema"] == 2 and "windows" not in graph_to_json(plain)
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert again.tensors == graph.tensors and fingerprint(again) == fingerprint(graph)
    without = replace(graph, tensors=tuple(replace(t, windows=()) for t in graph.tensors))
    assert fingerprint(without) != fingerprint(graph)
    weight = max(graph.windowed)
    rows = graph_to_json(graph)["windows"]
    for wrong in ([[weight, 3]], [[weight, 5, 4]], [[10**6, 0, 1]], [[weight, 0, 4], [weight, 4, 9]], [[0, 0, 1], *rows]):
        with pytest.raises(PlanFileError):
            graph_from_json(graph_to_json(graph) | {"windows": wrong})


def test_the_model_of_the_allocator_gathers_weights() -> None:
    """Requested bytes are those of the simulation, in two steps in a row."""
    graph = replace(units_step(), device="cuda")
    for c in planner.solve(graph).candidates:
        assert reserved(graph, c.lives).requested_nbytes == simulate(graph, c.lives).predicted.peak_nbytes
        assert c.predicted.needed_nbytes >= c.predicted.peak_nbytes


def test_levels_count_a_weight_in_its_windows() -> None:
    graph = units_step(2, 2)
    nbytes = {t: graph.tensors[t].nbytes for t in graph.windowed}
    without = replace(graph, tensors=tuple(replace(t, nbytes=0) if t.id in nbytes else t for t in graph.tensors))
    for levels in (base_levels, unmodified_levels):
        for p, (here, there) in enumerate(zip(levels(graph), levels(without), strict=True)):
            assert here - there == sum(n for t, n in nbytes.items() if graph.tensors[t].there(p))
    assert resident_nbytes(graph) == resident_nbytes(without)
