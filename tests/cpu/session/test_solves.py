"""How often a run with batches of varying shapes solves for a plan: by a clock of the test's own, in real training loops."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.session.cache.solves import FREE_SOLVES, FREE_STEPS, SECONDS_APART, Solves
from lightning_memopt.session.forward.shapes import signature_of
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.solve import solving
from tests.cpu.lib.inside import current_of, states_of
from tests.cpu.lib.loops import QUIET, assert_same, budget_at, state
from tests.cpu.lib.times import Known, given
from tests.cpu.session.test_plan_cache import WORDS, adamw, attending, words

SOLVE_SECONDS, PLANNED_SECONDS, EVICTED_SECONDS = 20.0, 1.0, 3.0
"""How long everything takes by the clock of these tests."""


class Clock(Known):
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


@dataclass
class Solved:
    """When plans were solved: (step, seconds). `planned`: steps under a plan."""

    clock: Clock
    at: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    planned: int = 0

    def step_ended(self, planned: bool) -> None:
        self.steps += 1
        self.planned += planned
        self.clock.seconds += PLANNED_SECONDS if planned else EVICTED_SECONDS

    @property
    def late(self) -> list[float]:
        return [seconds for step, seconds in self.at if step >= FREE_STEPS]


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Solved:
    found = Solved(Clock())
    given(monkeypatch, found.clock)
    solve = solving.plan_for

    def timed(*args: Any) -> Any:
        found.at.append((found.steps, found.clock.seconds))
        found.clock.seconds += SOLVE_SECONDS
        return solve(*args)

    monkeypatch.setattr(solving, "plan_for", timed)
    return found


Step = Callable[[nn.Module], Tensor]


def trained(model: nn.Module, steps: list[Step], run: Any = None, solved: Solved | None = None) -> list[Tensor]:
    optimizer, losses = (adamw(model) if run is None else run.optimizer), []
    torch.manual_seed(4)
    for step in steps:
        loss = step(model)
        planned = run is not None and isinstance(current_of(run), Running)
        loss.backward()
        if solved is not None:
            solved.step_ended(planned)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def runs_as_plain(
    build: Callable[[], nn.Module], steps: list[Step], solved: Solved, largest: Step, share: float = 0.7
) -> tuple[Run, list[str]]:
    """Train plainly and within a share of what the largest batch has on top. Returns the warnings of missing plans."""
    model = build()
    with optimize(model, optimizer := adamw(model), budget="min", **(QUIET | {"profile_steps": 1})) as run:
        run.optimizer = optimizer
        trained(model, [largest] * 2, run)
    budget = budget_at(run, share)
    solved.at.clear()
    model = build()
    plain = trained(model, steps)
    expected = state(model)
    model = build()
    with (
        warnings.catch_warnings(record=True) as said,
        optimize(model, optimizer := adamw(model), budget=budget, **(QUIET | {"profile_steps": 1})) as run,
    ):
        warnings.simplefilter("always")
        run.optimizer = optimizer
        losses = trained(model, steps, run, solved)
    assert_same(expected, state(model))
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    return run, [str(w.message) for w in said if "run without a plan" in str(w.message)]


def assert_few(solved: Solved, free: int) -> None:
    """No more than `free` solves in the first steps, then one a minute, each after as much was lost as it takes."""
    late = solved.late
    assert len(solved.at) - len(late) <= free, solved.at
    last = max((seconds for step, seconds in solved.at if step < FREE_STEPS), default=0.0)
    for seconds in late:
        assert seconds - last >= SECONDS_APART
        last = seconds
    lost = (solved.steps - solved.planned) * (EVICTED_SECONDS - PLANNED_SECONDS)
    assert len(late) * SOLVE_SECONDS <= lost


def test_random_lengths(solved: Solved) -> None:
    """60 batches of random lengths: the first, those that are clearly longer, and what pays; most steps are planned."""
    draw = random.Random(5)
    data = [words(4, draw.randint(8, 64), seed=i) for i in range(60)]
    steps = [lambda model, x=x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) for x in data]
    largest = max(range(len(data)), key=lambda i: data[i].shape[1])
    runs_as_plain(attending, steps, solved, steps[largest])  # type: ignore[arg-type]
    assert_few(solved, free=FREE_SOLVES)
    assert solved.planned >= 0.7 * solved.steps


class Patches(nn.Module):
    """Pictures of any size in a list, as patches, padded."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(16, width), nn.Linear(width, 3 * width), nn.Linear(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, pictures: list[Tensor]) -> Tensor:
        h = pad_sequence([self.embed(p.reshape(-1, 16)) for p in pictures], batch_first=True)
        q, k, v = self.qkv(h).chunk(3, -1)
        h = h + torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return self.head((h + self.mlp(h)).mean(1))


