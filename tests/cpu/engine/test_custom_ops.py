"""Operators of `torch.library.custom_op` that write to their arguments: torch counts these writes before the operator runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from math import ceil

import pytest
import torch
from torch import Tensor, nn

from benchmarks.robustness.fuzzing.plans import random_lives
from lightning_memopt import optimize, register_op
from lightning_memopt.errors import ModifiedError
from lightning_memopt.record import Rule, rule_of
from lightning_memopt.solvers import planner
from tests.cpu.lib.engines import by_python, elements, gradients_of, observed_graph, steps
from tests.cpu.lib.harness import outcome
from tests.cpu.lib.loops import QUIET, agrees, budget_at, sgd
from tests.cpu.lib.models import exact, made

WIDTH = 32


def _adds(x: Tensor, into: Tensor) -> None:
    into.add_(x.mean(0))


bump = torch.library.custom_op("memopt_custom::bump", _adds, mutates_args={"into"})
pure = torch.library.custom_op("memopt_custom::pure", _adds, mutates_args={"into"})
kept = torch.library.custom_op("memopt_custom::kept", _adds, mutates_args={"into"})
register_op(torch.ops.memopt_custom.pure.default, "pure")
register_op(torch.ops.memopt_custom.kept.default, "opaque")


@torch.library.custom_op("memopt_custom::halves", mutates_args={"first", "second"})
def halves(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    first.add_(x.mean())
    second.sub_(x.mean())
    return x * 2


@torch.library.custom_op("memopt_custom::all_of", mutates_args={"into"})
def all_of(x: Tensor, into: list[Tensor]) -> None:
    for t in into:
        t.add_(x.mean())


@torch.library.custom_op("memopt_custom::doubles", mutates_args=())
def doubles(x: Tensor) -> Tensor:
    return x * 2


def in_thread(write: Callable[..., object], *args: object) -> None:
    """A write that the recorder does not see, although a version counter counts it."""
    thread = threading.Thread(target=write, args=args)
    thread.start()
    thread.join()


def once(x: Tensor, buf: Tensor) -> None:
    bump(x, buf)


def twice(x: Tensor, buf: Tensor) -> None:
    bump(x, buf)
    bump(x, into=buf)


def through_data(x: Tensor, buf: Tensor) -> None:
    bump(x, buf.data)


def through_view(x: Tensor, buf: Tensor) -> None:
    bump(x[:, 4:], buf[4:])


def parts_of_one(x: Tensor, buf: Tensor) -> None:
    halves(x, buf[:8], buf[8:])


def listed(x: Tensor, buf: Tensor) -> None:
    all_of(x, [buf[:8], buf, torch.zeros(3)])


def between_others(x: Tensor, buf: Tensor) -> None:
    buf.mul_(0.5)
    bump(x, buf)
    buf.add_(1)
    buf.sub_(0.25)
    bump(x, buf)


def said_to_be_pure(x: Tensor, buf: Tensor) -> None:
    pure(x, buf)


def said_to_be_opaque(x: Tensor, buf: Tensor) -> None:
    kept(x, buf)


WAYS = [
    once,
    twice,
    through_data,
    through_view,
    parts_of_one,
    listed,
    between_others,
    said_to_be_pure,
    said_to_be_opaque,
]


class Net(nn.Module):
    """Three blocks whose ops read a buffer before and after it is written."""

    def __init__(self, way: Callable[[Tensor, Tensor], None], counted: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("buf", torch.rand(WIDTH))
        for _ in range(counted):
            self.buf.mul_(0.5)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x) * self.scale).tanh()
            y = (x - self.buf).sin()
            self.way(x.detach(), self.buf)
            x = (y * self.buf.clone()).exp().sin()
        return x.square().mean()


def batch() -> Tensor:
    return torch.rand(16, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("counted", [0, 1, 3], ids=lambda n: f"version {n}")
@pytest.mark.parametrize("way", WAYS)
def test_b15_what_the_op_writes_over_is_kept(way, counted: int) -> None:
    exact(lambda: Net(way, counted), lambda model: model(batch()))


@pytest.mark.parametrize("way", WAYS)
def test_b15_plans_of_both_engines(way) -> None:
    """Some plans that solvers find and some random ones, each in three consecutive steps."""

    def program() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Net(way), batch()

    graph = observed_graph(program)
    plans = [candidate.lives for candidate in planner.solve(graph).candidates]
    plans = plans[:: ceil(len(plans) / 4)] + [random_lives(graph, random.Random(seed), held=0.3) for seed in range(3)]
    model, x = program()
    expected = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        expected.append((loss.item(), gradients_of(model), elements(model.buffers())))
    rebuilt = 0
    for lives in plans:
        for by in (steps, by_python):
            taken = by(program, graph, lives)
            assert [step[:3] for step in taken] == expected
            rebuilt += sum(len(step.rebuilt_ops) for step in taken)
    assert rebuilt, "nothing was rebuilt: the test tests nothing"


def test_every_budget_of_a_loop() -> None:
    def train(share: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(once)
        optimizer = sgd(model)

        def loop() -> list[Tensor]:
            losses = []
            for _ in range(5):
                loss = model(batch())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return [*losses, *(t.clone() for t in model.state_dict().values())]

        if share is None:
            return loop()
        budget = "min" if share == 0 else budgets[share]
        with optimize(model, optimizer, budget=budget, **QUIET) as run:
            found = loop()
        budgets.update({part: budget_at(run, part) for part in (0.4, 0.6, 0.8)} if share == 0 else {})
        return found

    budgets: dict[float, int] = {}
    expected = train(None)
    for share in (0, 0.4, 0.6, 0.8):
        assert all(torch.equal(a, b) for a, b in zip(expected, train(share), strict=True)), share


class Lost(nn.Module):
    """Another thread writes to a tensor that was read, and then the op does: nobody has the bytes that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("buf", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.scale - self.buf).sin().exp()
        in_thread(self.buf.add_, 1)
        bump(x, self.buf)
        return (y * self.buf.clone()).sin().mean()


