"""Groups of real processes (tests/cpu/lib/deciding_ranks.py): all ranks decide alike, and a failure ends all by its name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.lib.deciding_ranks import CASES, PATIENT_SECONDS
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.written import needs_gloo, written

pytestmark = [needs_gloo, pytest.mark.long]
Outcomes = dict[tuple[str, int], dict[str, Any]]
BOUND_SECONDS = 60.0
"""Ranks that are left end in this time, although patience is shorter in these tests than it is for users."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> Outcomes:
    """What each rank of each case wrote. No process hung."""
    contents = written("deciding_ranks", tmp_path_factory.mktemp("groups"), by=package_interpreter, timeout=900)
    by_case = {}
    for stem, outcome in contents.items():
        name, rank = stem.split(".")
        by_case[name, int(rank)] = outcome
    return by_case


def of(outcomes: Outcomes, name: str) -> list[dict[str, Any]]:
    ranks = [outcomes[name, rank] for rank in range(CASES[name][0])]
    assert all(not rank["error"] and not rank["left"] for rank in ranks), ranks
    return [rank["outcome"] for rank in ranks]


@pytest.mark.parametrize("name", ["same_shapes", "four", "counted_before", "accumulated", "other_shapes", "uneven"])
def test_n1_n4_every_rank_trains_exactly_within_its_plan(outcomes: Outcomes, name: str) -> None:
    """Losses, weights, optimizer state and generators are those of plain DDP; the predicted peak is kept."""
    for rank in of(outcomes, name):
        plain, planned = rank["plain"], rank["planned"]
        assert planned["state"] == plain["state"] and planned["rebuilt"] > 0
        assert planned["measured"] <= planned["budget"] and planned["measured"] == pytest.approx(planned["predicted"], rel=0.01)
        assert planned["weights"] == of(outcomes, name)[0]["plain"]["weights"]


@pytest.mark.parametrize("name", ["same_shapes", "four", "accumulated"])
def test_n4_ranks_with_the_same_graph_have_one_plan(outcomes: Outcomes, name: str) -> None:
    assert len({rank["planned"]["lives"] for rank in of(outcomes, name)}) == 1


def test_n4_ranks_with_other_shapes_have_their_own_plans(outcomes: Outcomes) -> None:
    predicted = [rank["planned"]["predicted"] for rank in of(outcomes, "other_shapes")]
    assert predicted[0] > predicted[1]


def test_a_rank_without_a_run_is_no_reason_to_wait(outcomes: Outcomes) -> None:
    """Rank 0 says once that it decides by itself, and trains exactly; rank 1 trains plainly."""
    alone, plain = of(outcomes, "without_a_run")
    assert alone["rebuilt"] > 0 and alone["state"] == alone["plain"] and plain["state"] == plain["plain"]
    assert len(alone["said"]) == 1 and "rank 0 decides by itself" in alone["said"][0] and not plain["said"]


@pytest.mark.parametrize("name", ["infeasible", "hopeless"])
def test_n6_infeasible_on_one_is_infeasible_on_all(outcomes: Outcomes, name: str) -> None:
    """In the first step, on both ranks, with the rank and the budget; nothing was updated, and both go on training together."""
    for rank in of(outcomes, name):
        assert "InfeasibleError: The budget is infeasible on rank 1 of 2" in rank["caught"] and rank["forwards"] == 1
        assert ("or more" in rank["caught"]) == (name == "infeasible")
        assert rank["again"] == of(outcomes, "same_shapes")[0]["plain"]["weights"]


@pytest.mark.parametrize(
    ("name", "left", "why"),
    [
        ("raises", 0, "Rank 1 failed, so all ranks end: ValueError: the shard is empty"),
        ("killed_observing", 0, "rank 1 did not say why: its process has ended"),
        ("killed_running", 0, "rank 1 did not say why: its process has ended"),
        ("killed_with_the_store", 1, "the store of the process group is gone: the process that holds it, usually rank 0"),
        ("killed_solving", 1, "Rank 0 has been silent for"),
        ("killed_following", 0, "Rank 1 has been silent for"),
    ],
)
def test_n6_a_rank_that_fails_ends_all_by_name(outcomes: Outcomes, name: str, left: int, why: str) -> None:
    """In bounded time. Only the ranks that are left write; a rank that raised has its own error."""
    written = outcomes[name, left]
    assert written["error"].startswith("RankFailedError") and why in written["error"]
    assert written["seconds"] < BOUND_SECONDS and PATIENT_SECONDS < BOUND_SECONDS
    other = outcomes.get((name, 1 - left))
    assert other is None if name.startswith("killed") else other is not None and other["error"].startswith("ValueError")
