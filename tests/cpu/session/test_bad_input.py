"""Bad input at the fronts: refused before the first forward, with what was wrong, the numbers, and what to do."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import MemOptConfig, MemOptStrategy, Session, optimize
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import BudgetError, ConfigError, InfeasibleError, PlanFileError
from lightning_memopt.session.budget import device_of
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.loops import batches, counted_nbytes, installed, leaves_nothing, loss_of, sgd, small, state, train


class Untouched(nn.Module):
    """A model that must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the forward ran")


def by_block(**options: Any) -> None:
    model = Untouched()
    with optimize(model, sgd(model), **options):
        raise AssertionError("the block was entered")


def by_strategy(**options: Any) -> None:
    """What the Trainer does before the first forward: make the strategy, and open the session in its `setup`."""
    config = MemOptStrategy(**options).memopt_config
    model = Untouched()
    Session(model, [sgd(model)], config)


FRONTS = pytest.mark.parametrize("front", [by_block, by_strategy], ids=["optimize", "strategy"])
Front = Callable[..., None]


@FRONTS
def test_budget_above_the_device(front: Front) -> None:
    """A budget above the device is refused before the first forward, and the message has both numbers."""
    device = backend_of(device_of(small())).total_nbytes()
    with pytest.raises(BudgetError, match=rf"{device + 1} bytes.*{device} bytes"):
        front(budget=device + 1)


