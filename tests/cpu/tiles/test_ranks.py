"""Loss heads in tiles where ranks train together: real processes with gloo between them (tests/cpu/lib/tiled_ranks.py)."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_memopt.native import counter
from lightning_memopt.trace import count_all
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.tiled_ranks import WORLD
from tests.cpu.lib.written import needs_gloo, written

SAME = ("default", "inner", "accumulates", "unused", "static", "views", "early", "budget")
OWN = ("other_tokens", "one_needs", "other_once", "all_differ", "joined", "given", "metric", "fewer_sizes")
WHOLE = ("one_cannot", "off_on_one")
SHARDED_SAME = ("sharded", "sharded_tied", "sharded_held", "sharded_stays_held", "sharded_accumulates", "sharded_budget")
SHARDED = ",".join((*SHARDED_SAME, "sharded_apart", "sharded_leaves", "sharded_changes", "sharded_late_metric"))
TOGETHER = ",".join((*SAME, *OWN, *WHOLE, "late_metric"))
GROUPS = (TOGETHER, SHARDED, "raises", "infeasible")
pytestmark = [needs_gloo, needs_tiles, pytest.mark.long]
Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> dict[str, list[Outcome]]:
    """What each rank wrote, by case. No rank hung."""
    count_all(lambda _: None)
    if counter() is None:
        pytest.skip("nothing counts without a compiler")
    found = written("tiled_ranks", tmp_path_factory.mktemp("ranks"), *GROUPS, by=package_interpreter, timeout=300)
    return {name: [found[f"{group}.{rank}"][name] for rank in range(WORLD)] for group in GROUPS for name in group.split(",")}


def exact(ranks: list[Outcome]) -> list[Outcome]:
    """The runs in tiles. Losses, gradients of each step, weights, state and generator have the bits of the plain run."""
    assert all("error" not in rank for rank in ranks), ranks
    assert all(rank["tiled"]["state"] == rank["plain"]["state"] for rank in ranks)
    tiled = [rank["tiled"] for rank in ranks]
    assert tiled[0]["weights"] == tiled[1]["weights"]
    return tiled


@pytest.mark.parametrize("name", (*SAME, *SHARDED_SAME))
def test_all_ranks_train_by_one_plan_in_tiles(outcomes: dict[str, list[Outcome]], name: str) -> None:
    first, second = exact(outcomes[name])
    assert first["tiles"] and first["tiles"] == second["tiles"]
    assert (first["lives"] == second["lives"]) == (name != "unused"), "there, rank 1 has another graph"
    assert not first["whole"] and not second["whole"]
    for rank in (first, second):
        assert rank["measured"] == pytest.approx(rank["predicted"], rel=0.01)
        assert rank["predicted"] < 0.5 * rank["unmodified"] or "budget" in name
    if "budget" in name:
        assert first["measured"] <= outcomes[name][0]["budget"] < first["unmodified"]


@pytest.mark.parametrize("name", OWN)
def test_ranks_with_other_batches_train_in_tiles_of_their_own(outcomes: dict[str, list[Outcome]], name: str) -> None:
    """Batches of other shapes on a rank, always or now and then; more batches in `Join`; a plan of a file; a metric of one
    rank; and tiles that one rank cannot have.
    """
    ranks = exact(outcomes[name])
    for rank in ranks:
        assert rank["tiles"] and not rank["whole"], rank["lines"]
    if name == "fewer_sizes":
        assert ranks[0]["tiles"][0][0] < ranks[1]["tiles"][0][0]


def test_a_rank_that_needs_no_tiles_runs_in_them_where_another_needs_them(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = outcomes["one_needs"]
    assert first["unmodified"] < first["budget"] < second["unmodified"]
    assert max(rank["tiled"]["measured"] for rank in (first, second)) <= first["budget"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one_cannot", "on rank 1, the native engine is not there"),
        ("off_on_one", "on rank 1, tile='off'"),
        ("sharded_apart", "its weights are freed between forward and backward"),
        ("sharded_leaves", "plans without tiles are no worse"),
    ],
)
def test_where_one_rank_cannot_none_does_and_a_line_says_why(outcomes: dict[str, list[Outcome]], name: str, why: str) -> None:
    tiled = exact(outcomes[name])
    assert not any(rank["tiles"] for rank in tiled)
    assert all(rank["measured"] == pytest.approx(rank["predicted"], rel=0.01) for rank in tiled), "by a plan"
    assert len(tiled[0]["whole"]) == 1 and why in tiled[0]["whole"][0]


@pytest.mark.parametrize("name", ["late_metric", "sharded_late_metric"])
def test_logits_that_one_rank_reads_later_are_made_whole_there(outcomes: dict[str, list[Outcome]], name: str) -> None:
    first, second = exact(outcomes[name])
    assert any("aten::argmax read logits" in line for line in first["lines"])
    assert second["tiles"] and not any("read logits" in line for line in second["lines"])


def test_logits_are_made_whole_before_sharded_weights_leave(outcomes: dict[str, list[Outcome]]) -> None:
    """From some step on, `reshard_after_forward` frees the weights of the head before the loss is there."""
    for rank in exact(outcomes["sharded_changes"]):
        assert any("reshard_after_forward read logits" in line for line in rank["lines"])


def test_a_plan_of_a_file_is_checked_on_each_rank(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = outcomes["given"]
    for rank in (first, second):
        assert rank["wrong"]["state"] == rank["plain"]["state"]
    assert not first["wrong"]["whole"] and "other bits" in second["wrong"]["whole"][0]


def test_a_rank_that_fails_while_they_decide_ends_all(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = (rank["error"] for rank in outcomes["raises"])
    assert second == "ValueError: no head" and first.startswith("RankFailedError: Rank 1 failed") and "no head" in first


def test_a_budget_that_tiles_cannot_keep_on_one_rank_is_refused_on_all(outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["infeasible"]:
        assert rank["error"].startswith("InfeasibleError: The budget is infeasible on rank 1 of 2")
