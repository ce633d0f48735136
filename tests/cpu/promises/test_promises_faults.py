"""P10, P12: an exception at the entry of any function of ours that a step calls: nothing stays, and a retry is exact.

Which functions a step calls is observed, not listed: the recorder's handler, pack, unpack, replays, the tracer, destructors,
the profiler's start and stop, the solver, every transition of the session. Each of them raises once, in its first call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lightning_memopt
from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import engine
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observing import Observing
from tests.cpu.lib.device_thread import in_both_threads
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.kept import Kept
from tests.cpu.lib.loops import batches, counted_nbytes, installed, leaves_nothing, sgd, small, step

PACKAGE = str(Path(lightning_memopt.__file__).parent)


class Boom(Exception):
    pass


ERRORS: tuple[type[BaseException], ...] = (Boom, KeyboardInterrupt, SystemExit, MemoryError)
DATA = batches(1, size=4)[0]


def name_of(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE + '/')}:{code.co_firstlineno} {code.co_name}"


def ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


@contextlib.contextmanager
def calls() -> Iterator[dict[str, CodeType]]:
    """The functions of the package that run in this block."""
    found: dict[str, CodeType] = {}

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and ours(frame.f_code):
            found.setdefault(name_of(frame.f_code), frame.f_code)

    in_both_threads(lambda: sys.setprofile(seen))
    try:
        yield found
    finally:
        in_both_threads(lambda: sys.setprofile(None))


@contextlib.contextmanager
def raising(code: CodeType, error: type[BaseException]) -> Iterator[list[str]]:
    """The first call of the function in this block raises, before it does anything. The list is empty until it did; then it
    has the `repr` of the error, which itself would hold what the frames of the step hold.
    """
    fired: list[str] = []

    def fire(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and not fired:
            fired.append(repr(error(name_of(code))))
            raise error(name_of(code))

    in_both_threads(lambda: sys.setprofile(fire))
    try:
        yield fired
    finally:
        in_both_threads(lambda: sys.setprofile(None))


class Bench:
    """A model in a run, and a plain twin that says what a step from the same state must leave."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.model, self.optimizer = run, model, optimizer
        self.twin = small(depth=2)
        self.twin_optimizer = sgd(self.twin)
        self.problems: list[str] = []

    def step(self) -> None:
        step(self.model, self.optimizer, DATA)

    def expected(self, kept: Kept) -> list[torch.Tensor]:
        twin = Kept(self.twin, self.twin_optimizer)
        twin.state, twin.rng = kept.state, kept.rng
        twin.back()
        step(self.twin, self.twin_optimizer, DATA)
        return twin.now()

    def attempt(self, code: CodeType, error: type[BaseException], at_once: bool) -> None:
        """A step in which `code` raises, what is left of us after it, and the retry."""
        name, kept, before, seen = name_of(code), Kept(self.model, self.optimizer), installed(), 0
        expected = self.expected(kept)
        torch.set_rng_state(kept.rng)
        with raising(code, error) as fired:
            for _ in range(2):  # what is raised in a destructor comes with the next step
                try:
                    self.step()
                except BaseException as e:
                    if not (type(e) is error and str(e) == name):
                        self.problems.append(f"{name}: {type(e).__name__} instead of {error.__name__}: {e}")
                    seen += 1
                    break
        if not fired:
            return  # it is not called in each step
        if not seen:
            self.problems.append(f"{name}: {error.__name__} was lost")
        if at_once and installed() != before:
            self.problems.append(f"{name}: {error.__name__} left something of ours")
        kept.back()
        try:
            self.step()
        except BaseException as e:
            self.problems.append(f"{name}: {error.__name__}, then {type(e).__name__} in the retry: {e}")
            kept.back()
            self.step()
        if installed() != before:
            self.problems.append(f"{name}: {error.__name__} left something of ours, after the retry too")
        if not all(map(torch.equal, kept.now(), expected)):
            self.problems.append(f"{name}: the retry after {error.__name__} gives other bits")


@contextlib.contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    model = small(depth=2)
    with leaves_nothing(model), optimize(model, o := sgd(model), verbose=False, **options) as run:
        yield Bench(run, model, o)


def error_of(k: int) -> type[BaseException]:
    return ERRORS[k % len(ERRORS)]


PLANNED: dict[str, Any] = dict(budget="min", profile_steps=1)
KEY = {
    "planned": {"round", "update_begins", "step_ended", "enter", "leave", "undo"},
    "Python": {"__torch_dispatch__", "pack", "unpack", "unpacked", "__del__", "run"},
    "native": {"numeric_flags"},
    "observed": {"record", "pack", "unpack", "run", "__del__", "evict", "begin", "end", "_death", "metered_cpu", "_verify"},
    "life": {"solve", "take_graph", "__enter__", "close", "_install", "watch", "unwatch", "measured", "lower", "checksum"},
}


