"""`recompute=False`: budgets kept by a disk, codecs and updates in backward alone; no op of the forward runs twice."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt import optimize
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.integrations.plain import Run
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.early import OPTIMIZERS, counted
from tests.cpu.lib.early import plain as marked_loop
from tests.cpu.lib.fits import assert_same_tree
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import QUIET, assert_same, batches, counted_nbytes, sgd, state, train
from tests.cpu.lib.models import data, made
from tests.cpu.lib.said import Said
from tests.cpu.session.test_offloading import plain, trained, wide

STEPS = 6
AWAY: dict[str, Any] = {"offload": "disk", "recompute": False}


class _Draws(TorchDispatchMode):
    """Counts dropouts: an op that runs again while autograd runs is seen here too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += "bernoulli" in str(func) or "native_dropout" in str(func)
        return func(*args, **(kwargs or {}))


def main(run: Run) -> Running:
    assert run.status().phase == "planned"
    return state_of(run)


@cache
def _smallest(options: tuple[tuple[str, Any], ...]) -> int:
    held = counted_nbytes()
    run, *_ = trained(wide(), budget="min", **dict(options))
    assert run.plan is not None
    return run.plan.predicted.needed_nbytes - held


def smallest(**options: Any) -> int:
    """The smallest budget of plans with these options, beside what the process holds."""
    return _smallest(tuple(sorted(options.items())))


