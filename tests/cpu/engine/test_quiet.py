"""What a module may do that runs without the recorder: write batch statistics, enter contexts, call backward, be replaced."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.functional import batch_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.runtime import Program
from lightning_memopt.trace.scopes import Scopes
from tests.cpu.lib.loops import QUIET, agrees, budget_at, sgd, train
from tests.cpu.lib.models import data, made
from tests.cpu.lib.times import Known, given

WIDTH = 128
X = data(256, WIDTH)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


def chain(x: torch.Tensor, rounds: int = 8) -> torch.Tensor:
    for _ in range(rounds):
        x = x.sin().exp().tanh()
    return x


class Large(nn.Module):
    """What plans rebuild: large tensors of light ops, which start from `x` and `start`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, start: torch.Tensor | float = 0.0) -> torch.Tensor:
        return sum((((x - start) * k) * self.weight).sin().mean(0) for k in range(1, 5))  # type: ignore[return-value]


class Small(nn.Module):
    """What plans keep: more than `_WORTHWHILE` ops on small tensors. `act` is what it does with the result of its layer."""

    def __init__(self, act: Callable[[Small, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, WIDTH), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, self.layer(x[:4]))


class Parts(nn.Module):
    """Large, small, large, small, large: the two small ones share `held`."""

    def __init__(self, *acts: Callable[[Small, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.large = nn.ModuleList(Large() for _ in range(3))
        self.small = nn.ModuleList(map(Small, acts))
        self.held: dict[str, Any] = {}
        for small in self.small:
            small.held = self.held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.large[0](x)
        for scale, large, small in zip((0.5, 0.25), self.large[1:], self.small, strict=False):
            total = total + small(x).mean() + large(scale * x)
        return total


PLAIN = partial(Parts, lambda small, x: chain(x))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return train(model, optimizer, [(X, X)] * 6, lambda model, batch: model(batch[0]).square().mean())


def budget_of(factory: Callable[[], nn.Module], share: float) -> int:
    """Bytes for what is resident and a share of the activations."""
    model = made(factory)
    optimizer = sgd(model)
    with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
        losses(model, optimizer)
    return budget_at(run, share) + 65_536


def within(factory: Callable[[], nn.Module], share: float = 0.5, **options: Any) -> Run:
    """A run within a share of the activations, which has the results and states of a plain one and leaves nothing."""
    budget = budget_of(factory, share)
    run = agrees(losses, lambda: made(factory), sgd, budget=budget, profile_steps=1, **options)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops
    return run


def quiet_in(run: Run) -> set[str]:
    frontier = run.status().frontier
    assert frontier is not None and run.plan is not None
    return set(Program(frontier.graph, run.plan.lives).quiet)


class Statistics(nn.Module):
    """A batch norm over statistics of an unusual kind, which rebuilds elsewhere start from."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.large, self.small, self.kind, self.steps = Large(), Small(lambda small, x: chain(self.normed(x))), kind, 0
        self.register_buffer("both", torch.cat([torch.zeros(WIDTH), torch.ones(WIDTH)]))
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean if self.kind == "parameter" else self.both[:WIDTH]
        return mean, self.both[WIDTH:]

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return batch_norm(x, *self.statistics(), training=self.kind != "trained later" or self.steps > 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x, self.statistics()[0]) + self.small(x).mean()


@pytest.mark.parametrize("kind", ["views of one buffer", "parameter", "trained later"])
def test_no_statistics_are_written_where_nobody_sees_it(kind: str) -> None:
    """Batch norm increments no version counter, and the graph does not say what it writes."""
    assert not quiet_in(within(lambda: Statistics(kind), verify=False))


class Shifted(nn.Module):
    """A small part that writes its own buffer in one of many steps; rebuilds elsewhere start from it."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.steps = Large(), Small(self.act), 0
        self.small.register_buffer("shift", torch.zeros(WIDTH))

    def act(self, small: Small, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 4:
            small.shift.add_(1)  # type: ignore[operator]
        return chain(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x, self.small.shift) + self.small(x).mean()  # type: ignore[arg-type]


def test_a_buffer_of_its_own_that_is_written_later() -> None:
    """No observed step shows the write: it is seen, and the old bytes are kept for the rebuild."""
    assert not quiet_in(within(Shifted))


class Own(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "lossy hooks": lambda: saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()),
    "mode": Own,
    "no hooks": lambda: disable_saved_tensors_hooks("none here"),
}


def opens(small: Small, x: torch.Tensor) -> torch.Tensor:
    small.held["context"] = small.held["make"]()
    small.held["context"].__enter__()
    return chain(x)


def closes(small: Small, x: torch.Tensor) -> torch.Tensor:
    small.held["context"].__exit__(None, None, None)
    return x.sin()


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_that_is_left_elsewhere(name: str, left: list[nn.Module]) -> None:
    """The context stays in its place on the stack, and the rest of the forward is not recorded."""

    def factory() -> nn.Module:
        parts = Parts(opens, closes)
        parts.held["make"] = CONTEXTS[name]
        return parts

    with pytest.warns(UserWarning, match="left the plan"):
        within(factory)
    assert left


def test_a_backward_within_that_ends_the_forward(left: list[nn.Module]) -> None:
    """As in Lightning's manual optimization: nothing is entered again after it."""
    runs: list[Run] = []

    def act(small: Small, x: torch.Tensor) -> torch.Tensor:
        if runs:
            with runs[0].session.rounds.backward():
                pass
        return chain(x)

    model = made(lambda: Parts(act))
    optimizer = sgd(model)
    with optimize(model, optimizer, budget=budget_of(PLAIN, 0.5), **QUIET | {"profile_steps": 1}) as run:
        losses(model, optimizer)
        assert run.plan is not None and left
        runs.append(run)
        losses(model, optimizer)
        runs.clear()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_module_that_is_taken_out_is_freed(left: list[nn.Module]) -> None:
    model = made(PLAIN)
    optimizer = sgd(model)
    with optimize(model, optimizer, budget=budget_of(PLAIN, 0.5), **QUIET | {"profile_steps": 1}):
        losses(model, optimizer)
        assert left
        left.clear()
        weak = weakref.ref(model.small[0])  # type: ignore[index]
        model.small[0] = nn.Identity()  # type: ignore[index, operator]
        losses(model, optimizer)
        gc.collect()
        assert weak() is None


class Packs(nn.Module):
    """Its last act is to save a large tensor that was made outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: chain(self.layer(x[:8])), x, use_reentrant=True)


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.parts = nn.Parameter(torch.ones(WIDTH)), nn.ModuleList(Packs() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for k, part in enumerate(self.parts, 1):
            large = (x * k) * self.weight
            total = total + large.sin().mean(0).mean() + part(large).mean()
        return total


def test_a_save_behind_the_last_op_of_a_module_is_handled() -> None:
    """A reentrant checkpoint saves its inputs when it has ended."""
    run = within(Packing, share=0.3)
    status = run.status()
    assert run.plan is not None and status.measured_peak_nbytes is not None
    assert status.measured_peak_nbytes == pytest.approx(run.plan.predicted.needed_nbytes, rel=0.01)


def test_a_call_in_another_thread_is_no_part_of_the_forward() -> None:
    """The other call begins before a module of the forward, and ends in the middle of that module."""
    model = nn.Sequential(nn.Identity(), nn.Tanh())
    begun, may_end = threading.Event(), threading.Event()
    ops = [0]
    model[0].register_forward_pre_hook(lambda *_: (begun.set(), may_end.wait(10), None)[2])
    other = threading.Thread(target=model[0], args=(X,))

    def in_the_middle(*_: Any) -> None:
        may_end.set()
        other.join(10)
        ops[0] = 5

    model[1].register_forward_pre_hook(in_the_middle)
    scopes = Scopes(model)
    with scopes.tracking(lambda: ops[0]):
        other.start()
        begun.wait(10)
        ops[0] = 2
        assert scopes.current() == ""
        model[1](X)
    assert scopes.unbroken == {"1": (2, 5)}
