"""The lines of a run: each once, and in words that its user knows."""

from __future__ import annotations

import gc
import logging
import re
import weakref

import pytest
import torch
from torch import nn

from lightning_memopt import MemOptConfig, logs, optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.logs import LOGGER
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.solve.solving import chosen
from lightning_memopt.units import format_nbytes, parse_budget
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import counted_nbytes
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
    """The last line says that it is the last one."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1):
        for rows in range(8):
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    model(torch.randn(64 + rows, 15))
    lines = [line for line in said.taken().splitlines() if line.startswith(OBSERVING)]
    assert lines == [*[OBSERVING] * 3, f"{OBSERVING}; later ones, for batches of other shapes, are not announced"]


@pytest.mark.parametrize("budget", ["min", 300 << 10, 1 << 20])
def test_solvers_are_named_to_those_who_ask(said: Said, budget: str | int) -> None:
    solvers = re.compile(r"chain|stages|levels|local search|minimum cut|Echo|keep all")
    for level in (logging.INFO, logging.DEBUG):
        LOGGER.setLevel(level)
        within = budget if isinstance(budget, str) else budget + counted_nbytes()
        model, optimizer = layers()
        with optimize(model, optimizer, budget=within, profile_steps=1) as run:
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


def test_a_refusal_calls_bytes_what_they_are() -> None:
    """What a step needs is told from what else the program holds, and one number is named, with what it includes."""
    model, optimizer = layers()
    others = torch.ones(300_000)
    batch = torch.randn(64, 16)
    with (
        pytest.raises(InfeasibleError) as refused,
        optimize(model, optimizer, budget=counted_nbytes() + 10_000, headroom=5000, profile_steps=1, verbose=False),
    ):
        model(batch).square().mean().backward()
        optimizer.step()
    text, smallest = str(refused.value), refused.value.smallest_nbytes
    assert smallest is not None and text.count(str(smallest)) == 1
    assert f"Set budget={smallest} or more ({format_nbytes(smallest)})" in text
    parameters = format_nbytes(sum(p.nbytes for p in model.parameters()))
    held = text.partition("In memory when a step begins: ")[2].partition(". Nothing was updated")[0]
    words = [part.split(" ") for part in held.split(", ")]
    named = {" ".join(name): f"{number} {unit}" for *name, number, unit in words}
    assert named["parameters"] == parameters and named["the batch"] == format_nbytes(batch.nbytes)
    assert "optimizer state" in named
    assert parse_budget(named["other tensors that the program holds"].replace(" ", ""), 1 << 62) >= others.nbytes * 0.99


def test_temporaries_of_backward_are_no_gradients() -> None:
    """The temporaries for these rows are 32 times as large as all weights."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
        for _ in range(3):
            step(model, optimizer, rows=4096)
    status = run.status()
    assert status.plan is not None and status.graph is not None
    found = at_peak(status.graph, status.plan.lives).by(1)
    weights = sum(p.nbytes for p in model.parameters())
    assert found["gradients"] <= weights and found["in use"] > 16 * 4096 * 4


@pytest.mark.parametrize("headroom", [0, 10_000])
def test_the_number_for_a_step_above_the_smallest_plan_keeps_that_step(headroom: int) -> None:
    """Like the number of a refusal, the budget that is named has room for what was measured, and for the headroom."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", headroom=headroom, profile_steps=1, verbose=False) as run:
        for _ in range(3):
            step(model, optimizer)
        state = state_of(run)
    assert isinstance(state, Running)
    peak = state.plan.predicted.needed_nbytes + 50_000
    with pytest.warns(UserWarning, match="no smaller plan exists") as caught:
        state.measured(peak, None, peak - 40_000, MemOptConfig(headroom=headroom), logs.silent)
    assert f"Set budget={peak + headroom} or more ({format_nbytes(peak + headroom)})." in str(caught[0].message)


def test_what_is_freed_before_the_peak_is_not_added_to_a_prediction() -> None:
    """A step that began with more (the retained graph of the step before) took what was predicted: the number stays."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
        for _ in range(3):
            step(model, optimizer)
        state = state_of(run)
    assert isinstance(state, Running)
    peak, base = state.plan.predicted.needed_nbytes, resident_nbytes(state.program.graph)
    with pytest.warns(UserWarning, match="no smaller plan exists") as caught:
        after = state.measured(peak, base + 70_000, peak - 40_000, MemOptConfig(headroom=0), logs.silent)
    assert after is state and "more outside of the step" not in str(caught[0].message)
    replanned = state.measured(peak + 30_000, base + 70_000, peak - 40_000, MemOptConfig(headroom=0), logs.silent)
    assert isinstance(replanned, Running) and replanned.plan.predicted.needed_nbytes == peak + 30_000


def test_a_budget_that_is_not_kept_holds_nothing_of_the_program() -> None:
    """All that a training function holds is freed when it returns, even if an error was caught in a call below it."""
    model, optimizer = layers()
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
        for _ in range(3):
            step(model, optimizer)
    frontier = run.status().frontier
    assert frontier is not None
    seen: list[weakref.ref[torch.Tensor]] = []

    def train(x: torch.Tensor) -> str | None:
        seen.append(weakref.ref(x))
        return chosen(frontier, frontier.graph, frontier.smallest_nbytes - 1, MemOptConfig()).above

    gc.disable()
    try:
        assert "the budget is not kept" in (train(torch.ones(1)) or "")
        assert seen[0]() is None
    finally:
        gc.enable()
