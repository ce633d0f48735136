"""Settings that are set while a backward runs: rebuilds after that still run under those of the forward (R6).

An op of these models adds a number that stands for the settings that it runs under. A rebuild under others gives other bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize, register_op
from lightning_memopt.native import engine
from lightning_memopt.record import numeric_flags, set_numeric_flags
from lightning_memopt.record.settings import CHANGES
from tests.cpu.lib.device_thread import in_both_threads
from tests.cpu.lib.engines import needs_native

STEPS, LAYERS = 4, 6
X = torch.ones(64, 16)


def settings() -> float:
    """A number that stands for the settings of this thread."""
    precision = ("highest", "high", "medium").index(torch.get_float32_matmul_precision())
    flushes = 5e-324 * 1.0 == 0.0
    return torch.get_num_threads() + 0.25 * torch.are_deterministic_algorithms_enabled() + 0.125 * precision + 0.0625 * flushes


@torch.library.custom_op("memopt_settings::read", mutates_args=())
def read(x: Tensor) -> Tensor:
    return x + settings()


read.register_autograd(lambda ctx, grad: grad)
register_op(torch.ops.memopt_settings.read.default, "pure")

_set_threads, _set_denormal = torch.set_num_threads, torch.set_flush_denormal  # no run is open: not wrapped
CHANGED: dict[str, Callable[[], Any]] = {
    "number of threads": lambda: torch.set_num_threads(2),
    "number of threads, unseen": lambda: _set_threads(2),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "denormal numbers": lambda: torch.set_flush_denormal(True),
    "denormal numbers, unseen": lambda: _set_denormal(True),
}
OF_THREADS = "number of threads", "number of threads, unseen", "denormal numbers", "denormal numbers, unseen"
"""These settings belong to a thread: setting them in another thread changes nothing here."""


def set_everywhere(flags: tuple[Any, ...]) -> None:
    """Set the settings in this thread and in that of backwards."""
    in_both_threads(lambda: set_numeric_flags(flags))
    torch.set_num_threads(torch.get_num_threads())  # a thread that begins later has the number that any thread set last


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "Python"], autouse=True)
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    """The engine that runs the steps."""
    before = numeric_flags()
    with engine.without() if request.param == "Python" else contextlib.nullcontext():
        yield
    set_everywhere(before)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(torch.ops.memopt_settings.read(layer(x)))
        return x.square().sum()


class Pair(nn.Module):
    """Two losses that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Chain(), Chain()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def in_another_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


Backward = Callable[[nn.Module, Any], None]
"""Runs the backward of what the model returned."""


def gradients(of: type[nn.Module], backward: Backward, planned: bool, closed: bool = False) -> list[Tensor]:
    """The gradients of the last of some steps. `closed`: the run is over when its backward begins."""
    torch.manual_seed(0)
    model = of()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    before = numeric_flags()
    with contextlib.ExitStack() as stack:
        if planned:
            run = stack.enter_context(optimize(model, optimizer, budget="min", profile_steps=1, verbose=False))
        for i in range(STEPS):
            last = i == STEPS - 1
            optimizer.zero_grad()
            out = model(X)
            if planned and last:
                assert run.status().plan.predicted.rebuilt_ops > LAYERS
            if closed and last:
                stack.close()
                assert not CHANGES.watched
            backward(model, out)
            set_everywhere(before)
            if not last:
                optimizer.step()
    return [p.grad for p in model.parameters()]


def is_exact(of: type[nn.Module], backward: Backward, closed: bool = False) -> None:
    plain = gradients(of, backward, planned=False)
    found = gradients(of, backward, planned=True, closed=closed)
    assert all(map(torch.equal, found, plain))


@contextlib.contextmanager
def hooked(parameter: Tensor, call: Callable[[], Any]) -> Iterator[None]:
    """Within, `call()` runs in each backward when the gradient of the parameter is there."""
    handle = parameter.register_hook(lambda _: call() and None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("closed", [False, True], ids=["in the run", "after the run"])
@pytest.mark.parametrize("thread", ["the same", "another"])
@pytest.mark.parametrize("what", CHANGED)
def test_a_hook_sets_it_between_two_rebuilds(what: str, thread: str, closed: bool) -> None:
    seen: list[bool] = []

    def change() -> None:
        before = settings()
        CHANGED[what]() if thread == "the same" else in_another_thread(CHANGED[what])
        seen.append(settings() != before)

    def backward(model: nn.Module, loss: Tensor) -> None:
        with hooked(model.layers[LAYERS // 2].weight, change):
            loss.backward()

    is_exact(Chain, backward, closed)
    assert len(seen) == 2 * STEPS and (all(seen) or (thread == "another" and what in OF_THREADS))


@pytest.mark.parametrize("what", CHANGED)
def test_a_hook_sets_it_and_sets_it_back(what: str) -> None:
    before, changed = numeric_flags(), []

    def change() -> None:
        CHANGED[what]()
        changed.append(settings())

    def backward(model: nn.Module, loss: Tensor) -> None:
        with hooked(model.layers[4].weight, change), hooked(model.layers[2].weight, lambda: set_numeric_flags(before)):
            loss.backward()

    is_exact(Chain, backward)
    assert len(set(changed)) == 1 and changed[0] != settings()


@pytest.mark.calling_thread("the backwards of the test run in two threads")
@pytest.mark.parametrize("what", CHANGED)
def test_another_thread_with_other_settings_goes_on_with_the_backward(what: str) -> None:
    def backward(model: nn.Module, losses: tuple[Tensor, Tensor]) -> None:
        def rest() -> None:
            CHANGED[what]()
            losses[1].backward()

        losses[0].backward()
        in_another_thread(rest)

    is_exact(Pair, backward)
