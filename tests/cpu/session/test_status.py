"""`status()`: what became of a run, in every phase, as data that does not change; `Run` and the strategy forward it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import MemOptConfig, MemOptStrategy, RunStatus, Session, optimize
from lightning_memopt.errors import ConfigError
from lightning_memopt.plan import read_plan
from lightning_memopt.report.table import summary
from tests.cpu.lib.fits import fit, memopt
from tests.cpu.lib.loops import QUIET, batches, sgd, small, train


class Changing(nn.Module):
    """Another forward every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(20))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        ops = (torch.sin, torch.cos, torch.exp, torch.tanh, torch.sigmoid, torch.relu)
        for layer in self.layers[: 1 + self.count % 3]:
            x = ops[self.count % len(ops)](layer(x))
        return x


def test_phases_of_a_run() -> None:
    """waiting, observing, planned: each with what is known by then; what was asked for earlier stays as it was."""
    model = small()
    optimizer = sgd(model)
    with optimize(model, optimizer, **(QUIET | {"budget": "min", "profile_steps": 2})) as run:
        waiting = run.status()
        train(model, optimizer, batches(1))
        observing = run.status()
        train(model, optimizer, batches(4))
        planned = run.status()
    assert waiting == waiting and (waiting.phase, waiting.plan, waiting.budget_nbytes) == ("waiting", None, None)
    assert (observing.phase, observing.observed_steps, observing.profile_steps) == ("observing", 1, 2)
    assert planned.phase == "planned" and planned.plan is run.plan and planned.reason is None and not planned.deviates
    assert planned.frontier is not None and planned.graph is planned.frontier.graph and planned.replans == 0
    assert planned.predicted_peak_nbytes is not None and planned.unmodified_peak_nbytes is not None
    assert planned.predicted_peak_nbytes < planned.unmodified_peak_nbytes
    assert planned.measured_peak_nbytes == pytest.approx(planned.predicted_peak_nbytes, rel=0.01)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.phase = "off"  # type: ignore[misc]
    assert run.status().plan is planned.plan  # also after the block


def test_a_run_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    model = small()
    with optimize(model, sgd(model), budget="min", verbose=False) as run:
        train(model, sgd(model), batches(2))
    assert run.status().phase == "off" and summary(run.status()).startswith("MemOpt: off")


def test_a_run_that_gets_no_plan() -> None:
    """unplanned, with the reason that the table says too."""
    model = Changing()
    optimizer = sgd(model)
    options = QUIET | {"budget": "min", "profile_steps": 2}
    with optimize(model, optimizer, **options) as run, pytest.warns(match="another one"):
        for seed in range(12):
            model(torch.full((4, 16), float(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    status = run.status()
    assert status.phase == "unplanned" and status.plan is None and status.reason is not None
    assert status.reason in summary(status)


def test_why_there_is_no_plan_yet() -> None:
    """The reason and the remedy of the line that was said: here, that no call is seen."""
    model = small()
    optimizer = sgd(model)
    with optimize(model, optimizer, **(QUIET | {"budget": "min", "profile_steps": 1})) as run:
        with pytest.warns(match="there is no plan yet"):
            for batch in batches(8):
                model.embed.weight[batch[0]].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    status = run.status()
    assert status.phase == "waiting" and status.reason is not None and status.remedy is not None
    assert f"because {status.reason}. {status.remedy}." in summary(status)


def test_the_strategy_forwards_it(tmp_path: Path) -> None:
    """Before a fit, and after it, when the session is closed; a plan is saved then, too."""
    strategy = memopt()
    assert strategy.status().phase == "waiting"
    with pytest.raises(ConfigError, match=r"trainer\.fit"):
        strategy.save_plan(str(tmp_path / "plan.json"))
    fit(strategy)
    status = strategy.status()
    assert status.phase == "planned" and status.plan is not None and status.measured_peak_nbytes is not None
    strategy.save_plan(str(tmp_path / "plan.json"))
    plan, graph = read_plan(tmp_path / "plan.json")
    assert plan.lives == status.plan.lives and len(graph.ops) == len(status.graph.ops)  # type: ignore[union-attr]


def test_a_run_saves_its_plan(tmp_path: Path) -> None:
    """A plan can be saved as soon as there is one. A run that takes it by `plan=` has no frontier, and its status says so."""
    file = str(tmp_path / "plan.json")
    model = small()
    optimizer = sgd(model)
    with optimize(model, optimizer, **(QUIET | {"budget": "min", "profile_steps": 1})) as run:
        with pytest.raises(ConfigError, match="no plan yet"):
            run.save_plan(file)
        train(model, optimizer, batches(2))
        run.save_plan(file)
    with optimize(model, optimizer, **(QUIET | {"budget": "min", "plan": file})) as again:
        train(model, optimizer, batches(2))
        assert again.status().phase == "planned" and again.status().frontier is None


def test_transfers_are_counted() -> None:
    model = small(width=64, depth=6)
    optimizer = sgd(model)
    options: dict[str, Any] = {"budget": "min", "profile_steps": 1, "offload": "disk"}
    with optimize(model, optimizer, **(QUIET | options)) as run:
        train(model, optimizer, batches(4, size=96))
        transfers = run.session.transfers()
    assert transfers is not None and run.plan is not None
    assert transfers.forwards == 3 and transfers.moved_nbytes == 3 * run.plan.predicted.moved_nbytes
    assert transfers.forwards >= transfers.timed > 0 and transfers.copied_seconds > 0


def test_a_session_of_ones_own() -> None:
    """The status is the same when a session is driven by hand."""
    model = small()
    session = Session(model, [sgd(model)], MemOptConfig(budget="min", verbose=False))
    try:
        assert isinstance(session.status(), RunStatus) and session.status().phase == "waiting"
    finally:
        session.close()
    assert isinstance(MemOptStrategy(config=session.config).status(), RunStatus)
