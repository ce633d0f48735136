"""A Fabric loop within a plan ends with the state of the same loop without us, and keeps its budget as measured."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from tests.cpu.lib import fabrics
from tests.cpu.lib.fabrics import SAVED_AT, STEPS, assert_same, fabric_of, middle, train, within
from tests.cpu.lib.loops import leaves_nothing

KINDS = ("plain", "accumulation", "clipping", "schedule", "ema")
CASES = [
    *((name, precision, kind) for name, precision in (("gpt2", "32-true"), ("convolutions", "bf16-mixed")) for kind in KINDS),
    *(("gpt2", "bf16-mixed", "plain"), ("convolutions", "32-true", "plain")),
]
"""Each kind of loop with each model and with each precision, and each model with each precision."""


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    gc.collect()  # loops before would count in a budget


def build_of(name: str) -> Any:
    if name == "gpt2":
        pytest.importorskip("transformers")
    return getattr(fabrics, name)


def assert_kept(fabric: Any, left: dict[str, Any], budget: int) -> None:
    """A plan that rebuilds was in force; its measured peak is within the budget and as predicted."""
    status = fabric.strategy.run(left["wrapper"]).status()
    assert status.phase == "planned" and status.plan.predicted.rebuilt_ops > 0
    assert status.measured_peak_nbytes <= budget
    predicted = status.plan.predicted_peak_nbytes
    assert abs(status.measured_peak_nbytes - predicted) <= 0.01 * predicted


@pytest.mark.parametrize(("name", "precision", "kind"), CASES)
def test_same_state(name: str, precision: str, kind: str) -> None:
    """Parameters, buffers, optimizer state, losses, norms, averaged weights and generator are bit-equal; the budget is kept."""
    build = build_of(name)
    expected = train(fabric_of("auto", precision=precision), build, kind)
    expected.pop("wrapper")
    needs_as_much = {"clipping": "plain", "schedule": "plain"}
    budget = middle(build, needs_as_much.get(kind, kind), precision=precision)
    with leaves_nothing():
        fabric = fabric_of(within(budget), precision=precision)
        left = train(fabric, build, kind)
        assert_kept(fabric, left, budget)
        fabric.strategy.close()  # type: ignore[attr-defined]
    assert_same(expected, left)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["gpt2", "convolutions"])
def test_resumed_from_the_plain_run_and_back(name: str, precision: str, tmp_path: Path) -> None:
    """What one loop saves the other loads, in both directions: both go on as the uninterrupted plain run."""
    build = build_of(name)
    whole = train(fabric_of("auto", precision=precision), build, "plain")
    for first, second in (("auto", within()), (within(), "auto")):
        train(fabric_of(first, precision=precision), build, "plain", last=SAVED_AT, folder=tmp_path)
        resumed = train(fabric_of(second, precision=precision), build, "plain", first=SAVED_AT, folder=tmp_path)
        resumed["losses"] = [*whole["losses"][:SAVED_AT], *resumed["losses"]]
        assert len(resumed["losses"]) == STEPS
        assert_same(whole, resumed)