@pytest.mark.parametrize("options", [{"compress": "none"}, {"compress": "lossless"}], ids=["disk", "disk, lossless"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_budget_is_kept_without_rebuilding(options: dict[str, Any], share: float) -> None:
    """EXACT with budgets that need half of what a disk can save, and all of it."""
    least, whole = smallest(**AWAY, **options), smallest(recompute=False)
    assert least < whole
    expected, expected_losses = plain(wide())
    budget = counted_nbytes() + int(least + share * (whole - least)) + 8192
    run, ended, losses = trained(wide(), budget=budget, **AWAY, **options)
    assert_same(expected, ended)
    assert all(torch.equal(a, b) for a, b in zip(expected_losses, losses, strict=True))
    plan, measured = main(run).plan, main(run).peaks.measured_nbytes
    assert {life.how for life in plan.lives} == {"original", "fetch"} and plan.predicted.rebuilt_ops == 0
    assert measured is not None and measured <= budget
    assert measured == pytest.approx(plan.predicted.needed_nbytes, rel=0.002)


def test_nothing_runs_twice() -> None:
    """Nothing runs twice in observed steps, near whose end the budget would evict, or in planned ones: as many random ops run
    as plainly.
    """
    least = smallest(**AWAY)
    counts = []
    for options in (None, {"budget": counted_nbytes() + least + 8192, **AWAY}):
        model = wide()
        optimizer = sgd(model)
        with _Draws() as draws:
            if options is None:
                train(model, optimizer, batches(STEPS, size=96))
            else:
                with optimize(model, optimizer, **(QUIET | options)) as run:
                    train(model, optimizer, batches(STEPS, size=96))
                assert main(run).plan.predicted.moved_nbytes
        counts.append(draws.count)
    assert counts[0] == counts[1] > 0


def refused(budget: int) -> int:
    """The budget that InfeasibleError names, which is raised before the first update."""
    model = wide()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = sgd(model)
    try:
        with optimize(model, optimizer, budget=budget, **(QUIET | AWAY)):
            train(model, optimizer, batches(STEPS, size=96))
    except InfeasibleError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert error.smallest_nbytes is not None
        return error.smallest_nbytes
    raise AssertionError(f"no InfeasibleError with {budget} bytes")


def test_a_budget_that_they_cannot_keep() -> None:
    """InfeasibleError in the first step, before it updates; the budget that it names works."""
    named = refused(counted_nbytes() + 600_000)
    run, *_ = trained(wide(), budget=named, **AWAY)
    measured = main(run).peaks.measured_nbytes
    assert measured is not None and measured <= named
    budget = counted_nbytes() + smallest(recompute=False) - 50_000
    with pytest.raises(InfeasibleError):  # and without any way to keep it the unmodified step is the smallest
        trained(wide(), budget=budget, recompute=False)


def test_without_any_way_the_step_is_the_unmodified_one(said: Said) -> None:
    """A line says what would lower its peak."""
    expected, _ = plain(wide())
    run, ended, _ = trained(wide(), budget="min", recompute=False, verbose=True)
    assert_same(expected, ended)
    assert main(run).plan.predicted_peak_nbytes == main(run).plan.unmodified_peak_nbytes
    text = said.taken()
    assert "no plan is smaller than the unmodified step" in text and "recompute=True" in text
    assert "no op of this step runs again" in run.text  # type: ignore[attr-defined]


def test_lossy_plans_do_not_rebuild() -> None:
    """Inputs of linear layers at 8 bits a value, without a disk: a smaller peak. They outweigh a codec's workspace."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(128, 128), nn.ReLU())))
    optimizer = sgd(model)
    held = counted_nbytes()
    options = {"budget": "min", "max_slowdown": math.inf, "compress": "lossy", "recompute": False}
    with optimize(model, optimizer, **options | QUIET) as run:
        marked_loop(model, run, optimizer, [data(512, 128, seed=s) for s in range(STEPS)])
    plan = main(run).plan
    assert plan.predicted.rebuilt_ops == 0
    assert plan.predicted_peak_nbytes - held < 0.8 * (plan.unmodified_peak_nbytes - held)


def test_updates_in_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXACT: parameters are updated early, in steps that rebuild nothing and peak below those that update at the end."""
    updates = counted(monkeypatch)
    ends, peaks = [], []
    for mode in (None, "never", "always"):
        model = made(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        options: dict[str, Any] = dict(budget="min", recompute=False, profile_steps=1, verbose=False)
        held = counted_nbytes()
        with (
            contextlib.nullcontext()
            if mode is None
            else optimize(model, optimizer, optimizer_in_backward=mode, **options) as run
        ):
            marked_loop(model, run, optimizer, [data(4, 128, seed=s) for s in range(5)])
        ends.append([model.state_dict(), optimizer.state_dict()])
        if run is not None:
            assert main(run).plan.predicted.rebuilt_ops == 0
            peaks.append(main(run).plan.predicted_peak_nbytes - held)
    assert_same_tree(ends[0], ends[1])
    assert_same_tree(ends[0], ends[2])
    assert updates and peaks[1] < peaks[0]


@pytest.mark.filterwarnings("error:.*left the plan")
def test_updates_in_backward_with_running_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXACT: forwards run as planned, although the observed step already knew that none of its ops would run again."""
    updates = counted(monkeypatch)
    ends = []
    for attach in (False, True):
        model = made(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.BatchNorm1d(64), nn.Linear(64, 64)))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        options: dict[str, Any] = dict(budget="min", optimizer_in_backward="always", profile_steps=1, verbose=False, **AWAY)
        with optimize(model, optimizer, **options) if attach else contextlib.nullcontext() as run:
            marked_loop(model, run, optimizer, [data(64, 64, seed=s) for s in range(STEPS)])
        ends.append([model.state_dict(), optimizer.state_dict()])
    assert_same_tree(*ends)
    assert updates and run is not None and main(run).drift.matched and not main(run).drift.deviated


def test_a_plan_file_that_rebuilds_is_refused(tmp_path: Path) -> None:
    """Refused by name, before anything runs. A plan that only moves tensors is accepted."""
    rebuilds, moves = tmp_path / "rebuilds.json", tmp_path / "moves.json"
    run, *_ = trained(wide(), budget="min")
    run.save_plan(str(rebuilds))
    run, expected, _ = trained(wide(), budget="min", **AWAY)
    run.save_plan(str(moves))
    with pytest.raises(ConfigError, match="recompute=False allows none"):
        trained(wide(), plan=rebuilds, recompute=False)
    run, ended, _ = trained(wide(), plan=moves, **AWAY)
    assert main(run).plan.predicted.moved_nbytes
    assert_same(expected, ended)


def test_other_sizes_borrow_plans_that_do_not_rebuild() -> None:
    """EXACT: batches of several sizes, each in a plan of its own or one lent to it."""
    sizes = [96, 64, 96, 64, 80, 96, 48, 96]

    def ended(**options: Any) -> dict[str, Tensor]:
        model = wide()
        optimizer = sgd(model)
        data = [batch for i, size in enumerate(sizes) for batch in batches(1, size=size, seed=i)]
        if not options:
            train(model, optimizer, data)
            return state(model)
        with optimize(model, optimizer, **(QUIET | options)) as run:
            train(model, optimizer, data)
        states = [s for s in states_of(run).values() if isinstance(s, Running)]
        assert states and not any(s.plan.predicted.rebuilt_ops for s in states)
        return state(model)

    assert_same(ended(), ended(budget="min", **AWAY))