@FRONTS
@pytest.mark.parametrize(
    "options",
    [
        {"objective": "joules"},
        {"profile_steps": 0},
        {"profile_steps": "3"},
        {"solver_seconds": 0},
        {"solver_seconds": float("nan")},
        {"solver_seconds": "soon"},
        {"max_slowdown": 0.9},
        {"max_slowdown": float("nan")},
        {"max_slowdown": "2"},
        {"headroom": -1},
        {"headroom": 0.5},
        {"headroom": True},
        {"on_exceed": "ignore"},
    ],
    ids=str,
)
def test_bad_options(front: Front, options: dict[str, Any]) -> None:
    """An option with a value that is not accepted is refused by name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        front(budget="min", **options)


@FRONTS
@pytest.mark.parametrize("options", [{"budget": "8GiB"}, {"headroom": 1, "offload": "disk"}, {"verbose": False}])
def test_a_config_beside_options(front: Front, options: dict[str, Any]) -> None:
    """Neither is dropped: the message names the options that were given beside the config."""
    with pytest.raises(ConfigError, match=f"config= was given .*{next(iter(options))}="):
        front(config=MemOptConfig(budget="4GiB"), **options)


@FRONTS
def test_a_config_of_another_kind(front: Front) -> None:
    with pytest.raises(ConfigError, match="give a MemOptConfig"):
        front(config={"budget": "8GiB"})


def test_a_config_for_either_front() -> None:
    """It is in force as it was given, by `optimize` and by the strategy."""
    config = MemOptConfig(budget="min", profile_steps=1, headroom=64, verbose=False)
    assert MemOptStrategy(config=config).memopt_config is config
    model = small()
    with optimize(model, sgd(model), config=config) as run:
        assert run.session.config is config


def test_budget_words() -> None:
    """'min' and 'auto' are read like units: in any case."""
    assert MemOptConfig(budget=" MIN ").budget_nbytes(device_of(small())) is None
    device = device_of(small())
    assert MemOptConfig(budget="Auto").budget_nbytes(device) == backend_of(device).total_nbytes() * 9 // 10


def test_no_plan_to_save(tmp_path: Path) -> None:
    """Saving a plan before there is one says when there will be."""
    model = small()
    with pytest.raises(ConfigError, match="after the observed steps"), optimize(model, sgd(model), verbose=False) as run:
        run.save_plan(str(tmp_path / "plan.json"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A good plan file's text."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model = small(depth=2)
    with optimize(model, o := sgd(model), budget="min", verbose=False, profile_steps=1) as run:
        train(model, o, batches(2))
        run.save_plan(str(path))
    return path.read_text()


@FRONTS
def test_missing_plan_file(front: Front, tmp_path: Path) -> None:
    """A plan file that is not there is refused before the first forward, by name."""
    with pytest.raises(PlanFileError, match="nothing-here.json"):
        front(budget="auto", plan=tmp_path / "nothing-here.json")


@FRONTS
def test_plan_above_the_budget(front: Front, text: str, tmp_path: Path) -> None:
    """A plan that peaks above the budget is refused before the first forward; the message has both numbers."""
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InfeasibleError, match="1000") as caught:
        front(budget=1000, plan=path)
    assert caught.value.smallest_nbytes is not None
    assert re.search(rf"\b{caught.value.smallest_nbytes}\b", str(caught.value))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, budget: int, **options: Any) -> InfeasibleError:
    """The refusal of a training run, which has left model (parameters bit by bit), optimizer and torch as they were."""
    before = [p.detach().clone() for p in model.parameters()]
    kept = copy.deepcopy(optimizer.state_dict())
    with leaves_nothing(model), pytest.raises(InfeasibleError) as caught:
        with optimize(model, optimizer, budget=budget, verbose=False, **options):
            train(model, optimizer, batches(5))
    assert all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = optimizer.state_dict()
    assert after["param_groups"] == kept["param_groups"] and after["state"].keys() == kept["state"].keys()
    for i, moments in kept["state"].items():
        assert all(same_bits(t, after["state"][i][name]) for name, t in moments.items())
    assert caught.value.budget_nbytes == budget and str(budget) in str(caught.value)
    return caught.value.with_traceback(None)  # what it refers to would be in memory as long as the error


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("headroom", [0, 1000])
def test_refused_before_the_first_forward(headroom: int) -> None:
    """Parameters, buffers and the batch alone are above the budget: the forward is not run; the message has the numbers."""
    model = Untouched()
    there = nbytes(model.parameters()) + nbytes(model.buffers()) + batches(1)[0][0].nbytes
    error = refused(model, sgd(model), there + headroom - 1, headroom=headroom)
    assert f"{there} bytes" in str(error) and f"{nbytes(model.parameters())} are parameters" in str(error)
    assert "budget='min'" in str(error) and error.smallest_nbytes is None  # only a lower bound is known
    with pytest.raises(AssertionError, match="the forward ran"):
        with optimize(model, o := sgd(model), budget=there + headroom, headroom=headroom, verbose=False):
            train(model, o, batches(1))


def test_optimizer_state_counts_before_the_first_forward() -> None:
    """State that exists (a resumed run) is counted, and so refused with the parameters."""
    model = small()
    train(model, o := adamw(model), batches(2))
    there = nbytes(model.parameters()) + nbytes(model.buffers()) + batches(1)[0][0].nbytes
    moments = 2 * nbytes(model.parameters())
    error = refused(model, o, there + moments - 1)
    assert "are optimizer state" in str(error) and error.smallest_nbytes is None


@pytest.fixture(scope="module")
def beyond() -> int:
    """What the smallest budget for `small()`, with an optimizer that has no state, has beyond what the process holds before."""
    before = counted_nbytes()
    model = small()
    with optimize(model, o := plain_sgd(model), budget="min", verbose=False, profile_steps=1) as run:
        train(model, o, batches(5))
        assert run.status().frontier is not None
        return run.status().frontier.smallest_nbytes - before


@pytest.fixture
def least(beyond: int) -> int:
    """The smallest budget for `small()`, with an optimizer that has no state, in this process as it is."""
    return beyond + counted_nbytes()


@pytest.mark.parametrize(("optimizer", "moments"), [(plain_sgd, 0), (sgd, 1), (adamw, 2)])
@pytest.mark.parametrize("headroom", [0, 30_000])
def test_refused_before_the_first_update(optimizer: Any, moments: int, headroom: int, least: int) -> None:
    """A budget that holds what is there but no plan: refused in the first `step()`, with a budget that then works."""
    model = small()
    needed = least + (moments + 1) * nbytes(model.parameters())  # and the copies that `refused` compares with
    error = refused(model, optimizer(model), needed * 9 // 10 + headroom, headroom=headroom)
    assert "Nothing was updated" in str(error)
    assert error.smallest_nbytes is not None and str(error.smallest_nbytes) in str(error)
    assert abs(error.smallest_nbytes - headroom - needed) <= 0.05 * needed
    gc.collect()  # frames that the error went through
    model = small()
    budget = (error.smallest_nbytes - headroom) * 21 // 20 + headroom
    with optimize(model, o := optimizer(model), budget=budget, headroom=headroom, verbose=False) as run:
        train(model, o, batches(5))
        assert run.plan is not None


def test_refused_before_the_first_update_of_accumulated_steps(least: int) -> None:
    """Two backwards before the update: the second one is what is planned for, with the gradients of the first."""
    model = small()
    before = state(model)
    with pytest.raises(InfeasibleError, match="Nothing was updated"):
        with optimize(model, o := sgd(model), budget=least * 3 // 4, verbose=False):  # no step of the two is feasible
            for batch in batches(2):
                loss_of(model, batch).backward()
            o.step()
    assert all(same_bits(p, before[name]) for name, p in model.named_parameters()) and o.state == {}


def test_refused_before_the_first_update_by_lightning(least: int) -> None:
    """The same in a Trainer, whose closure runs forward and backward inside of the optimizer's step."""
    from tests.cpu.lib.fits import Task, fit

    tasks: list[Any] = []

    class Kept(Task):
        def __init__(self) -> None:
            super().__init__()
            tasks.append((self, [p.detach().clone() for p in self.parameters()]))

    with pytest.raises(InfeasibleError, match="Nothing was updated"):
        fit(MemOptStrategy(budget=least // 2, verbose=False), Kept)
    [(task, before)] = tasks
    assert all(same_bits(a, b) for a, b in zip(before, task.parameters(), strict=True))
    assert installed()[:2] == [None, []]


def test_what_gets_no_gradient_is_not_counted(least: int) -> None:
    """A part of the model that never runs needs neither gradients nor state, so no budget is refused because of it."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()
            self.unused = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Half()
    moments = 2 * nbytes(model.inner.parameters())
    budget = (least + moments) * 21 // 20 + nbytes(model.unused.parameters())
    with optimize(model, o := adamw(model), budget=budget, verbose=False) as run:
        train(model, o, batches(5))
        assert run.plan is not None and run.plan.predicted_peak_nbytes <= budget
