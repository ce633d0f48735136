"""The benchmark of the fronts: its page is made of its results, its runs log and resume as they say, and a fault is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.lib.paths import ROOT
from benchmarks.robustness.front_case import Case
from benchmarks.robustness.fronts import FILE, FRONT_NEEDS, FRONTS, line_of, page


def test_the_page_is_that_of_the_results() -> None:
    results = json.loads(FILE.read_text())
    assert (ROOT / "docs/measurements/fronts.md").read_text() == page(results)
    assert not [name for name, row in results["cases"].items() if row["faults"]]


def test_a_fault_is_told() -> None:
    results = json.loads(FILE.read_text())
    name, row = next(iter(results["cases"].items()))
    row["faults"], row["exact"] = ["not exact"], False
    assert "1 not exact" in page(results) and f"| {name} | not exact" in page(results)
    assert "not exact" in line_of(name, row)


class Nothing:
    """No package around any front."""

    def __call__(self, model: Any, optimizer: Any) -> Any:
        return torch.enable_grad()

    def strategy(self) -> Any:
        return "auto"

    def callbacks(self) -> list[Any]:
        return []

    def fabric_strategy(self) -> Any:
        return "auto"

    def prepare(self, accelerator: Any, *objects: Any) -> Any:
        return accelerator.prepare(*objects)


@pytest.mark.parametrize("front", FRONTS)
def test_resumed_runs(front: str) -> None:
    """Two runs with a checkpoint between them log as many steps as one. A loop that loads what it saved also logs the same
    losses; Accelerate and the Trainers draw other numbers for dropout or for the order of batches when they resume.
    """
    for package in FRONT_NEEDS.get(front, ()):
        pytest.importorskip(package)
    if "accelerate.accelerator" in FRONT_NEEDS.get(front, ()):  # the benchmark runs each front in a process of its own
        state = pytest.importorskip("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process otherwise
    logged: dict[str, list[Any]] = {"plain": [], "from plain": []}
    for variant, lines in logged.items():
        FRONTS[front](Case("vit", "fp32", variant, steps=4), Nothing(), lambda *values, to=lines: to.append(values))
    assert len(logged["plain"]) == 4 == len(logged["from plain"])
    assert logged["plain"][:2] == logged["from plain"][:2]
    assert front not in ("plain", "fabric") or logged["plain"] == logged["from plain"]
