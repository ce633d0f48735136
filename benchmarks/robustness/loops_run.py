"""One run of a training script, plainly or within a budget, in a process of its own; and what it left, as plain data.

A run's results are compared bit by bit, so tensors become digests of their bytes. Every step's peak is counted from outside
(loops_count.py). What the package does meanwhile is watched at its doors: which state a forward of training belongs to, how
often a plan is solved, what is said.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers import it when they are made: once, not in every run
from torch import nn

from benchmarks.lib.digests import digest
from benchmarks.robustness.loops_count import live_nbytes, true_peak
from benchmarks.robustness.loops_rest import Resting
from benchmarks.robustness.scripts import Script
from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.session import Session
from lightning_memopt.session.judge.states import Running, State
from lightning_memopt.solvers import planner

MOVING = {"offload": "disk", "optimizer_in_backward": "auto", "max_slowdown": 1e6}
"""Options of a run in which everything moves that can."""
TIMEOUT = 600
_PREFIX = re.compile(r".*?(?=MemOpt: )")
Budget = int | str | None
"""Bytes, "min", or None for the plain run."""


def generators() -> dict[str, str]:
    states = {"torch": torch.get_rng_state().tolist(), "numpy": np.random.get_state(), "random": random.getstate()}
    return {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}


@dataclass
class Watching:
    """What a script is given: the package within a budget, or nothing around the loop. Bytes are above those before the script.

    `steps`: of every step its peak, and what was promised of it: the plan's own peak in bytes where all forwards of training
    had a plan in force, else None. A step that the package watches begins with its first forward and ends with its update: what
    comes between two steps (a test, loading the next batch) is not part of them. Their peak is `between`, of the next step.
    """

    budget: Budget
    options: Mapping[str, Any] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    solves: int = 0
    solve_seconds: float = 0.0
    reports: list[str] = field(default_factory=list)
    measured: int | None = None
    _states: list[Any] = field(default_factory=list)
    _resting: Resting = field(default_factory=Resting)
    _base: int = 0
    _live: int = 0
    _watched: bool = False
    _is_watched: bool = False  # in any step so far
    _is_over: bool = False
    _peak: int = 0
    _between: int = 0

    def __call__(self, model: nn.Module, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.budget is None else self._optimized(model, optimizer)

    @contextlib.contextmanager
    def _optimized(self, model: nn.Module, optimizer: Any) -> Iterator[Any]:
        assert self.budget is not None
        with optimize(model, optimizer, budget=self.budget, **self.options) as run:
            yield run
            self.reports.append(run.report())

    def strategy(self) -> Any:
        if self.budget is None:
            return "auto"
        from lightning_memopt import MemOptStrategy

        return MemOptStrategy(budget=self.budget, **self.options)

    def callbacks(self) -> list[Any]:
        if self.budget is None:
            return []
        from lightning_memopt import MemOptTrainerCallback

        return [MemOptTrainerCallback(budget=self.budget, **self.options)]

    def fabric_strategy(self) -> Any:
        if self.budget is None:
            return "auto"
        from lightning_memopt import MemOptFabricStrategy

        return MemOptFabricStrategy(budget=self.budget, **self.options)

    def prepare(self, accelerator: Any, *objects: Any) -> Any:
        if self.budget is None:
            return accelerator.prepare(*objects)
        from lightning_memopt.accelerate import prepare

        return prepare(accelerator, *objects, budget=self.budget, **self.options)

    def begin(self) -> None:
        self._base = self._live = live_nbytes() or 0
        true_peak()

    def log(self, *values: Any) -> None:
        """A step is over."""
        peak, live = true_peak(), live_nbytes()
        after = (peak or 0) - self._base if self._is_over else 0
        if peak is not None:
            peak = self._peak if self._is_over else max(self._peak, peak)
        self.losses.append(digest(values))
        planned = bool(self._states) and all(isinstance(state, Running) for state in self._states)
        plans = [state.plan for state in self._states] if planned else []
        for state in self._states:
            if isinstance(state, Running) and state.peaks.measured_nbytes is not None:
                self.measured = max(self.measured or 0, state.peaks.measured_nbytes)
        entry = {
            "began": self._live - self._base,
            "peak": None if peak is None else peak - self._base,
            "between": self._between,
            "predicted": max((plan.predicted.needed_nbytes for plan in plans), default=None),
            "promised": max((plan.budget_nbytes for plan in plans), default=None),
            **self._resting.step(plans),
            "dropped": max((plan.predicted.rebuilt_nbytes for plan in plans), default=0),
        }
        self.steps.append(entry)
        self._live = live or 0
        self._states.clear()
        self._watched = self._is_over = False
        self._peak, self._between = 0, after
        true_peak()

    @contextlib.contextmanager
    def doors(self) -> Iterator[None]:
        """Watch what the package does, at the functions through which it is asked."""
        solve = planner.solve

        def solved(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return solve(*args, **options)
            finally:
                self.solves += 1
                self.solve_seconds += time.perf_counter() - began

        def began(state: State | None) -> None:
            self._states.append(state)
            self._resting.round_began(state)

        planner.solve = solved  # type: ignore[assignment]
        try:
            with self._resting.doors(), rounds(self._round_begins, began, self._step_ended):
                yield
        finally:
            planner.solve = solve

    def _round_begins(self) -> None:
        if self._is_over or not self._watched:
            self._between = max(self._between, (true_peak() or 0) - self._base)
        self._is_watched = True
        self._watched, self._is_over = True, False

    def _step_ended(self) -> None:  # a step of GANs or of Lightning may have several, with a plan each
        peak = true_peak() or 0
        if self._watched or not self.steps or not self._is_watched:
            self._is_over, self._peak = True, max(self._peak, peak)
        else:  # a step that updates in hooks ends when the next one begins: that is not the next one's
            self.steps[-1]["peak"] = max(self.steps[-1]["peak"] or 0, peak - self._base)


@contextlib.contextmanager
def rounds(
    begins: Callable[[], None], began: Callable[[State | None], None], ended: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Watch the steps: before a forward of training begins, then with the state that it belongs to, and after the update."""
    begin, end = Session._begin_round, Session.step_ended

    def watched(session: Session, batch: Any, part: Any) -> Any:
        begins()
        recording = begin(session, batch, part)
        began(session._current)
        return recording

    def ends(session: Session) -> None:
        end(session)
        ended()

    Session._begin_round, Session.step_ended = watched, ends  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session._begin_round, Session.step_ended = begin, end  # type: ignore[method-assign]


