"""`memopt fit` with optimizer state and frozen weights that are parked while they rest: what it says, and runs that keep it."""

from __future__ import annotations

import gc
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.allowed import config_of
from lightning_memopt.fitting.answer import Fit, answered
from lightning_memopt.fitting.cards import cards_of, of_the_host
from lightning_memopt.fitting.found import OFFLOAD
from lightning_memopt.fitting.sources import of_training
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.tiers.shelf import is_away
from tests.cpu.lib.loops import counted_nbytes
from tests.cpu.lib.trainings import training_of

WIDTH = 256


@pytest.fixture(autouse=True)
def native() -> None:
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: frozen weights are not parked, and a line says so")


class Block(nn.Module):
    """A frozen matrix with an adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(x) + self.up(self.down(x))).tanh()


def with_adapters() -> Training:
    """Frozen weights take 2 MiB, and nothing else as much."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    x = torch.randn(32, WIDTH)
    return training_of(model, optimizer, lambda: model(x).square().mean())


def whole() -> Training:
    """All weights are trained: AdamW's state has 4 MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    x = torch.randn(32, WIDTH)
    return training_of(model, torch.optim.AdamW(model.parameters()), lambda: model(x).square().mean())


BUILDS = {"frozen weights": with_adapters, "state": whole}


@cache
def asked(kind: str, nbytes: int, offload: str = "none") -> Fit:
    source = of_training("a chain", lambda _: BUILDS[kind](), None, "cpu")
    return answered(source, of_the_host(cards_of([str(nbytes)])), config=config_of(offload))


@pytest.mark.parametrize("kind", BUILDS)
def test_what_rests_makes_a_step_fit(kind: str) -> None:
    """The answer without `offload` says so; with it, what is parked. A run keeps the budget, and parks it."""
    without, with_ = asked(kind, 1000).smallest_nbytes, asked(kind, 1000, "disk").smallest_nbytes
    assert without - with_ >= 1 << 20
    nbytes = (without + with_) // 2
    (other,) = asked(kind, nbytes).cards[0].others
    assert (other.offload, other.missing_nbytes) == ("disk", 0) and other.slowdown is not None and other.slowdown > 1
    answer = asked(kind, nbytes, "disk")
    (on,) = answer.cards
    assert on.verdict == "plan" and OFFLOAD in on.techniques and on.peak_nbytes <= nbytes and on.tier_nbytes > 0
    assert kind in on.at_rest and f"parked while it rests: {on.at_rest}." in answer.table()
    assert ("to_device(model)" in on.at_rest) == (kind == "frozen weights")
    gc.collect()
    budget, training = nbytes + counted_nbytes(), BUILDS[kind]()
    with optimize(training.model, training.optimizer, budget=budget, offload="disk", verbose=False) as run:
        for _ in range(5):
            training.step()
        status = run.status()
        assert status.plan is not None and (status.plan.weights if kind == "frozen weights" else status.plan.states)
    assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget
    assert not any(is_away(p) for p in training.model.parameters())


def test_no_more_is_parked_than_a_card_needs() -> None:
    """The more room a card has, the fewer bytes move and the less time it takes."""
    least, most = asked("state", 1000, "disk").smallest_nbytes, asked("state", 1000).smallest_nbytes
    cards = [asked("state", least + (most - least) * quarter // 4, "disk").cards[0] for quarter in range(4)]
    assert all(on.verdict == "plan" and on.peak_nbytes <= on.usable_nbytes for on in cards)
    moved = [on.offloaded_nbytes for on in cards]
    assert moved == sorted(moved, reverse=True) and moved[-1] < moved[0] / 2
    assert [on.slowdown for on in cards] == sorted((on.slowdown for on in cards), reverse=True)


def test_the_smallest_is_that_of_a_run() -> None:
    answer, training = asked("frozen weights", 1000, "disk"), with_adapters()
    gc.collect()
    beside = counted_nbytes() - sum(p.nbytes for p in training.model.parameters()) - 32 * WIDTH * 4
    with optimize(training.model, training.optimizer, budget="min", offload="disk", max_slowdown=1e9, verbose=False) as run:
        for _ in range(5):
            training.step()
        plan = run.status().plan
    assert plan is not None and abs(plan.budget_nbytes - beside - answer.smallest_nbytes) <= 16384


def test_nothing_rests_where_nothing_may() -> None:
    """Without `offload`, and where the step fits."""
    assert not asked("state", 1 << 30, "disk").cards[0].at_rest and not asked("state", 1000).cards[0].at_rest
