"""Batch sizes whose plans put tensors away: larger than rebuilding alone allows, confirmed, and then trained at, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.batching import BatchSizeResult
from lightning_memopt.batching.choose import Chooser, unmodified_peak
from lightning_memopt.batching.plans import ParkingPlans, Plans
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Machine
from lightning_memopt.plan.forms import tier_of
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.parking.joint_frontier import peak_nbytes
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.solving import frontier_of
from lightning_memopt.solvers.planner import UNSEEN_NBYTES
from tests.cpu.batching.test_batch_fit import fitted, recorded
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import CLASSES, LENGTH, WORDS, assert_same, small, state, step

pytestmark = pytest.mark.profiled  # their budgets are those of a process that holds nothing else

BUDGET = 800_000
OPTIONS: dict[str, Any] = dict(verbose=False, solver_seconds=1.0)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small(width=64, depth=4)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def words(size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (size, LENGTH), generator=g), torch.randint(0, CLASSES, (size, LENGTH), generator=g)


def found(**options: Any) -> BatchSizeResult:
    model, optimizer = made()
    return find_max_batch_size(
        lambda batch: step(model, optimizer, batch), words, model, optimizer, budget=BUDGET, **OPTIONS, **options
    )


def trained(size: int, **options: Any) -> tuple[dict[str, Tensor], list[Tensor], Any]:
    """Four steps at this size: what they leave, their losses, and the state of a session within the budget."""
    model, optimizer = made()
    torch.manual_seed(3)
    losses, after = [], None
    if not options:
        losses = [step(model, optimizer, words(size, i)) for i in range(4)]
    else:
        with optimize(model, optimizer, budget=BUDGET, profile_steps=2, **OPTIONS, **options) as run:
            losses = [step(model, optimizer, words(size, i)) for i in range(4)]
            after = state_of(run)
    return state(model), [*losses, torch.rand(3)], after


def test_a_size_that_needs_the_disk_is_found_confirmed_and_trained_at() -> None:
    alone, away = found(), found(offload="disk")
    assert away.size > 1.15 * alone.size and away.planned and not away.why
    assert (away.profile_steps, away.trial_steps) == (3, 2)
    assert away.before == 8 and away.before_samples_per_second is not None and " instead of " in str(away)
    assert away.confirmed_peak_nbytes is not None and away.confirmed_peak_nbytes <= BUDGET
    assert away.confirmed_peak_nbytes == pytest.approx(away.predicted_peak_nbytes, rel=0.02)
    expected, losses, _ = trained(away.size)
    ours, also, after = trained(away.size, offload="disk")
    assert_same(expected, ours)
    assert all(torch.equal(a, b) for a, b in zip(losses, also, strict=True))
    assert isinstance(after, Running) and after.peaks.measured_nbytes is not None and after.peaks.measured_nbytes <= BUDGET
    assert {tier_of(life.form) for life in after.plan.lives if life.how == "fetch"} == {"disk"}
    with pytest.raises(InfeasibleError):  # not at once above that size: the search does not count on parked optimizer state
        trained(2 * away.size, offload="disk")


class Sizes(ParkingPlans):
    """Counts the sizes that were solved for."""

    def solved(self) -> list[int]:
        return sorted(self._frontiers)


def plans(**options: Any) -> Sizes:
    offloading = Offloading(torch.device("cpu"), MemOptConfig(solver_seconds=1.0, verbose=False, **options))

    def solve(graph: Graph) -> Any:
        return frontier_of(graph, offloading, lambda _: None, Machine())

    return Sizes(fitted("images"), solve, offloading)


@pytest.mark.parametrize("options", [{"compress": "lossless"}, {"offload": "disk"}], ids=str)
def test_what_is_away_takes_other_bytes_at_another_size(options: dict[str, Any]) -> None:
    """A plan of one size, priced at another: as the same lives are on the graph that was recorded there."""
    away = plans(**options)
    lives, real = away.smallest(12), recorded("images")[40]
    fetched = [life for life in lives if life.how == "fetch"]
    assert fetched
    forms = away.offloading.forms(real)

    def at_40(life: Life) -> Life:
        return replace(life, parked_nbytes=dict(forms[life.tensor])[life.form]) if life.how == "fetch" else life

    needs = peak_nbytes(real, tuple(map(at_40, lives))) + UNSEEN_NBYTES
    assert away.needs(40, lives) == pytest.approx(needs, rel=0.005)  # workspaces are the libraries'
    assert away.resized(40, lives) == tuple(map(at_40, lives)) != lives
    assert away.resized(12, lives) == lives
    wrong = tuple(replace(life, parked_nbytes=1 << 40) if life.how == "fetch" else life for life in lives)
    assert away.needs(40, wrong) == away.needs(40, lives)


def test_modes_choose_among_plans_that_put_tensors_away() -> None:
    """Never a smaller size than rebuilding alone, nor a slower prediction where both have the same size."""
    away = plans(offload="disk")
    budget = int(1.3 * unmodified_peak(away.fit.at(12)))
    alone = Plans(away.fit, away.solve)
    everything = lambda limit: range(1, limit + 1)  # noqa: E731
    choices = [Chooser(away.fit, budget, some).choose("largest", everything, 1 << 20) for some in (alone, away)]
    one, other = choices
    assert one is not None and other is not None and other.planned
    assert other.size >= one.size and other.peak_nbytes <= budget
    assert len(away.solved()) <= 8
    fastest = Chooser(away.fit, budget, away).choose("throughput", lambda limit: [n for n in (8, 16, 24) if n <= limit], 24)
    assert fastest is not None and fastest.size in (8, 16, 24)


def test_a_size_without_a_plan_after_all_is_made_smaller() -> None:
    """A frontier may have no plan within the budget although its smallest one was priced below it."""

    class Fewer(Sizes):
        def fastest(self, size: int, budget_nbytes: int) -> tuple[float, int] | None:
            return super().fastest(size, budget_nbytes) if size <= 16 else None

    away = plans(offload="disk")
    away.__class__ = Fewer
    budget = int(1.3 * unmodified_peak(away.fit.at(12)))
    choice = Chooser(away.fit, budget, away).choose("largest", lambda limit: range(1, limit + 1), 1 << 20)
    assert choice is not None and choice.planned and choice.size == 16
