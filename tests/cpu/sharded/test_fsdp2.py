"""FSDP2 in two real processes with gloo between them (tests/cpu/lib/sharded.py): bits, peaks, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_memopt.native import install
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.sharded import CASES, FOUR
from tests.cpu.lib.written import needs_gloo, of_ranks

WORLD = 2
pytestmark = [needs_gloo, pytest.mark.long]


def run(by: Interpreter, folder: Path, world: int, *cases: str) -> list[dict[str, Any]]:
    """What each rank wrote. No rank hangs: all end, and well."""
    return of_ranks(world, "sharded", folder, str(world), *cases, timeout=500, by=by)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> list[dict[str, Any]]:
    return run(package_interpreter, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.mark.parametrize("case", [*CASES, "budgets"])
def test_bits_are_those_of_the_unmodified_run(ranks: list[dict[str, Any]], case: str) -> None:
    for found in ranks:
        plain, planned = found[case]["plain"], found[case]["planned"]
        assert planned["state"] == plain["state"]
        assert planned["rebuilt"] > 0 and "left the plan" not in planned["said"]


def test_four_ranks(tmp_path: Path, package_interpreter: Interpreter) -> None:
    for found in run(package_interpreter, tmp_path, 4, *FOUR):
        for case in found.values():
            assert case["planned"]["state"] == case["plain"]["state"]
            assert case["planned"]["rebuilt"] > 0
            if install() is not None:
                assert case["planned"]["peak"] < 0.6 * case["plain"]["peak"]
                assert case["planned"]["peak"] == pytest.approx(case["planned"]["predicted"], rel=0.01)


@pytest.mark.parametrize("case", [*CASES, "budgets"])
def test_peaks_are_lower_and_predicted(ranks: list[dict[str, Any]], case: str) -> None:
    """The allocator's peak of the last step, in each rank."""
    if install() is None:
        pytest.skip("no native counter")
    for found in ranks:
        plain, planned = found[case]["plain"], found[case]["planned"]
        for peak in (planned["measured"], planned["peak"]):
            assert peak == pytest.approx(planned["predicted"], rel=0.01)
        assert planned["peak"] < (0.8 if case == "budgets" else 0.6) * plain["peak"]


def test_nothing_of_a_collective_is_left_when_it_is_over(ranks: list[dict[str, Any]]) -> None:
    """Where the system tells of gloo's threads; elsewhere a budget leaves room."""
    if install() is None or not sys.platform.startswith("linux"):
        pytest.skip("no native counter, or no /proc")
    for found in ranks:
        assert found["settles"] == {"can": True, "left": 0}


def test_ranks_may_run_different_plans(ranks: list[dict[str, Any]]) -> None:
    """A rebuild needs no other process: each rank has a budget of its own, and keeps it."""
    if install() is None:
        pytest.skip("no native counter")
    assert len({found["budgets"]["planned"]["rebuilt"] for found in ranks}) == WORLD
    for found in ranks:
        assert found["budgets"]["planned"]["peak"] <= found["budgets"]["budget"]


def test_checkpoints_go_on_with_a_plan_and_without(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(set(found["resumed"].values())) == 1


def test_in_lightning(ranks: list[dict[str, Any]]) -> None:
    """With clipping by the norm, which is a distributed tensor there."""
    for found in ranks:
        plain, planned = found["lightning"]["plain"], found["lightning"]["planned"]
        assert planned["state"] == plain["state"] and planned["steps"] == plain["steps"] == 6
        assert planned["rebuilt"] > 0 and found["lightning"]["registered"]


def test_a_rebuild_outside_of_a_window_is_an_error(ranks: list[dict[str, Any]]) -> None:
    """Loud, before anything wrong is read; the backward after it is exact."""
    for found in ranks:
        case = found["out of window"]
        assert case["errors"] and {name for name, _ in case["errors"]} == {"NotGatheredError"}
        assert "sharded weight" in case["errors"][0][1]
        assert case["planned"] == case["plain"]


@pytest.mark.parametrize(
    "case, error, text",
    [
        ("tensor parallel", "UnsupportedError", "tensor parallel"),
        ("hybrid", "UnsupportedError", "more than one dimension"),
        ("both", "UnsupportedError", "more than one dimension"),
        ("pipeline", "UnsupportedError", "stage of a pipeline"),
        ("offload", "UnsupportedError", "offload='disk'"),
        ("updates", "entered", ""),
        ("meta", "entered", ""),
    ],
)
def test_what_is_refused(ranks: list[dict[str, Any]], case: str, error: str, text: str) -> None:
    for found in ranks:
        name, message = found["refused"][case]
        assert name == error and text in message
