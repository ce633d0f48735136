"""Loops of Accelerate within a plan: losses, parameters, buffers, optimizer state and generators are plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.cpu.lib import prepared
from tests.cpu.lib.launched import same
from tests.cpu.lib.loops import budget_at
from tests.cpu.lib.prepared import Loop, Outcome, trained

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": "norm", "accumulate": 2},
    "values clipped": {"clip": "value"},
    "schedule": {"schedule": True},
    "ema": {"ema": True},
}


def exact(loop: Loop, **options: Any) -> Outcome:
    """The loop at the smallest plan has the bits of the plain one."""
    plain = trained(loop)
    planned = trained(loop, **{"budget": "min"} | options)
    assert same(plain.end, planned.end)
    assert planned.run is not None and planned.run.plan is not None and planned.run.plan.predicted.rebuilt_ops > 0
    return planned


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_loops(kind: str, precision: str) -> None:
    exact(Loop(precision=precision, **KINDS[kind]))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_resuming_both_ways(precision: str, tmp_path: Path) -> None:
    """A state that the plain loop saved goes on within a plan, and the other way round."""
    folders, ends = [tmp_path / "plain", tmp_path / "planned"], []
    for folder, options in zip(folders, ({}, {"budget": "min"}), strict=True):
        saved = trained(Loop(precision=precision, schedule=True, save_at=7, steps=7, folder=folder), **options)
        assert (saved.run is not None) == bool(options)
    for folder, options in ((folders[0], {}), (folders[0], {"budget": "min"}), (folders[1], {})):
        ends.append(trained(Loop(precision=precision, schedule=True, load_at=5, folder=folder), **options).end)
    assert all(same(ends[0], end) for end in ends[1:])


@pytest.mark.parametrize("model", ["t5", "vit", "ResNet", "lora_llama"])
def test_models(model: str) -> None:
    """One of each kind; the frozen base of LoRA stays as it is."""
    if model == "lora_llama":
        pytest.importorskip("peft")
    sample = prepared.images if model in ("vit", "ResNet") else prepared.words
    exact(Loop(model=getattr(prepared, model), sample=sample, precision="bf16", clip="norm", accumulate=2))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_budget_is_kept(precision: str) -> None:
    loop = Loop(precision=precision, clip="norm", schedule=True)
    smallest = exact(loop)
    assert smallest.run is not None
    budget = budget_at(smallest.run, 0.6)
    run = trained(loop, budget=budget, profile_steps=2).run
    assert run is not None
    status = run.status()
    measured, predicted = status.measured_peak_nbytes, status.predicted_peak_nbytes
    assert measured is not None and predicted is not None and status.unmodified_peak_nbytes is not None
    assert measured <= budget < status.unmodified_peak_nbytes and abs(measured - predicted) <= 0.01 * predicted
