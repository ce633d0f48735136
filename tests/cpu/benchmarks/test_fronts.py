"""Loops by every front end with the bits of the same loop without us, within their budgets; and the benchmark that says so.

`python -m benchmarks fronts` runs all models, precisions and variants; here are some for each front that owns a loop.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.cpu.lib.selected import selected

pytest.importorskip("transformers")

from benchmarks.lib.paths import ROOT
from benchmarks.robustness import loops_count
from benchmarks.robustness.front_case import Case
from benchmarks.robustness.fronts import FILE, FRONT_NEEDS, FRONTS, Row, line_of, missing, page, script_of
from benchmarks.robustness.worker import ask

CASES = (
    *("accelerate/vit/bf16/accumulation", "accelerate/resnet/fp32/clipping", "accelerate/lora_llama/bf16/schedule"),
    *("accelerate/gpt2/fp32/average", "accelerate/t5/bf16/from plain", "accelerate/gpt2/fp32/to plain"),
    *("fabric/gpt2/bf16/accumulation", "fabric/resnet/fp32/average", "fabric/gpt2/fp32/clipping"),
    *("fabric/gpt2/bf16/schedule", "fabric/resnet/fp32/from plain", "fabric/gpt2/bf16/to plain"),
    *("transformers/gpt2/bf16/accumulation", "transformers/t5/bf16/schedule", "transformers/vit/bf16/clipping"),
    *("transformers/resnet/fp32/average", "transformers/gpt2/fp32/from plain", "transformers/lora_llama/bf16/to plain"),
)
"""Front, model, precision, variant. The ResNet is not here in bfloat16: without instructions for it, the workspace of one
convolution outweighs all that so small a model saves.
"""


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Row]:
    """What came of the cases that are asked about: each is trained plainly, and within half of what a step has on top of what
    is resident.
    """
    found: dict[str, Row] = {}
    there = []
    for name in CASES:
        if not selected(request, "name", name):
            continue
        front, model, precision, variant = name.split("/")
        if missing(script_of(front, Case(model, precision, variant))) is None:
            there.append(name)
    ask("benchmarks.robustness.fronts", there, 1, found.__setitem__, 300.0)
    return found


@pytest.mark.skipif(loops_count.built() is None, reason="needs a compiler")
@pytest.mark.parametrize("name", CASES)
def test_a_loop_has_the_bits_of_the_plain_one_within_its_budget(name: str, rows: dict[str, Row]) -> None:
    """Of losses, parameters, buffers, averages, optimizer state and generators; peaks are counted outside of the package."""
    if name not in rows:
        pytest.skip("a package of the front or of the model is not installed")
    row = rows[name]
    assert row["faults"] == [] and row["exact"] and row["over"] <= 0 and row["dropped"] > 0, row


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
