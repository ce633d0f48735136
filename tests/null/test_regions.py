"""What a plan says of compiled regions: in its file, in `explain`, and the text."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build import random_step

from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import Graph, fingerprint
from lightning_memopt.plan import (
    Life,
    Plan,
    RegionPlan,
    plan_from_json,
    plan_to_json,
    read_plan,
    regions_text,
    simulate,
    write_plan,
)
from lightning_memopt.report.explain import explain
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.rollout import keep_all

PLANNED = RegionPlan(
    key="a" * 32,
    lives=(
        Life(tensor=2, born_at=-1, freed_at=4, how="original"),
        Life(tensor=2, born_at=7, freed_at=9, how="rebuild"),
        Life(tensor=5, born_at=1, freed_at=6, how="original"),
    ),
    calls=2.0,
    flops=900,
    extra_flops=90,
    rebuilt_ops=3,
    saved_nbytes=512,
    peak_nbytes=1024,
)
AS_TORCH = replace(PLANNED, key="b" * 32, lives=None, flops=100, extra_flops=0, rebuilt_ops=0)


def planned() -> tuple[Plan, Graph]:
    graph = random_step(random.Random(4))
    lives = keep_all(graph)
    plan = Plan(
        fingerprint=fingerprint(graph),
        lives=lives,
        regions=(PLANNED, AS_TORCH),
        solver="by hand",
        budget_nbytes=10**6,
        predicted=simulate(graph, lives).predicted,
        unmodified_peak_nbytes=1,
    )
    return plan, graph


def test_a_file_has_the_regions(tmp_path: Path) -> None:
    plan, graph = planned()
    write_plan(tmp_path / "plan.json", plan, graph)
    again, _ = read_plan(tmp_path / "plan.json")
    assert again == plan and again.regions == (PLANNED, AS_TORCH)


def test_files_of_schema_5_have_none() -> None:
    plan, graph = planned()
    obj = json.loads(json.dumps(plan_to_json(plan, graph) | {"schema": 5}))
    with pytest.raises(PlanFileError, match=r"unknown \['addresses', 'regions', 'states', 'tiers', 'tiles', 'weights'\]"):
        plan_from_json(obj)
    for field in ("regions", "addresses", "tiles", "states", "weights", "tiers"):
        del obj["plan"][field]
    assert plan_from_json(obj)[0] == replace(plan, regions=())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda regions: regions[0].update(calls=-1), r"plan.regions\[0\].calls: -1"),
        (lambda regions: regions[1].update(key=7), r"plan.regions\[1\].key: 7 is not text"),
        (lambda regions: regions[1].pop("lives"), r"plan.regions\[1\]: missing fields \['lives'\]"),
        (lambda regions: regions[0]["lives"].update(how="ofo"), r"plan.regions\[0\].lives.how\[1\]: a compiled region can"),
        (lambda regions: regions[0]["lives"].update(freed_at=[4, 6, 6]), r"freed_at\[1\]: 6 is before the birth, at 7"),
        (lambda regions: regions.append(None), r"plan.regions\[2\] is None, not an object"),
    ],
)
def test_a_wrong_region_is_named(change: Any, words: str) -> None:
    obj = json.loads(json.dumps(plan_to_json(*planned())))
    change(obj["plan"]["regions"])
    with pytest.raises(PlanFileError, match=words):
        plan_from_json(obj)


def test_explain_says_what_regions_do() -> None:
    plan, graph = planned()
    line = "1 of 2 compiled regions run ops again (3 ops, 9.0 % of all FLOPs)"
    assert regions_text(plan.regions) == line and f"\n{line}.\n" in explain(plan, graph)
    assert regions_text([AS_TORCH]) == "0 of 1 compiled regions run ops again"
    assert "compiled regions" not in explain(replace(plan, regions=()), graph)


def test_every_plan_of_a_frontier_has_the_regions_of_its_step() -> None:
    graph = random_step(random.Random(4))
    frontier = replace(planner.solve(graph), regions=(PLANNED,))
    for budget in (frontier.smallest_nbytes, frontier.unmodified_peak_nbytes + planner.UNSEEN_NBYTES):
        assert frontier.plan(budget).regions == (PLANNED,)
