"""Addresses as a part of a plan: checked by code of its own, kept in files, explained."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build import random_step
from test_plan_file import plan_of

from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Addresses, Plan, plan_from_json, plan_to_json, read_plan, write_plan, wrong_addresses
from lightning_memopt.report.explain import explain
from lightning_memopt.solvers.placement import Buffer, place_cyclic
from lightning_memopt.solvers.rollout import keep_all

RIGHT = Addresses(
    nbytes=(64, 128, 10, 64),
    offsets=(0, 64, None, 192),
    until=(3, 4, 0, 5),  # the last one lives into the next step
    arena_nbytes=256,
    max_live_nbytes=256,
    needed_nbytes=1000,
)


def planned(addresses: Addresses = RIGHT) -> tuple[Plan, Graph]:
    graph = random_step(random.Random(4))
    return replace(plan_of(graph, keep_all(graph)), addresses=addresses), graph


def test_what_is_right_has_no_fault() -> None:
    assert wrong_addresses(RIGHT) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": (0, 0, None, 192)}, "requests 0 and 1 overlap"),
        ({"offsets": (0, 64, None, 0)}, "requests 3 and 0 overlap"),  # in the next step only
        ({"offsets": (0, 64, None, 128)}, "requests 1 and 3 overlap"),
        ({"offsets": (0, 64, None, 256)}, "request 3 has 64 bytes at 256 of an arena of 256"),
        ({"offsets": (0, 65, None, 193)}, "request 1 has 128 bytes at 65"),
        ({"until": (0, 4, 0, 5)}, "request 0 ends before request 0, which is not within the step after it"),
        ({"until": (3, 4, 0, 8)}, "request 3 ends before request 8"),
        ({"until": (3, 4, 0)}, "4 requests have 4 offsets and 3 ends"),
    ],
)
def test_each_fault_is_named_and_no_file_has_it(change: Any, words: str, tmp_path: Path) -> None:
    wrong = replace(RIGHT, **change)
    assert any(words in line for line in wrong_addresses(wrong)), wrong_addresses(wrong)
    with pytest.raises(PlanFileError, match="cannot be written"):
        write_plan(tmp_path / "plan.json", *planned(wrong))


def test_what_the_solver_places_is_right() -> None:
    """The check is not part of the solver, and agrees with it; a buffer that is moved onto another one is seen."""
    seen = 0
    for seed in range(20):
        draw = random.Random(seed)
        period = draw.randrange(3, 40)
        nbytes = [64 * draw.randrange(1, 9) for _ in range(period)]
        until = [i + draw.randrange(1, period + 1) for i in range(period)]
        buffers = [Buffer(str(i), i, until[i], nbytes[i]) for i in range(period)]
        placement = place_cyclic(buffers, period, 0.1, 64)
        offsets = tuple(placement.offsets)
        addresses = Addresses(
            nbytes=tuple(nbytes),
            offsets=offsets,
            until=tuple(until),
            arena_nbytes=placement.height_nbytes,
            max_live_nbytes=placement.bound_nbytes,
            needed_nbytes=placement.height_nbytes,
        )
        assert wrong_addresses(addresses) == []
        onto = replace(addresses, offsets=(offsets[1], *offsets[1:]))
        if until[0] > 1:
            assert wrong_addresses(onto)
            seen += 1
    assert seen


def test_a_file_has_the_addresses(tmp_path: Path) -> None:
    plan, graph = planned()
    write_plan(tmp_path / "plan.json", plan, graph)
    assert read_plan(tmp_path / "plan.json")[0] == plan
    obj = json.loads(json.dumps(plan_to_json(plan, graph)))
    obj["plan"]["addresses"]["offsets"][1] = -2
    with pytest.raises(PlanFileError, match=r"plan.addresses.offsets\[1\]: -2"):
        plan_from_json(obj)


def test_explain_says_what_the_arena_has() -> None:
    plan, graph = planned()
    text = "Addresses: 3 of 4 requests of a step in an arena of 256 B; no arena is smaller than 256 B."
    assert text in explain(plan, graph) and "Addresses" not in explain(replace(plan, addresses=None), graph)
