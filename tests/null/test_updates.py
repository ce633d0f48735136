"""Early updates of a plan: what they mean for a step, by two counts; and the fewest for a budget, against all choices."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from build import random_step
from updates import choices, with_updates

from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import Graph, Op, Point, fingerprint
from lightning_memopt.plan import (
    Plan,
    at_least,
    early,
    fewest,
    fixed_levels,
    lower,
    plan_from_json,
    plan_to_json,
    read_plan,
    simulate,
    step_of,
    updated,
    validate,
    write_plan,
)
from lightning_memopt.solvers.rollout import keep_all


def step(seed: int, beside: int | None = None) -> Graph:
    rng = random.Random(seed)
    return with_updates(random_step(rng), rng, beside=beside)


def plan_of(graph: Graph, updates: tuple[int, ...]) -> Plan:
    return Plan(
        fingerprint=fingerprint(graph),
        lives=keep_all(graph),
        updates=updates,
        solver="by hand",
        budget_nbytes=1,
        predicted=replace(simulate(updated(graph, updates), keep_all(graph)).predicted, update_seconds=0.25),
        unmodified_peak_nbytes=1,
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_validator_counts_the_same_bytes(seed: int) -> None:
    graph = step(seed)
    lives = keep_all(graph)
    schedule = lower(graph, lives)
    for updates in choices(graph):
        report = validate(graph, lives, schedule, updates)
        assert report.ok and report.peak_nbytes == simulate(updated(graph, updates), lives).predicted.peak_nbytes
    assert updated(graph, early(graph)) is graph and validate(graph, lives, schedule) == validate(
        graph, lives, schedule, updates
    )


def test_the_validator_refuses_what_the_step_does_not_allow() -> None:
    graph = step(0)
    lives = keep_all(graph)
    schedule = lower(graph, lives)
    first, second, *_ = early(graph)
    for wrong, words in (
        ((0,), "does not allow"),
        ((1 << 40,), "does not allow"),
        ((second, first), "too late"),
        ((first, first), "twice"),
    ):
        (problem,) = validate(graph, lives, schedule, wrong).problems
        assert words in problem


@pytest.mark.parametrize("beside", [0, 1, 2])
@pytest.mark.parametrize("seed", range(25))
def test_the_fewest_updates_for_a_budget(seed: int, beside: int) -> None:
    """Compared with all choices. If updates are not proportional to their gradients, more may be chosen, but never too few."""
    for graph, exact in ((step(seed, beside), True), (step(seed), False)):
        lives = keep_all(graph)
        levels = simulate(graph, lives).nbytes
        for limit in range(max(levels), max(simulate(updated(graph, ()), lives).nbytes) + 1):
            fitting = [u for u in choices(graph) if simulate(updated(graph, u), lives).predicted.peak_nbytes <= limit]
            found = fewest(graph, levels, limit)
            assert found in fitting
            assert len(found) == len(fitting[0]) if exact else len(found) >= len(fitting[0])
            assert at_least(graph, fixed_levels(graph), limit) <= at_least(graph, levels, limit) <= len(fitting[0])
        assert not fewest(graph, levels, 1 << 40)


def test_a_file_has_the_updates(tmp_path: Path) -> None:
    graph = step(3)
    for updates in choices(graph):
        plan = plan_of(graph, updates)
        write_plan(tmp_path / "plan.json", plan, graph)
        again, same = read_plan(tmp_path / "plan.json")
        assert again == plan and (same.updates, same.usual_nbytes) == (graph.updates, graph.usual_nbytes)
        assert simulate(step_of(same, again), again.lives).predicted.peak_nbytes == plan.predicted.peak_nbytes


def test_a_file_of_schema_4_is_read_unless_its_step_updates_early() -> None:
    graph = random_step(random.Random(1), all_recomputable=True)
    obj = plan_to_json(plan_of(graph, ()), graph)
    obj["schema"] = 4
    for field in ("regions", "addresses", "tiles", "states", "weights", "tiers", "updates"):
        del obj["plan"][field]
    del obj["plan"]["predicted"]["update_seconds"]
    plan, _ = plan_from_json(obj)
    assert plan.updates == () and plan.predicted.update_seconds == 0.0
    (parameter, *_) = (t.id for t in graph.tensors if t.kind == "parameter")
    backward = next(op for op in graph.ops if op.phase == "backward")
    as_update = replace(backward, phase="update", inputs=(*backward.inputs, parameter))
    at = len(graph.points)
    last = Op(id=len(graph.ops), name="backward", phase="backward", inputs=(), outputs=(), at=at)
    ops = tuple(as_update if op is backward else op for op in graph.ops)
    old = replace(graph, ops=(*ops, last), points=(*graph.points, Point("op", last.id)))
    obj["graph"] = plan_to_json(plan, replace(old, saves=graph.saves))["graph"]
    with pytest.raises(PlanFileError, match=r"the file has schema 4, which does not say .* its step does update some"):
        plan_from_json(obj)


def test_a_file_with_wrong_updates_is_refused() -> None:
    graph = step(5)
    for field, value, words in (
        ("at", [9, 8, 7, 6, 5], "before that of the update before it"),
        ("since", [0] * 5, "not after"),
        ("parameter", [0] * 5, "twice"),
        ("until", [1 << 30] * 5, "not a whole number"),
    ):
        obj = plan_to_json(plan_of(graph, ()), graph)
        obj["graph"]["updates"][field] = value
        with pytest.raises(PlanFileError, match=words):
            plan_from_json(obj)
    obj = plan_to_json(plan_of(graph, ()), graph)
    obj["plan"]["updates"] = [0]
    with pytest.raises(PlanFileError, match="does not allow"):
        plan_from_json(obj)
