"""Plans are lent: batches that are no larger borrow one, so many lengths take few plans; the budget holds for every batch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.session.cache.solves import Solves
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.measure.peak_meter import StepMeter
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.observe.resident import resident_nbytes as resident_on
from lightning_memopt.session.observe.resident import resident_tensors
from lightning_memopt.session.solve import solving
from tests.cpu.lib.inside import current_of, states_of
from tests.cpu.lib.loops import QUIET, agrees, assert_same, state, without_counter
from tests.cpu.lib.times import Known, given

WORDS = 32


class Attending(nn.Module):
    """A small transformer for any length: what it saves grows with the square of it."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))  # fmt: skip # noqa: E501
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(h).chunk(3, -1)
            h = h + nn.functional.dropout(torch.softmax(q @ k.transpose(1, 2), -1), 0.1) @ v
            h = h + mlp(h)
        return self.head(h)


def attending() -> nn.Module:
    torch.manual_seed(0)
    return Attending()


def words(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(seed))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], after: Any = lambda x: None) -> list[Tensor]:
    torch.manual_seed(4)
    losses = []
    for x in data:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        after(x)
    return losses


@dataclass
class Seen:
    """What was done in every step, and its peak by the allocator."""

    kinds: Counter[str] = field(default_factory=Counter)
    peaks: list[int] = field(default_factory=list)
    plans: int = 0
    measured: bool = False


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Measures every step, observed or planned."""
    found = Seen()
    close, begin, finish = StepMeter.close, Observation.begin_round, Observation.finish
    init, solved = Observation.__init__, solving.plan_for

    def closed(self: StepMeter) -> int | None:
        peak = close(self)
        assert peak is not None
        found.peaks.append(peak)
        found.kinds["planned"] += 1
        found.measured = True
        return peak

    def made(self: Observation, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.meter = True

    def begun(self: Observation, batch: Any, *rest: Any) -> Any:
        found.measured = False
        self.base = resident_on(resident_tensors(self.model, self.optimizers, batch), self.device)  # type: ignore[attr-defined]
        return begin(self, batch, *rest)

    def finished(self: Observation) -> Any:
        graph = finish(self)
        if found.measured:  # it waits for a plan, and was measured meanwhile
            found.peaks.pop()
            found.kinds["planned"] -= 1
        found.peaks.append(self.base + self.events.peak_nbytes)  # type: ignore
        found.kinds["observed"] += 1
        return graph

    def counted(*args: Any) -> Any:
        found.plans += 1
        return solved(*args)

    monkeypatch.setattr(Running, "measures", property(lambda self: True))
    monkeypatch.setattr(StepMeter, "close", closed)
    monkeypatch.setattr(Observation, "__init__", made)
    monkeypatch.setattr(Observation, "begin_round", begun)
    monkeypatch.setattr(Observation, "finish", finished)
    monkeypatch.setattr(solving, "plan_for", counted)
    return found


def budget_for(x: Tensor, share: float) -> int:
    """Bytes that hold `share` of what the unmodified step of this batch takes beyond what is resident."""
    model = attending()
    with optimize(model, optimizer := adamw(model), budget="min", verbose=False, profile_steps=1) as run:
        train(model, optimizer, [x] * 2)
        frontier = run.status().frontier
    assert frontier is not None
    base = resident_nbytes(frontier.graph)
    budget = int(base + share * (frontier.unmodified_peak_nbytes - base))
    assert budget > frontier.smallest_nbytes
    return budget


def shapes(mode: str, count: int) -> list[tuple[int, int]]:
    """Random lengths in batches of 8, or in batches of as many as make 1,024 words."""
    draw = random.Random(5)
    lengths = [draw.randint(8, 128) for _ in range(count)]
    return [(8 if mode == "lengths" else 1024 // n, n) for n in lengths]


@pytest.mark.parametrize(("mode", "most"), [("lengths", 4), ("words", 4)])
def test_many_lengths_take_few_plans(seen: Seen, mode: str, most: int) -> None:
    """Random lengths: a few plans, most steps under one, every step within the budget, the plain run's bits."""
    data = [words(*shape, seed=i) for i, shape in enumerate(shapes(mode, 100 if mode == "lengths" else 60))]
    budget = budget_for(max(data, key=lambda x: x.shape[0] * x.shape[1] ** 2), 0.5)
    seen.kinds.clear()
    seen.peaks.clear()
    seen.plans = 0
    model = attending()
    plain = train(model, adamw(model), data)
    expected = state(model)
    model = attending()
    with optimize(model, optimizer := adamw(model), budget=budget, **QUIET) as run:
        losses = train(model, optimizer, data)
    assert_same(expected, state(model))
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    assert len({tuple(x.shape) for x in data}) > 40
    assert seen.plans <= most and seen.kinds["planned"] >= (0.7 if mode == "lengths" else 0.5) * len(data), seen
    assert len(seen.peaks) == len(data) and max(seen.peaks) <= budget
    assert any(isinstance(s, Running) and s.program.schedule.segments for s in states_of(run).values())


