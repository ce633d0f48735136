"""An exception at any line that runs a loss head in tiles: it reaches the loop, logits that the loop holds can be read, the
next steps train with the bits of the plain loop, and nothing stays when the run is over.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lightning_memopt
from lightning_memopt import optimize
from lightning_memopt.record import interrupts, numeric_flags
from lightning_memopt.runtime.tiles import TileMode
from tests.cpu.lib.device_thread import in_both_threads
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.kept import Kept
from tests.cpu.lib.loops import leaves_nothing, no_step_is_measured, sgd
from tests.cpu.tiles.language_model import LanguageModel

pytestmark = needs_tiles
_PACKAGE = Path(lightning_memopt.__file__).parent
_FILES = {str(p) for p in (_PACKAGE / "runtime/tiles").glob("*.py")}
_FILES |= {str(_PACKAGE / "session" / name) for name in ("tiling.py", "loss_head.py")}
Line = tuple[str, int]
"""File and number of a line."""


class Boom(Exception):
    pass


ERRORS = (Boom, KeyboardInterrupt)
IDS = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(7))


class _Small(LanguageModel):
    """With 512 classes and one block."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 32)
        self.blocks = self.blocks[:1]
        self.head = torch.nn.Linear(32, 512, bias=False)


@contextlib.contextmanager
def _traced(told: Callable[[Line], None]) -> Iterator[None]:
    """Tells of each line that runs."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            told((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename in _FILES else None

    in_both_threads(lambda: sys.settrace(call))
    try:
        yield
    finally:
        in_both_threads(lambda: sys.settrace(None))


def _same(given: list[torch.Tensor], expected: list[np.ndarray]) -> bool:
    return all(a.numpy().tobytes() == b.tobytes() for a, b in zip(given, expected, strict=True))


class _Bench:
    """A model in a run, a plain twin, and the problems that were found. `holds`: each step holds its logits, which are read
    when it is over, or has failed.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        self.model, self.twin = _Small(), _Small()
        self.optimizer, self.other = sgd(self.model), sgd(self.twin)
        self.problems: list[str] = []

    def _trains(self, model: torch.nn.Module, held: list[torch.Tensor]) -> torch.Tensor:
        logits = model(IDS)[0]
        if self._holds:
            held.append(logits.detach())
        best = logits.detach().argmax(-1)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
        del logits
        loss.backward()
        return torch.stack([loss.detach(), best.sum()])

    def step(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a step gives, and what it leaves."""
        result = self._trains(self.model, held)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [result, *Kept(self.model, self.optimizer).now()]

    def plain(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The same of a plain step from the same state, and its logits. The generator is as before. No tensor is made that the
        step of the run would count as held by others.
        """
        now, twin = Kept(self.model, self.optimizer), Kept(self.twin, self.other)
        twin.state, twin.rng = now.state, now.rng
        twin.back()
        held = list[torch.Tensor]()
        result = self._trains(self.twin, held)
        self.other.step()
        self.other.zero_grad()
        left = [result, *Kept(self.twin, self.other).now()]
        torch.set_rng_state(now.rng)
        return [t.numpy().copy() for t in left], [t.numpy().copy() for t in held]

    def read(self, what: str, held: list[torch.Tensor], expected: list[np.ndarray]) -> None:
        """What the loop holds has the bits of the plain step."""
        try:
            if not _same([t.clone() for t in held], expected[: len(held)]):  # a forward that fails gives none
                self.problems.append(f"{what}: logits have other bits")
        except Exception as error:
            self.problems.append(f"{what}: logits: {error!r}")

    def same(self, what: str) -> None:
        """A step is as the plain one."""
        held = list[torch.Tensor]()
        expected, logits = self.plain()
        try:
            given = self.step(held)
        except BaseException as error:
            self.problems.append(f"{what}: {error!r} in the next step")
            self.optimizer.zero_grad()
            return
        if not _same(given, expected):
            self.problems.append(f"{what}: the next step gives other bits")
        self.read(what, held, logits)

    def lines(self) -> list[Line]:
        """The lines that a step runs."""
        found = dict[Line, None]()
        with _traced(lambda line: found.setdefault(line)):
            self.step([])
        return list(found)

    def fault(self, at: Line, kind: type[BaseException], last: int = 1) -> None:
        """A step with an exception at this line, when it runs for the `last` time."""
        what = f"{Path(at[0]).name}:{at[1]} {linecache.getline(*at).strip()}: {kind.__name__}"
        error = kind(what)
        left = last
        flags = numeric_flags()
        caught: BaseException | None = None

        def told(line: Line) -> None:
            nonlocal left
            if line == at:
                left -= 1
                if not left:
                    raise error

        held = list[torch.Tensor]()
        expected, logits = self.plain()
        try:
            with _traced(told):
                given = self.step(held)
        except BaseException as raised:
            caught = raised
        assert left <= 0, f"{what}: did not run"
        if not caught and interrupts.DEFERRED:  # in a destructor: it comes with the next step
            caught = interrupts.DEFERRED.pop()
        if caught is None and not (kind is Boom and _same(given, expected)):
            self.problems.append(f"{what}: was lost")
        if caught is not None and caught is not error:
            self.problems.append(f"{what}: {caught!r} instead")
        if numeric_flags() != flags or not torch.is_grad_enabled():
            self.problems.append(f"{what}: other settings")
        caught = error.__traceback__ = None
        self.read(what, held, logits)
        self.optimizer.zero_grad()
        held.clear()
        self.same(what)


@contextlib.contextmanager
def _training(phase: str, steps: int, holds: bool = True) -> Iterator[tuple[_Bench, Any]]:
    """A run after so many steps, of which the next is in this phase. Nothing of it stays behind the block."""
    bench = _Bench(holds)
    with leaves_nothing(bench.model):
        with optimize(bench.model, bench.optimizer, budget="min", tile="exact", verbose=False, profile_steps=1) as run:
            for _ in range(steps):
                bench.step([])
            assert _phase(run) == phase
            yield bench, run
    del run
    gc.collect()
    assert not any(type(o) is TileMode for o in gc.get_objects())
    assert not bench.problems, "\n".join(bench.problems)


def _phase(run: Any) -> str:
    return "planned" if run.plan is not None and run.plan.tiles else run.session._tiling._now.phase


PHASES = ("look", "prove", "tiled", "tiled", "planned")


def _lines(phase: str, steps: int, holds: bool = True) -> list[Line]:
    with _training(phase, steps, holds) as (bench, _):
        return bench.lines()


@pytest.mark.parametrize("every", (15, pytest.param(4, marks=pytest.mark.long)))
@pytest.mark.parametrize("holds", (True, False))
def test_faults_in_planned_steps(monkeypatch, holds, every):
    """At some lines of steps whose logits are held, and of others."""
    no_step_is_measured(monkeypatch)  # else a step with a fault takes more than its plan says, and the next one is observed
    with _training("planned", 5, holds) as (bench, run):
        lines = bench.lines()
        assert len(lines) > 400
        for k, line in enumerate(lines[holds::every]):
            bench.fault(line, ERRORS[k % 2])
            assert _phase(run) == "planned"


@pytest.mark.long
@pytest.mark.parametrize("steps", range(4), ids=("look", "prove", "tiled", "tiled as well"))
def test_faults_in_observed_steps(steps):
    """At some lines of the step."""
    phase = PHASES[steps]
    for k, line in enumerate(_lines(phase, steps)[steps::41]):
        with _training(phase, steps) as (bench, _):
            bench.fault(line, ERRORS[k % 2])
            for _ in range(4):
                bench.same(f"{line}, later")