def pictures() -> nn.Module:
    torch.manual_seed(0)
    return Patches()


def test_lists_of_pictures(solved: Solved) -> None:
    """Every batch has other sizes. Some borrow; the others do not get a plan each, and one line says so."""
    draw = random.Random(3)
    sizes = [[(draw.randint(2, 6), draw.randint(2, 6)) for _ in range(8)] for _ in range(40)]
    source = torch.Generator().manual_seed(0)
    data = [[torch.rand(h, w, 16, generator=source) for h, w in batch] for batch in sizes]
    steps = [lambda model, x=x: nn.functional.cross_entropy(model(x), torch.arange(8) % 4) for x in data]
    largest = max(range(len(data)), key=lambda i: (max(h * w for h, w in sizes[i]), sum(h * w for h, w in sizes[i])))
    _, said = runs_as_plain(pictures, steps, solved, steps[largest], 0.9)  # type: ignore[arg-type]
    assert_few(solved, free=2)
    assert 0.3 * solved.steps <= solved.planned < solved.steps and len(said) == 1


class Translator(nn.Module):
    """Runs one cell for each word, in the source and in the target."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, width), nn.Linear(2 * width, WORDS)
        self.read, self.write = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        told, last = self.read(self.embed(source))
        said, _ = self.write(self.embed(target), last)
        match = (said @ told.transpose(1, 2)).softmax(-1)
        return self.out(torch.cat((said, match @ told), -1))


def translator() -> nn.Module:
    torch.manual_seed(0)
    return Translator()


def test_translation(solved: Solved) -> None:
    """Each pair of lengths runs other ops. Still, a pair that is no longer than another one keeps to the plan it borrows."""
    draw = random.Random(0)
    lengths = [(draw.randint(2, 6), draw.randint(2, 6)) for _ in range(24)]
    data = [(words(16, n, seed=i), words(16, m, seed=99 + i)) for i, (n, m) in enumerate(lengths)]
    steps = [lambda model, x=x, y=y: nn.functional.cross_entropy(model(x, y).flatten(0, 1), y.flatten()) for x, y in data]
    largest = max(range(len(data)), key=lambda i: sum(lengths[i]))
    run, _ = runs_as_plain(translator, steps, solved, steps[largest], 0.9)  # type: ignore[arg-type]
    assert_few(solved, free=FREE_SOLVES)
    assert solved.planned >= 0.5 * solved.steps
    borrowers = [s for s in states_of(run).values() if isinstance(s, Running) and s.lender is not None]
    assert any(s.drift.deviated and s.peaks.steps > 1 for s in borrowers)


def test_a_solve_waits_until_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the free steps: a minute after the last solve, and when as much was lost as a solve takes. Once is not enough."""
    clock = Clock()
    given(monkeypatch, clock)
    solves = Solves()
    small, large, huge = (signature_of(0, (True,), torch.empty(4, n, device="meta")) for n in (10, 20, 100))
    assert solves.allows(small, [], False)
    solves.begins(small)
    clock.seconds += 10
    solves.ended(small, 100, 10.0)
    for _ in range(FREE_STEPS):
        solves.forward()
        clock.seconds += 1
        solves.step_ended(True)
    for _ in range(6):
        assert not solves.allows(large, [small], False)
        solves.forward()
        solves.waits(large, False)
        solves.recorded(large, 200)
        clock.seconds += 3
        solves.step_ended(False)
    assert solves.expected_seconds(large) == 20.0
    clock.seconds += SECONDS_APART
    assert not solves.allows(large, [small], False)  # 6 times 2 seconds were lost
    for _ in range(5):
        solves.waits(large, False)
    assert solves.allows(large, [small], False)
    assert solves.allows(huge, [small], False)  # it would have served them
    assert not solves.allows(small, [], False)
    solves.begins(large)
    assert not solves.allows(large, [small], False)


def test_free_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solved for: the first of a kind, a clearly larger batch, one that comes again, and one that no plan serves."""
    given(monkeypatch, Clock())
    solves = Solves()
    at = lambda n: signature_of(0, (True,), torch.empty(4, n, device="meta"))  # noqa: E731
    assert solves.allows(at(40), [], False)
    assert not solves.allows(at(41), [at(40)], False) and solves.allows(at(50), [at(40)], False)
    assert solves.allows(at(30), [at(40)], True)
    solves.waits(at(41), False)
    assert solves.allows(at(41), [at(40)], False)
    for _ in range(FREE_SOLVES):
        solves.begins(at(41))
    assert not solves.allows(at(41), [at(40)], False) and not solves.allows(at(80), [at(40)], False)