def outcome(script: Script, budget: Budget) -> dict[str, Any]:
    """Train, and say what came of it. Refusals and errors are part of that."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    warnings.simplefilter("always")
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"  # without the code's line
    watch = Watching(budget, script.options)
    result: dict[str, Any] = {"status": "trained"}
    began = time.perf_counter()
    with watch.doors():
        watch.begin()
        try:
            results = script.train(watch, watch.log, script.steps)
            result |= {"state": digest(results), "generators": generators()}
        except InfeasibleError as error:
            result |= {"status": "refused", "smallest": error.smallest_nbytes, "error": str(error)}
        except BaseException as error:  # whatever ends a run is its outcome
            where = "".join(traceback.format_exception(error))
            result |= {"status": "crashed", "error": f"{type(error).__name__}: {error}"[:600], "traceback": where[-4000:]}
    return result | {
        "losses": watch.losses,
        "steps": watch.steps,
        "solves": watch.solves,
        "solve_seconds": watch.solve_seconds,
        "measured_by_session": watch.measured,
        "reports": watch.reports,
        "seconds": time.perf_counter() - began,
    }


def _says(text: str) -> list[str]:
    """Lines of this package, once each, without where they came from."""
    lines = [line for line in text.splitlines() if "MemOpt: " in line]
    return list(dict.fromkeys(_PREFIX.sub("", line, count=1) for line in lines))


def forked(script: Script, budget: Budget) -> dict[str, Any]:
    """`outcome` in a child of this process, so that nothing is left of earlier runs, and a crash ends no more than it."""
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # each session collects garbage: not of all that was imported
        child = os.fork()
        if child == 0:
            code = 1
            try:
                written = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(written, 1)
                os.dup2(written, 2)
                signal.alarm(TIMEOUT)
                answer.write_text(json.dumps(outcome(script, budget)))
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        text = output.read_text(errors="replace") if output.exists() else ""
        if answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text())
        else:
            number = os.waitstatus_to_exitcode(status)
            why = f"no end after {TIMEOUT} s" if number == -signal.SIGALRM else f"the process ended with {number}"
            result = {"status": "crashed", "error": why, "traceback": text[-2000:], "losses": [], "steps": []}
        result["said"] = _says(text)
        result["output"] = [line for line in text.splitlines() if line.strip() and "MemOpt" not in line][:40]
        return result
