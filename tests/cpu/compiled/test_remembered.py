"""A second run with the same regions and the same budget compiles them once, with the plans of the first run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.plan import read_plan
from lightning_memopt.session.regions import remembered
from tests.cpu.compiled.training import Residual, counted, losses_of

STEPS = 9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    counted()
    monkeypatch.delenv("MEMOPT_CACHE", raising=False)
    monkeypatch.setattr(remembered, "cache", lambda: tmp_path)
    return tmp_path / "regions"


def train(
    budget: Any, lines: list[str], saved: Path | None = None, plan: str | None = None
) -> tuple[list[float], Any, int, int]:
    """Losses, the status, the step after which the plan was in force, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = Residual()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    call = torch.compile(net, backend="aot_eager")
    torch.manual_seed(1)
    phases: list[str] = []
    with optimize(net, optimizer, budget=budget, plan=plan, profile_steps=1, solver_seconds=2, verbose=False) as run:
        run.session.say = lines.append
        losses = losses_of(call, optimizer, STEPS, after=lambda _: phases.append(run.status().phase))
        if saved is not None:
            run.save_plan(str(saved))
        planned_after = phases.index("planned") + 1 if "planned" in phases else 0
        return losses, run.status(), planned_after, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def budget_at(share: float) -> int:
    """The peak of the smallest plan, and this share of what it saves: what the process holds from other tests is in both."""
    smallest, unmodified = (train(budget, [])[1].measured_peak_nbytes for budget in ("min", "1GiB"))
    return int(smallest + share * (unmodified - smallest))


def test_a_second_run_compiles_once(folder: Path) -> None:
    budget, lines = budget_at(0.25), []
    losses, first, after, graphs = train(budget, [])
    assert graphs > 1
    again_losses, second, again_after, again_graphs = train(budget, lines)
    assert again_graphs == 1 and again_after < after
    assert any("1 of 1 compiled regions have plans of an earlier run" in line for line in lines), lines
    assert (second.measured_peak_nbytes, second.compiled) == (first.measured_peak_nbytes, first.compiled)
    assert again_losses == losses


def first_run(budget: Any, folder: Path) -> Path:
    """The file that a first run with this budget writes."""
    before = set(folder.iterdir()) if folder.exists() else set()
    train(budget, [])
    (file,) = set(folder.iterdir()) - before
    return file


@pytest.mark.long
@pytest.mark.parametrize("text", ["{", "[]", '{"lives": [[0, 5, 3, "rebuild"]]}', "lives of nothing"])
def test_a_file_that_is_no_plan_is_replaced(text: str, folder: Path) -> None:
    budget = budget_at(0.25)
    file = first_run(budget, folder)
    written = file.read_text()
    file.write_text(json.dumps(json.loads(written) | {"lives": []}) if text == "lives of nothing" else text)
    status = train(budget, [])[1]
    assert status.measured_peak_nbytes <= budget and "run ops again" in status.compiled
    assert json.loads(file.read_text())["lives"]


def test_plans_that_are_too_large_are_left(folder: Path) -> None:
    large, small = budget_at(0.75), budget_at(0.1)
    of_large, of_small = (first_run(budget, folder) for budget in (large, small))
    of_small.write_text(of_large.read_text())
    lines: list[str] = []
    status = train(small, lines)[1]
    assert any("do not keep the budget by the plans of an earlier run" in line for line in lines), lines
    assert status.measured_peak_nbytes <= small
    assert of_small.read_text() != of_large.read_text()


def test_it_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    train("min", [])
    assert not folder.exists()


def test_a_given_plan_compiles_regions_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted()
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    path = tmp_path / "plan.json"
    losses, first, _, graphs = train("min", [], saved=path)
    plan, _ = read_plan(path)
    (region,) = plan.regions
    assert graphs > 1 and region.lives and region.rebuilt_ops and first.plan.regions == plan.regions
    again_losses, second, again_after, again_graphs = train("1GiB", [], plan=str(path))
    assert (again_after, again_graphs) == (1, 1)
    assert (second.measured_peak_nbytes, second.compiled) == (first.measured_peak_nbytes, first.compiled)
    assert again_losses == losses
