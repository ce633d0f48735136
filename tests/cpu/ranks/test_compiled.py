"""Models that their user compiles, in DistributedDataParallel, in real processes (tests/cpu/lib/compiled_ranks.py)."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_memopt.native import counter
from lightning_memopt.trace import count_all
from tests.cpu.lib.compiled_ranks import PATIENT_SECONDS, WORLD
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.selected import selected
from tests.cpu.lib.written import needs_gloo, written

pytestmark = [needs_gloo, pytest.mark.long]
Outcome = dict[str, Any]
AROUND = "around"
"""Takes as long as all others together: Inductor compiles. It is run where its test is (tests/exhaustive.txt)."""
TOGETHER = "within,other_shapes,other_lengths_of_one_code,compiles_on_one,other_options"
FAILING = "raises_on_0", "raises_on_1"


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter
) -> dict[str, list[Outcome]]:
    """What each rank wrote, by group of cases. No rank hung."""
    around = f"{AROUND}," if selected(request, "case", AROUND) else ""
    together = f"{around}{TOGETHER}"
    count_all(lambda _: None)
    if counter() is None:
        pytest.skip("bytes of compiled code are counted by the native counter, which needs a C++ compiler, as Inductor does")
    folder = tmp_path_factory.mktemp("ranks")
    found = written("compiled_ranks", folder, together, *FAILING, timeout=500, by=package_interpreter)
    names = {TOGETHER: together} | {name: name for name in FAILING}
    return {group: [found[f"{name}.{rank}"] for rank in range(WORLD)] for group, name in names.items()}


@pytest.fixture(scope="module")
def ran(outcomes: dict[str, list[Outcome]]) -> list[Outcome]:
    """Of each rank the outcomes of the cases in which no rank fails: the same processes run all of them."""
    ranks = outcomes[TOGETHER]
    assert not any("error" in rank for rank in ranks), ranks
    return ranks


def one_decision(ranks: list[Outcome], regions: int) -> None:
    """All ranks have the same plan of each region, observed as many steps, and have the same weights."""
    assert all(rank["planned"] == rank["regions"] == regions for rank in ranks)
    for what in ("lives", "observed", "weights"):
        assert ranks[0][what] == ranks[1][what]


@pytest.mark.parametrize("case", ["around", "within"])
def test_n4_all_ranks_keep_the_budget_with_one_plan_and_the_same_bits(ran: list[Outcome], case: str) -> None:
    """The wrapper is compiled, or the model in it. Dynamo's DDPOptimizer makes two regions of two buckets.

    Inductor, which compiles the wrapper, saves less than all by itself.
    """
    ranks = [rank[case] for rank in ran]
    for run in ("keeps", "smallest", "middle"):
        one_decision([rank[run] for rank in ranks], regions=2)
    for rank in ranks:
        keeps, smallest, middle = rank["keeps"], rank["smallest"], rank["middle"]
        assert smallest["state"] == middle["state"] == keeps["state"]
        assert smallest["peak"] < middle["peak"] <= rank["budget"] < middle["unmodified"]
        if case == "around":
            assert middle["unmodified"] < keeps["peak"]
        else:
            assert middle["unmodified"] == keeps["peak"]
        for run in (smallest, middle, keeps):
            assert run["predicted"] == pytest.approx(run["peak"], rel=0.01)
            assert run["measured"] == pytest.approx(run["peak"], rel=0.01)


def test_n4_ranks_with_other_shapes_leave_their_regions_as_they_are(ran: list[Outcome]) -> None:
    """With the bits of a run without us. One line says why."""
    for rank in (rank["other_shapes"] for rank in ran):
        planned = rank["planned"]
        assert planned["state"] == rank["plain"]["state"] and planned["weights"] == rank["plain"]["weights"]
        assert planned["planned"] == 0 and planned["regions"] == 2
        assert len(planned["said"]) == 1 and "batches of other shapes" in planned["said"][0]
        assert "0 of 2 compiled regions run ops again; not planned: the compiled regions of the" in planned["compiled"]


def test_code_that_serves_all_sizes_has_one_plan_for_ranks_with_other_sizes(ran: list[Outcome]) -> None:
    """The plan is made for the rank with most bytes."""
    ranks = [rank["other_lengths_of_one_code"] for rank in ran]
    one_decision([rank["planned"] for rank in ranks], regions=1)
    for rank in ranks:
        assert rank["planned"]["state"] == rank["keeps"]["state"]
        assert rank["planned"]["peak"] < 0.75 * rank["keeps"]["peak"]
    assert ranks[1]["planned"]["peak"] < ranks[0]["planned"]["peak"] == ranks[0]["planned"]["predicted"]


def test_a_step_in_which_one_rank_compiles_is_discarded_by_all(ran: list[Outcome]) -> None:
    ranks = [rank["compiles_on_one"] for rank in ran]
    one_decision([rank["planned"] for rank in ranks], regions=2)
    for rank in ranks:
        assert rank["planned"]["observed"] == rank["keeps"]["observed"] + 1
        assert rank["planned"]["state"] == rank["keeps"]["state"]


def test_lives_are_sent_because_solvers_may_have_other_options(ran: list[Outcome]) -> None:
    one_decision([rank["other_options"] for rank in ran], regions=2)


@pytest.mark.parametrize("failing", [0, 1])
def test_n6_a_rank_that_fails_while_regions_are_chosen_ends_all_by_name(
    outcomes: dict[str, list[Outcome]], failing: int
) -> None:
    """The other rank is told at once, and does not wait until its patience is over."""
    ranks = outcomes[FAILING[failing]]
    assert ranks[failing]["error"] == "ValueError: the solver is broken"
    assert ranks[1 - failing]["error"].startswith(f"RankFailedError: Rank {failing} failed, so all ranks end: ValueError")
    assert abs(ranks[0]["seconds"] - ranks[1]["seconds"]) < PATIENT_SECONDS
