"""Exceptions and Ctrl-C anywhere in a planned step: they pass, nothing is held, and the next step has the plain bits."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt import optimize
from lightning_memopt.native import counter, engine
from lightning_memopt.record.interrupts import raise_deferred
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.kept import Kept
from tests.cpu.lib.loops import installed, leaves_nothing, no_step_is_measured
from tests.cpu.lib.tracing import untraced
from tests.cpu.native.test_both_engines import Mixed

pytestmark = needs_native


TORCH = str(Path(torch.__file__).parent)


class Boom(Exception):
    pass


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed()
    return model, torch.optim.AdamW(model.parameters())


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Twins:
    """A model in a run, and a plain one that says what a step from the same state must give."""

    def __init__(self, run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.model, self.optimizer = run, model, optimizer
        self.twin, self.other = made()

    def step(self) -> None:
        self.model(X).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def goes_on(self, kept: Kept) -> None:
        """The next step, from the state that was kept, is natively the plain one, and the plan is in force."""
        plain = Kept(self.twin, self.other)
        plain.state, plain.rng = kept.state, kept.rng
        plain.back()
        self.twin(X).backward()
        self.other.step()
        self.other.zero_grad()
        expected = plain.now()
        kept.back()
        before = engine.loaded().counts()
        self.step()
        native_ops, python_ops = (b - a for a, b in zip(before, engine.loaded().counts(), strict=True))
        assert isinstance(state_of(self.run), Running)
        assert native_ops > 3 * python_ops, (native_ops, python_ops)
        assert all(map(torch.equal, kept.now(), expected))


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twins]:
    no_step_is_measured(monkeypatch)  # after an exception, what the twin does would be a part of the step
    model, optimizer = made()
    with leaves_nothing(model), optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
        twins = Twins(run, model, optimizer)
        for _ in range(4):
            twins.step()
        assert run.plan is not None and run.plan.predicted.rebuilt_ops > 5
        twins.goes_on(Kept(model, optimizer))  # the twin, too, has the state of its optimizer from now on
        yield twins


class Call(TorchFunctionMode):
    """Raises before a function of torch is called, or after it, by its number. number: of the next one."""

    def __init__(self, at: int, after: bool) -> None:
        super().__init__()
        self.at, self.after, self.number = at, after, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, self.number = self.number, self.number + 1
        if number == self.at and not self.after:
            raise Boom
        out = func(*args, **(kwargs or {}))
        if number == self.at:
            raise Boom
        return out


class Op(TorchDispatchMode):
    """Raises before an op, by its number. number: of the next one."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.number = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, self.number = self.number, self.number + 1
        if number == self.at:
            raise Boom
        return func(*args, **(kwargs or {}))


def live_nbytes() -> int:
    counts = counter()
    if counts is None:
        pytest.skip("bytes are counted by the native counter, which is not there")
    return counts.live_nbytes


Fails = Callable[[nn.Module, int], int]
"""Part of a step of a model, which raises Boom at a position. Returns how many positions there are, where it has not raised."""


def any_backward() -> None:
    """A backward of its own. Torch keeps the nodes that were ready when a backward failed until the next one in this thread."""
    torch.ones(1, requires_grad=True).sum().backward()


def raises_at_each(twins: Twins, fails: Fails) -> int:
    """Steps that fail, at each position, and after each of them a step that does not. Returns how many positions there are."""
    before, seen = live_nbytes(), installed()
    for at in range(1000):
        kept, count = Kept(twins.model, twins.optimizer), None
        nbytes = live_nbytes()
        with contextlib.suppress(Boom):
            count = fails(twins.model, at)
        twins.model.zero_grad()
        any_backward()
        assert live_nbytes() == nbytes, at
        assert installed() == seen, at
        twins.goes_on(kept)
        del kept
        assert live_nbytes() == before, at
        if count is not None:
            return count
    raise AssertionError("there are more positions than this")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_exception_at_each_function_of_forward(after: bool, twins: Twins) -> None:
    """Among them those that fail after autograd has saved tensors for them."""

    def fails(model: nn.Module, at: int) -> int:
        with Call(at, after) as mode:
            model(X)
        return mode.number

    assert raises_at_each(twins, fails) > 25


def test_an_exception_at_each_op_of_backward(twins: Twins) -> None:
    def fails(model: nn.Module, at: int) -> int:
        loss = model(X)
        with Op(at) as mode:
            loss.backward()
        return mode.number

    assert raises_at_each(twins, fails) > 60


class Interrupted:
    """A signal's handler that raises KeyboardInterrupt, as that of SIGINT does.

    where: where it has come, each time: (file, line, function), and those that called it.
    """

    def __init__(self) -> None:
        self.where: list[list[tuple[str, int, str]]] = []

    def __call__(self, _: int, frame: Any) -> None:
        self.where.append([])
        while frame is not None and frame.f_code.co_filename != __file__:
            self.where[-1].append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        raise KeyboardInterrupt


@pytest.fixture
def interrupted() -> Iterator[Interrupted]:
    handler = Interrupted()
    before, callbacks, hook = signal.signal(signal.SIGALRM, handler), list(gc.callbacks), sys.unraisablehook
    gc.callbacks.clear()  # Python drops what is raised in them; a plugin of pytest has one
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.callbacks.extend(callbacks)
    assert sys.unraisablehook is hook


def in_a_stack(where: list[tuple[str, int, str]]) -> bool:
    """Whether it came in a callback of an `ExitStack`: Python makes a cycle of its exception, which the collector frees."""
    return any(name == "_exit_wrapper" for _, _, name in where)


def torchs(where: list[tuple[str, int, str]]) -> bool:
    """Whether it came where only torch's own functions run: they may leave the grad mode as it was inside."""
    return len(where) > 1 and all(file.startswith(TORCH) for file, _, _ in where)


def interrupts(twins: Twins, interrupted: Interrupted, rng: random.Random, duration: float) -> bool:
    """Train until a signal has come, at a moment of a step. Whether it was raised."""
    sent = len(interrupted.where)
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 1.1 * duration))
        while len(interrupted.where) == sent:
            twins.step()
        raise_deferred()  # it came in a destructor: the next forward would raise it
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


@untraced  # an interrupt within its lock leaves it locked
@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_at_any_moment(seed: int, interrupted: Interrupted, twins: Twins) -> None:
    """50 interrupts spread over a step and a little beyond: none is lost, the next step is exact, and no bytes are held."""
    rng, seconds = random.Random(seed), []
    for _ in range(5):
        began = time.perf_counter()
        twins.step()
        seconds.append(time.perf_counter() - began)
    duration, before, seen = sorted(seconds)[2], live_nbytes(), installed()
    for _ in range(50):
        kept = Kept(twins.model, twins.optimizer)
        raised = interrupts(twins, interrupted, rng, duration)
        where = interrupted.where[-1]
        assert raised, where
        if not torch.is_grad_enabled():
            assert torchs(where), where
            torch.set_grad_enabled(True)
        twins.optimizer.zero_grad()
        assert installed() == seen, where
        twins.goes_on(kept)
        del kept
        if in_a_stack(where):
            gc.collect()
        assert live_nbytes() == before, where
    assert len({where[0] for where in interrupted.where if where}) > 10
