"""The lines of a run: each once, and in words that its user knows."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from lightning_memopt import optimize
from lightning_memopt.logs import LOGGER
from tests.cpu.lib.said import Said

OBSERVING = "MemOpt: observing 1 step on cpu"


def layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    return model, torch.optim.Adam(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 64) -> None:
    model(torch.randn(rows, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_that_is_begun_often_is_announced_once(said: Said) -> None:
    """Forwards that raise, or that belong to a step of two shapes, give the observed step up, and it begins again."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1):
        for _ in range(8):
            with pytest.raises(RuntimeError):
                model(torch.randn(64, 15))
        assert said.taken().count(OBSERVING) == 1
        for _ in range(8):
            (model(torch.randn(64, 16)).mean() + model(torch.randn(32, 16)).mean()).square().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert said.taken().count(OBSERVING) <= 2, "one for each shape"


@pytest.mark.filterwarnings("ignore:MemOpt. batches of ever new shapes")
def test_many_shapes_are_not_announced_for_ever(said: Said) -> None:
    """The last line says that no other comes."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1):
        for rows in range(8):
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    model(torch.randn(64 + rows, 15))
    lines = [line for line in said.taken().splitlines() if line.startswith(OBSERVING)]
    assert lines == [*[OBSERVING] * 3, f"{OBSERVING}; later ones, for batches of other shapes, are not announced"]


@pytest.mark.parametrize("budget", ["min", "300KiB", "1MiB"])
def test_solvers_are_named_to_those_who_ask(said: Said, budget: str) -> None:
    solvers = re.compile(r"chain|stages|levels|local search|minimum cut|Echo|keep all")
    for level in (logging.INFO, logging.DEBUG):
        LOGGER.setLevel(level)
        model, optimizer = layers()
        with optimize(model, optimizer, budget=budget, profile_steps=1) as run:
            for _ in range(3):
                step(model, optimizer)
            table = run.report()
        text = said.taken()
        assert text.count("MemOpt: plan in force: predicted peak") == 1 and "solved in" in table
        assert bool(solvers.search(text)) == (level == logging.DEBUG) and not solvers.search(table.partition("kept")[0])
        assert f"the plan is by {run.status().plan.solver}\n" in text or level == logging.INFO  # type: ignore[union-attr]


def test_a_run_that_is_not_verbose_is_silent(said: Said) -> None:
    LOGGER.setLevel(logging.DEBUG)
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False):
        for _ in range(3):
            step(model, optimizer)
    assert said.taken() == ""
