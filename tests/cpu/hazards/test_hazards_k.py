"""Budgets, planning and plan files, as the fronts meet them. The reader's own cases are in tests/null."""

from __future__ import annotations

import gc
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.device.cpu import Cpu
from lightning_memopt.errors import BudgetError, InfeasibleError, PlanFileError, PlanMismatchError
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import assert_same, batches, installed, loss_of, sgd, small, state, train

QUIET: dict[str, Any] = dict(verbose=False, profile_steps=1)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the smallest plan of `small()`."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(2))
        run.save_plan(path)  # type: ignore[arg-type]
    return path


def test_k1_infeasible_names_the_smallest() -> None:
    """K1: a budget below the smallest plan names that plan's bytes; a budget of those bytes works, one below them does not.

    Times are measured anew in every run, and which plans are in the pool depends a little on them: hence the margins.
    """
    model = small(dropout=0.0)
    with pytest.raises(InfeasibleError) as caught, optimize(model, o := sgd(model), budget=20_000, **QUIET):
        train(model, o, batches(3))
    smallest = caught.value.smallest_nbytes
    assert smallest is not None and str(smallest) in str(caught.value) and "20000" in str(caught.value)
    assert installed()[:2] == [None, []]
    del caught, o  # what the error refers to is in memory, too
    gc.collect()
    model = small(dropout=0.0)
    with optimize(model, o := sgd(model), budget=smallest * 21 // 20, on_exceed="raise", **QUIET) as run:
        train(model, o, batches(3))
        assert run.plan is not None and run.plan.predicted_peak_nbytes <= smallest * 21 // 20
    model = small(dropout=0.0)
    with pytest.raises(InfeasibleError), optimize(model, o := sgd(model), budget=smallest * 9 // 10, **QUIET):
        train(model, o, batches(3))


def test_k2_p32_time_limit() -> None:
    """K2: with no time to solve there is still a plan, at worst the unmodified step, and the bits are the plain run's."""
    model = small()
    train(model, sgd(model), batches(3))
    expected = state(model)
    model = small()
    with optimize(model, o := sgd(model), budget="auto", solver_seconds=1e-9, **QUIET) as run:
        train(model, o, batches(3))
        assert run.plan is not None
    assert_same(expected, state(model))


@pytest.mark.parametrize("budget", ["10Gbit", "1 G", "-1GB", "0", 0, -5, float("nan"), 1.5, None, True, "120%", "1e9", [1]])
def test_k3_unreadable_budgets(budget: Any) -> None:
    """K3: what is not an amount of bytes is refused when the block is entered, with the budget in the message."""
    model = small()
    with pytest.raises(BudgetError, match="budget"), optimize(model, sgd(model), budget=budget):
        pass


def test_k4_other_programs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """K4: a budget above what other programs leave free is lowered to that, with a warning that has both numbers."""
    monkeypatch.setattr(Cpu, "free_nbytes", lambda self: 123_456_789)
    model = small()
    with pytest.warns(UserWarning, match="234567890 bytes.*123456789 bytes"):
        with optimize(model, sgd(model), budget=234_567_890, **QUIET) as run:
            assert run.session.budget_nbytes == 123_456_789


def test_k6_p8_never_worse_than_the_plain_step() -> None:
    """K6: where the unmodified step fits, nothing is run again and nothing is recorded any more."""
    model = small()
    with optimize(model, o := sgd(model), budget="90%", **QUIET) as run:
        train(model, o, batches(3))
        found = state_of(run)
        assert isinstance(found, Running) and found.plan.predicted.rebuilt_ops == 0
        assert found.plan.predicted_peak_nbytes <= found.plan.unmodified_peak_nbytes
        seen: list[Any] = []
        model.register_forward_pre_hook(lambda *_: seen.extend(installed()[:2]))
        loss_of(model, batches(1)[0])
        assert seen == [None, []]


@pytest.mark.parametrize("other", ["deeper", "shallower", "wider", "batch"])
def test_k7_plan_of_another_model(plan: Path, other: str) -> None:
    """K7: a plan for another model or batch is refused in the first forward, by op, before anything was updated."""
    build = {"deeper": dict(depth=4), "shallower": dict(depth=2), "wider": dict(width=48), "batch": {}}[other]
    model = small(**build)
    before = state(model)
    del before["norm.running_mean"], before["norm.running_var"], before["norm.num_batches_tracked"]
    data = batches(2, size=17 if other == "batch" else 48)
    with pytest.raises(PlanMismatchError, match=r"another model.*at op \d+ it expects aten::"):
        with optimize(model, o := sgd(model), budget="auto", plan=plan, **QUIET):
            loss_of(model, data[0])
    after = state(model)
    assert_same(before, {name: after[name] for name in before})
    assert o.state == {} and installed()[:2] == [None, []]


def test_k7_empty_plan_of_another_model(tmp_path: Path) -> None:
    """K7: a plan that drops nothing is compared with the model all the same."""
    model = small()
    with optimize(model, o := sgd(model), budget="auto", **QUIET) as run:
        train(model, o, batches(2))
        run.save_plan(tmp_path / "keep.json")  # type: ignore[arg-type]
    model = small(depth=2)
    with pytest.raises(PlanMismatchError), optimize(model, o, budget="auto", plan=tmp_path / "keep.json", **QUIET):
        loss_of(model, batches(1)[0])
    model = small()
    with optimize(model, o := sgd(model), budget="auto", plan=tmp_path / "keep.json", **QUIET) as run:
        train(model, o, batches(3))
        assert run.status().phase == "planned" and state_of(run).drift.matched


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_k11_a_pickle_is_no_plan(tmp_path: Path) -> None:
    """K11: a plan file that is a pickle, or a torch file, is refused and none of its code runs."""
    trap = tmp_path / "trap"
    (tmp_path / "plan.json").write_bytes(pickle.dumps(_Payload(trap)))
    torch.save({"plan": _Payload(trap)}, tmp_path / "plan.pt")
    for name in ("plan.json", "plan.pt"):
        model = small()
        with pytest.raises(PlanFileError), optimize(model, sgd(model), plan=tmp_path / name):
            pass
    assert not trap.exists()


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "", "\0"])
def test_k12_hostile_json(tmp_path: Path, text: str) -> None:
    """K12: JSON that breaks readers is refused cleanly, when the block is entered."""
    (tmp_path / "plan.json").write_text(text)
    model = small()
    with pytest.raises(PlanFileError, match=r"plan\.json"), optimize(model, sgd(model), plan=tmp_path / "plan.json"):
        pass


def test_k13_saved_plans_are_private(plan: Path) -> None:
    """K13: a plan that a run saves is readable by its owner only, and no temporary file stays beside it."""
    assert stat.S_IMODE(plan.stat().st_mode) == 0o600
    assert [p.name for p in plan.parent.iterdir()] == ["plan.json"]
