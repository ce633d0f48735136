"""What a run takes up to its plan: all parts are there, the plan is kept, and the share follows from them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.cost import attached
from tests.cpu.lib.scripts import Interpreter

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> None:
    interpreter.stands_in(monkeypatch, "transformers.models.gpt2.modeling_gpt2")


def test_a_start_is_counted_up_to_the_first_steady_planned_step() -> None:
    """In a process of its own, as in the benchmark: peaks count all that a process holds."""
    row = attached.starts("resnet50", 1, profiled=False)["median"]
    assert row["within_budget"] and len(row["observed"]) == 3 and row["solve_seconds"] > 0
    in_all = sum(cpu for _, cpu in row["parts"].values())
    assert row["share"][1] == pytest.approx(in_all / (attached.RUN * row["plain"][1]))
    assert row["parts"]["observed steps and the solve"][1] > 0


def test_beyond() -> None:
    assert attached.beyond([(3.0, 2.0), (4.0, 2.5)], (1.0, 0.5)) == (5.0, 3.5)


def test_processes_take_turns() -> None:
    """One set of three processes, two rounds: a plan with nothing to do is there, or its process ends with an error."""
    row: dict[str, Any] = attached.at_rest("resnet50", rounds=2, sets=1, steps=1)
    assert len(row["ratios_of_sets"]["attached"]) == 1 and row["steps"] == 1
    assert all(ratio > 0.2 for pair in row["ratios"].values() for ratio in pair)
