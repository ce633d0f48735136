"""A forward that a module's call began, until something ends it; and loops by methods that have no plan."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.runtime import Engine
from lightning_memopt.session.observe.silence import COPIES
from lightning_memopt.torch_private import innermost_hooks
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import (
    QUIET,
    Batch,
    Small,
    agrees,
    assert_same,
    batches,
    installed,
    leaves_nothing,
    loss_of,
    seeded,
    sgd,
    small,
    state,
    through_modules,
    train,
)


def opened(model: Small, batch: Batch) -> Tensor:
    h = model.embed(batch[0])
    assert not nothing_is_on()
    return h


def nothing_is_on() -> bool:
    """Whether no dispatch modes are on, and no hooks, not even hooks at rest."""
    return innermost_hooks(True) is None and installed()[1] == []


@contextlib.contextmanager
def planned(model: Small) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        train(model, optimizer, batches(5), through_modules)
        assert run.plan is not None
        yield run, optimizer


def test_what_ends_an_open_forward() -> None:
    model = small()
    with leaves_nothing(model), planned(model) as (run, optimizer):
        first = batches(1)[0]
        opened(model, first).sum().backward()
        assert nothing_is_on()
        h = opened(model, first)
        optimizer.step()
        assert nothing_is_on()
        h = opened(model, first)
        with run.pause():
            assert nothing_is_on()
        h = opened(model, first)
        run.step()
        assert nothing_is_on()
        h = opened(model, first)
        torch.autograd.grad(h.sum(), [model.embed.weight], create_graph=True)
        assert not nothing_is_on()
        torch.autograd.grad(h.sum(), [model.embed.weight])
        assert nothing_is_on()
        h = opened(model, first)  # the end of the run


def test_another_model_s_forward_ends_it() -> None:
    """Two runs by methods: no recorder sees an op of the other's forward."""

    def use(models: list[Small], optimizers: list[torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        for batch in batches(8):
            first = through_modules(models[0], batch)
            assert len(installed()[1]) <= 1  # type: ignore[arg-type]
            second = loss_of(models[1], batch)
            (first + second).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    plain = [small(seed) for seed in (0, 1)]
    use(plain, [sgd(m) for m in plain])
    models = [small(seed) for seed in (0, 1)]
    optimizers = [sgd(m) for m in models]
    options = {"budget": "min"} | QUIET
    with optimize(models[0], optimizers[0], **options) as one, optimize(models[1], optimizers[1], **options) as two:
        use(models, optimizers)
        assert one.plan is not None and two.status().phase != "unplanned"
    for a, b in zip(plain, models, strict=True):
        assert_same(state(a), state(b))


def test_other_threads() -> None:
    """A forward that is open in one thread is not a forward of another, and ends with its thread."""
    model, first = small(), batches(1)[0]
    with leaves_nothing(model), planned(model) as (run, optimizer):
        h = opened(model, first)
        seen = list[bool]()

        def work() -> None:
            model.embed(first[0])
            seen.append(nothing_is_on())

        def leave_open() -> None:
            opened(model, first)

        for task in (work, leave_open):
            thread = threading.Thread(target=task)
            thread.start()
            thread.join()
            if task is work:
                assert seen == [True] and not nothing_is_on()
                h.sum().backward()
                optimizer.zero_grad()
        train(model, optimizer, batches(3), through_modules)
        assert not state_of(run).drift.deviated and nothing_is_on()


def test_an_outer_hook_that_ends_is_the_users() -> None:
    """Hooks that are on when a forward begins may end before it: ours are not taken off instead."""
    model, first = small(), batches(1)[0]
    with planned(model) as (_, optimizer):
        with save_on_cpu():
            model.embed(first[0])
            assert innermost_hooks(True) is not None
        assert nothing_is_on()
        optimizer.zero_grad()


def test_nothing_keeps_what_a_forward_without_a_backward_recorded() -> None:
    model, first = small(), batches(1)[0]
    engines = list[weakref.ref[Engine]]()
    with planned(model) as (run, _), pytest.MonkeyPatch.context() as patch:
        begin = Engine.__init__

        def begins(engine: Engine, native: Any) -> None:
            begin(engine, native)
            engines.append(weakref.ref(engine))

        patch.setattr(Engine, "__init__", begins)
        gc.disable()
        try:
            for _ in range(3):
                through_modules(model, first)
            assert len(engines) == 3 and [ref() for ref in engines[:-1]] == [None] * 2
        finally:
            gc.enable()
        assert not state_of(run).drift.deviated


class Noted(nn.Linear):
    def forward(self, x: Tensor, note: object = None) -> Tensor:
        return super().forward(x)


def test_arguments_are_not_kept_while_the_forward_goes_on() -> None:
    class Note:
        pass

    model = nn.ModuleList([Noted(8, 8), nn.Linear(8, 8)])
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        for _ in range(5):
            note = Note()
            found = weakref.ref(note)
            h = model[0](torch.randn(4, 8), note).tanh()
            del note
            assert found() is None
            model[1](h).sin().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.plan is not None


def test_a_module_that_is_taken_away_is_not_kept() -> None:
    model = small()
    with planned(model) as (run, optimizer):
        model.other = nn.Linear(8, 8)
        train(model, optimizer, batches(2))  # the model itself: single modules are watched anew after it
        train(model, optimizer, batches(3), through_modules)
        gone = weakref.ref(model.other)
        del model.other
        train(model, optimizer, batches(1), through_modules)
        assert gone() is None
        assert run.plan is not None


# -- what has no plan ----------------------------------------------------------------------------------------------


def said(use: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> str:
    """The one line that says why there is no plan; the bits are the plain run's."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = agrees(use, lambda: seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))))
    assert run.plan is None
    (line,) = [str(w.message) for w in found if "MemOpt" in str(w.message)]
    assert run.status().reason is not None and str(run.status().reason) in line
    return line


@pytest.mark.parametrize("inner_steps", [3, COPIES + 2])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "outer optimizer"])
def test_copies_that_are_trained(inner_steps: int, by_hand: bool) -> None:
    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        for _ in range(12):
            fast, x = copy.deepcopy(model), torch.randn(32, 8)
            inner = torch.optim.SGD(fast.parameters(), lr=0.02)
            for _ in range(inner_steps):
                fast(x).square().mean().backward()
                inner.step()
                inner.zero_grad()
            with torch.no_grad():
                for p, q in zip(model.parameters(), fast.parameters(), strict=True):
                    if by_hand:
                        p.lerp_(q, 0.1)
                    else:
                        p.grad = p - q
            if not by_hand:
                optimizer.step()
        return []

    assert "put its weights back by load_state_dict()" in said(use)


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its modules"])
def test_a_checkpoint_around_the_calls(whole: bool) -> None:
    """The checkpoint runs the calls twice, so running statistics are written twice. It is left alone."""

    def use(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        for _ in range(9):
            x = torch.randn(32, 8)
            for part in [model] if whole else model:
                x = checkpoint(part, x, use_reentrant=False)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert "Call them without it: a plan decides what is rebuilt" in said(use)