def observing() -> dict[str, Any]:
    """A budget near the smallest beside what the process holds now: observed steps evict, and rebuild."""
    held = counted_nbytes()
    with bench(**PLANNED) as b:
        for _ in range(2):
            b.step()
        assert b.run.status().frontier is not None
        smallest = b.run.status().frontier.smallest_nbytes - held
    del b
    return dict(budget=smallest * 11 // 10 + counted_nbytes(), profile_steps=1 << 30)


def steady(options: dict[str, Any]) -> tuple[Bench, dict[str, CodeType], contextlib.ExitStack]:
    """A run after some steps, and the functions that one more of them calls."""
    stack = contextlib.ExitStack()
    b = stack.enter_context(bench(**options))
    for _ in range(4):
        b.step()
    with calls() as found:
        b.step()
    return b, found, stack


def names(found: dict[str, CodeType]) -> set[str]:
    return {code.co_name for code in found.values()}


@pytest.mark.parametrize("by", ["Python", "native"])
def test_p10_p12_faults_in_planned_steps(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every function that a planned step calls: gone at once, the plan stays in force, the next step is exact."""
    if by == "Python":
        monkeypatch.setattr(engine, "_module", None)
    elif engine.loaded() is None:
        pytest.skip("there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")
    b, found, stack = steady(PLANNED)
    with stack:
        assert KEY["planned"] | KEY[by] <= names(found)
        for k, code in enumerate(found.values()):
            b.attempt(code, error_of(k), at_once=True)
            assert isinstance(state_of(b.run), Running)
    assert not b.problems, "\n".join(b.problems)


@pytest.mark.long
def test_p10_p12_faults_in_observed_steps() -> None:
    """In every function that an observed step calls, evictions included: nothing is left, the next step is exact."""
    b, found, stack = steady(observing())
    with stack:
        assert KEY["observed"] - {"_verify", "metered_cpu"} <= names(found)
        for k, code in enumerate(found.values()):
            b.attempt(code, error_of(k + 1), at_once=False)
            assert isinstance(state_of(b.run), Observing)
    assert not b.problems, "\n".join(b.problems)


@pytest.fixture(scope="module")
def plainly() -> list[list[torch.Tensor]]:
    """What each of three plain steps leaves."""
    model = small(depth=2)
    optimizer = sgd(model)
    torch.manual_seed(3)
    return [(step(model, optimizer, DATA), Kept(model, optimizer).now())[1] for _ in range(3)]


During = Callable[[int], contextlib.AbstractContextManager[list[str]]]
"""A block around a moment of a life, with the errors that are raised in it. The first moment is the making of the run, the last
one its end, and those between are its steps.
"""
MOMENTS = 5


def life(plainly: list[list[torch.Tensor]], during: During) -> list[str]:
    """Three steps of a run from its making to its end, each fault in it caught and its step done again: what is wrong.
    A moment has no fault of its own while an earlier one has not come yet.
    """
    model = small(depth=2)
    optimizer = sgd(model)
    problems, before = list[str](), (installed(), sys.unraisablehook)
    attributes = [sorted(vars(m)) for m in model.modules()]
    due = list[str]()
    stack = contextlib.ExitStack()

    def went(moment: int, call: Callable[[], Any]) -> Any:
        nonlocal due
        try:
            with contextlib.nullcontext(due) if due else during(moment) as due:
                return call()
        except BaseException as e:
            if [repr(e)] != due:
                problems.append(repr(e))
            due = []
            return None

    torch.manual_seed(3)
    run = went(0, lambda: stack.enter_context(optimize(model, optimizer, verbose=False, **PLANNED)))
    if run is not None:
        for i, expected in enumerate(plainly, start=1):
            kept = Kept(model, optimizer)
            if went(i, lambda: step(model, optimizer, DATA)) is None:
                kept.back()
                step(model, optimizer, DATA)
            if not all(map(torch.equal, Kept(model, optimizer).now(), expected)):
                problems.append(f"other bits in step {i}")
        if run.plan is None:
            problems.append("no plan")
        went(MOMENTS - 1, stack.close)
    problems += [f"{error} was lost" for error in due]
    if (installed(), sys.unraisablehook) != before or attributes != [sorted(vars(m)) for m in model.modules()]:
        problems.append("left something of ours")
    return problems


def life_with_faults(plainly: list[list[torch.Tensor]], waiting: list[list[CodeType]], error: type[BaseException]) -> list[str]:
    """A life in which the first function that waits in each moment raises, and does not wait any more: what is wrong."""
    tried = list[str]()

    @contextlib.contextmanager
    def faulty(moment: int) -> Iterator[list[str]]:
        if not waiting[moment]:
            yield []
            return
        code = waiting[moment].pop(0)
        tried.append(name_of(code))
        with raising(code, error) as fired:
            yield fired

    return [f"{tried}, {error.__name__}: {problem}" for problem in life(plainly, faulty)]


@pytest.mark.long
def test_p10_p12_faults_at_every_transition(plainly: list[list[torch.Tensor]]) -> None:
    """In the making of a run, its first steps, profiling, solving, the first planned step, and its end: none is lost, none
    leaves anything, and every step that is done again is exact. A run has a fault in each of its moments.
    """
    known = set()
    for options in (lambda: PLANNED, observing):
        _, found, stack = steady(options())
        stack.close()
        known |= found.keys()
    moments: list[dict[str, CodeType]] = []

    @contextlib.contextmanager
    def seen(_: int) -> Iterator[list[str]]:
        with calls() as found:
            yield []
        moments.append(found)

    assert life(plainly, seen) == [] and len(moments) == MOMENTS
    assert KEY["life"] <= set().union(*map(names, moments))
    waiting = []
    for found in moments:
        data = {name for name in found if name.startswith(("graph/", "plan/", "solvers/", "units"))}  # they touch nothing:
        data = {name for name in data if found[name].co_name not in ("solve", "lower")}  # two stand for all
        waiting.append([code for name, code in found.items() if name not in known | data])
        known |= found.keys()
    problems, lives = list[str](), 0
    while any(waiting):
        problems += life_with_faults(plainly, waiting, error_of(lives))
        lives += 1
    assert not problems, "\n".join(problems)
