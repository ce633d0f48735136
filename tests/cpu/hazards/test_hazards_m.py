"""Lifecycle: whatever ends a step, nothing of ours stays, memory goes back, and a retry is exact.

M1 and M3 by exceptions at every point of a step are in test_optimize.py (`test_exceptions_then_retry`, `test_interrupt_*`).
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memopt import optimize
from lightning_memopt.record import Tape
from tests.cpu.lib.engines import needs_fork
from tests.cpu.lib.loops import Batch, assert_same, batches, installed, leaves_nothing, loss_of, sgd, small, state, step, train

QUIET: dict[str, Any] = dict(verbose=False, profile_steps=1, budget="min")
PLANNED = pytest.mark.parametrize("warm", [0, 3], ids=["observing", "planned"])


@pytest.fixture
def tapes() -> Iterator[list[weakref.ref[Tape]]]:
    """Weak references to every tape made; the garbage collector is off meanwhile."""
    found: list[weakref.ref[Tape]] = []
    made = Tape.__init__

    def watched(self: Tape, *args: Any) -> None:
        made(self, *args)
        found.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", watched)
        yield found
    gc.enable()


def alive(tapes: Sequence[weakref.ref[Tape]]) -> int:
    return sum(tape() is not None for tape in tapes)


def same_end(build: Callable[[], Any], run_all: Callable[[Any, Any], None], tapes: Sequence[weakref.ref[Tape]] = ()) -> None:
    """A run of the loop within a plan ends with the weights of the plain one, and no tape is left."""
    torch.manual_seed(0)
    plain = build()
    run_all(plain, sgd(plain))
    torch.manual_seed(0)
    model = build()
    with optimize(model, optimizer := sgd(model), **QUIET):
        run_all(model, optimizer)
        assert alive(tapes) == 0
    assert_same(state(plain), state(model))


class Breaking(nn.Module):
    """Its backward raises where told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner.embed(x)
        h.register_hook(self.maybe)
        return self.inner.head(nn.functional.gelu(self.inner.layers[0](nn.functional.gelu(h))))

    def maybe(self, _: Tensor) -> None:
        if self.breaks:
            self.breaks = False
            raise RuntimeError("out of memory, say")


@PLANNED
def test_m1_failed_forward(warm: int) -> None:
    """M1: a forward that raises leaves no hook and no mode, at once."""
    model = small()
    with leaves_nothing(model), optimize(model, o := sgd(model), **QUIET):
        train(model, o, batches(warm))
        with pytest.raises(IndexError):
            model(torch.full((2, 8), 1000))
        assert installed()[:2] == [None, []]


@PLANNED
def test_m2_m4_failed_backward(warm: int, tapes: list[weakref.ref[Tape]]) -> None:
    """M2, M4: after a backward that raised and was caught, its memory is free without a collection, and a retry is exact."""

    def run_all(model: Breaking, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(6)
        for i, batch in enumerate(batches(warm + 2)):
            if i == warm:
                model.breaks = True
                try:
                    loss_of(model, batch).backward()
                except RuntimeError:
                    pass
                optimizer.zero_grad()
                assert alive(tapes) <= (warm == 0), "only what is being observed"
            step(model, optimizer, batch)

    same_end(Breaking, run_all, tapes)
    assert tapes


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Python drops what a signal's handler raises inside of the collector's callbacks; a plugin of pytest has one."""
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@pytest.mark.usefixtures("no_gc_callbacks")
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGINT])
def test_m3_signals(number: signal.Signals) -> None:
    """M3: a signal whose handler raises, wherever in a step it comes, propagates and leaves nothing."""

    class Stopped(BaseException):
        pass

    def handler(*_: Any) -> None:
        raise Stopped

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(number, handler)
    try:
        for seconds in (0.02, 0.11, 0.23, 0.37):
            model = small()
            with leaves_nothing(model):
                try:
                    with optimize(model, o := sgd(model), **QUIET):
                        threading.Timer(seconds, lambda: signal.pthread_kill(main, number)).start()
                        until = time.monotonic() + 20
                        while time.monotonic() < until:
                            train(model, o, batches(1))
                        raise AssertionError("the signal did not come through")
                except Stopped:
                    pass
            assert not any(t for t in threading.enumerate() if isinstance(t, threading.Timer) and t.is_alive())
    finally:
        signal.signal(number, before)


class Seen(Dataset):
    """What a worker that was forked in the middle of a step has installed."""

    def __getitem__(self, index: int) -> Any:
        hook, modes = installed()[:2]
        return *(t[0] for t in batches(1, seed=index)[0]), hook is None and modes == []

    def __len__(self) -> int:
        return 8


@PLANNED
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_m5_forked_workers(warm: int) -> None:
    """M5: workers that are forked between steps inherit no hooks; the loop over them gives the plain run's bits."""

    def run_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(8)
        train(model, optimizer, batches(warm))
        for x, y, clean in DataLoader(Seen(), 4, num_workers=1, multiprocessing_context="fork"):
            assert clean.all()
            step(model, optimizer, (x, y))

    same_end(small, run_all)


def in_child(function: Callable[[], Any]) -> Any:
    """What the function returns in a process that is forked here."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


@needs_fork
def test_m5_training_in_a_forked_process() -> None:
    """M5: the run's files belong to its process. What trains in a fork of it trains plainly, and is told so."""
    model, more = small(), batches(30, seed=5)
    with optimize(model, o := sgd(model), **(QUIET | {"budget": "min", "offload": "disk"})) as run:
        train(model, o, batches(6))
        assert run.plan is not None and run.plan.parks
        plain = copy.deepcopy(model)

        def trained() -> tuple[Any, list[str]]:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.manual_seed(3)
                train(model, o, more)
            return [p.tolist() for p in model.parameters()], [str(line.message) for line in said]

        weights, said = in_child(trained)
        assert sum("a process that was forked from that of its run" in line for line in said) == 1
    torch.manual_seed(3)
    optimizer = sgd(plain)
    optimizer.load_state_dict(o.state_dict())
    train(plain, optimizer, more)
    assert weights == [p.tolist() for p in plain.parameters()]


def test_m6_no_reference_cycles(tapes: list[weakref.ref[Tape]]) -> None:
    """M6: a step's tape and what it holds die with its graph, without the garbage collector, observed or planned."""
    model = small()
    with optimize(model, o := sgd(model), **QUIET):
        for batch in batches(5):
            out = model(batch[0])
            loss = out.float().square().mean()
            loss.backward()
            o.step()
            o.zero_grad()
            del out, loss
            assert alive(tapes) == 0
    assert len(tapes) == 5


@PLANNED
def test_m7_losses_that_are_not_used(warm: int, tapes: list[weakref.ref[Tape]]) -> None:
    """M7: forwards whose loss is thrown away accumulate nothing, and the next step is exact."""

    def run_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(6)
        data: list[Batch] = batches(warm + 3)
        for i, batch in enumerate(data):
            for _ in range(3 if i == warm else 0):
                loss_of(model, batch)
                assert alive(tapes) <= 1
            step(model, optimizer, batch)

    same_end(small, run_all, tapes)