def test_b15_an_unseen_write_is_not_taken_for_the_one_of_the_op() -> None:
    with pytest.raises(ModifiedError):
        outcome(made(Lost), lambda model: model(batch()), drop=True)


class Inside(nn.Module):
    """The op writes to a tensor with a history, which others have read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin() * 2
        y = (h + 1).exp().sin()
        bump(x, h)
        return self.last(y * (h + 1).exp().sin())


def test_a_tensor_with_a_history_is_written() -> None:
    exact(Inside, lambda model: model(batch()).square().mean())


class Later(Inside):
    """Another thread writes after an op that may run again: running it again makes the bytes from before that write."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin() * 2
        pure(x, h)
        in_thread(h.detach().add_, 1)
        return self.last(h.exp().sin())


def test_a_write_after_the_op_is_not_taken_for_its_own() -> None:
    exact(Later, lambda model: model(batch()).square().mean())


class Saved(Inside):
    """Autograd has saved what the op writes to."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin().exp()
        bump(x, h)
        return self.last(h)


@pytest.mark.parametrize("drop", [False, True], ids=["plain", "dropped"])
def test_a_saved_tensor_that_is_written_is_refused(drop: bool) -> None:
    with pytest.raises(RuntimeError, match="version"):
        outcome(made(Saved), lambda model: model(batch()).square().mean(), drop=drop)


def test_a_write_between_forward_and_backward() -> None:
    """R5: observed steps copy the old bytes, and no plan starts from them."""

    class Reads(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x + self.buf).sin().exp()).square().mean()

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Reads(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh())))
        model.register_buffer("buf", torch.rand(WIDTH))
        return model

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for _ in range(5):
            loss = model(batch())
            bump(batch(), model.buf)  # type: ignore[arg-type]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    run = agrees(use, build)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops


def test_rules_know_what_is_counted_first() -> None:
    ops = torch.ops.memopt_custom
    assert all(rule_of(op).counted_first for op in (ops.bump.default, ops.pure.default, ops.kept.default, ops.all_of.default))
    assert not rule_of(ops.doubles.default).counted_first, "it writes nothing"
    assert not rule_of(torch.ops.aten.add_.Tensor).counted_first
    assert rule_of(ops.kept.default).writes == rule_of(ops.bump.default).writes == (1,), "registered or not"
    register_op(ops.doubles.default, Rule("pure"))
    assert not rule_of(ops.doubles.default).counted_first