def test_a_smaller_batch_borrows() -> None:
    """The smaller batch is not observed, its plan drops what the larger one's does, and sizes may come in any order."""
    kinds = []

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        after = lambda _: kinds.append(type(current_of(run_)).__name__) if run_ else None  # noqa: E731
        return train(model, optimizer, [words(6, n) for n in (48, 48, 32, 40, 48, 32)], after)

    run_: Any = None
    run = agrees(use, attending, adamw)
    lent = [s for s in states_of(run).values() if isinstance(s, Running) and s.lender is not None]
    assert len(lent) == 2 and all(s.plan is run.plan and s.peaks.steps and not s.drift.deviated for s in lent)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


def test_accumulating_batches_of_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths differ within a step. The measured peak is said of the largest batch, and not every step is measured for it."""
    without_counter(monkeypatch)
    opened = []
    init = StepMeter.__init__
    monkeypatch.setattr(StepMeter, "__init__", lambda self, *args: opened.append(1) or init(self, *args))

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(4)
        losses = []
        for i, lengths in enumerate([(48, 48, 48)] * 4 + [(48, 40, 32 + n) for n in range(8)] * 2):
            for n in lengths:
                x = words(6, n, seed=i)
                (nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) / 3).backward()
                losses.append(next(iter(model.parameters())).grad.clone())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    run = agrees(use, attending, adamw)
    found = [s for s in states_of(run).values() if isinstance(s, Running)]
    assert len(found) == 10 and sum(s.lender is None for s in found) == 1 and all(s.peaks.steps for s in found)
    assert 1 <= len(opened) <= 6
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


class Branching(Attending):
    """Short batches run other ops."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if x.shape[1] < 40:
            for _ in range(12):
                out = torch.tanh(out.sin().exp())
        return out


def branching() -> nn.Module:
    torch.manual_seed(0)
    return Branching()


def test_a_batch_that_runs_other_ops_is_observed() -> None:
    """A batch that borrows a plan, leaves it and takes more than it allows is observed by itself, once."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, [words(6, n) for n in (48, 48, 48, 32, 32, 32, 32)])

    run = agrees(use, branching, adamw)
    one, other = (s for s in states_of(run).values() if isinstance(s, Running))
    assert one.lender is None and other.lender is None and other.peaks.steps == 2 and not other.drift.deviated
    assert one.plan.fingerprint != other.plan.fingerprint


class Squared(Attending):
    """Few long samples take more than many short ones. Here the first dimension is the length."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t())


def squared() -> nn.Module:
    torch.manual_seed(0)
    return Squared()


def test_what_is_larger_than_planned_is_counted() -> None:
    """A batch with as many elements but larger tensors gives up the plan that it tried to borrow."""

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, [words(16, 16)] * 3 + [words(64, 4)] * 3)

    run = agrees(use, squared, adamw)
    found = list(states_of(run).values())
    assert len(found) == 2 and all(isinstance(s, Running) and s.lender is None for s in found)


class Hurried(Known):
    """A clock by which minutes pass between two readings and solving takes no time, so every solve pays off."""

    seconds = 0.0

    def now(self) -> float:
        self.seconds += 100.0
        return self.seconds


def test_a_much_smaller_batch_gets_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some uses of a plan that rebuilds more than the batch needs, it is observed, if that pays."""
    given(monkeypatch, Hurried())
    monkeypatch.setattr(Solves, "expected_seconds", lambda *_: 0.0)

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, [words(6, 64)] * 3 + [words(6, 16)] * 12)

    run = agrees(use, attending, adamw)
    small = current_of(run)
    assert isinstance(small, Running) and small.lender is None and small.plan is not run.plan
