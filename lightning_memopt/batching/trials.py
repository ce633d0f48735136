"""Real steps at a given size: unwatched, observed, or measured; what runs out of memory leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from lightning_memopt.batching.batches import Exhausted
from lightning_memopt.batching.oom import is_out_of_memory, release
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.session import Session
from lightning_memopt.session.buckets import Observing, Running
from lightning_memopt.session.budget import resident_nbytes, resident_tensors
from lightning_memopt.session.step import StepMeter

_OBSERVED = 1 << 20
"""Steps to observe before a plan is solved: never."""


class Source(Protocol):
    """Where batches come from. `size`: what it makes now; `cap`: no batch is larger; `copies`: how many are there at once."""

    size: int
    cap: int | None
    copies: int

    def batch(self, size: int) -> Any: ...


Step = Callable[[Any, Session | None, bool], None]
"""`step(batch, session, whole)`: one training step, update included; it tells the session, where there is one, of its rounds
and updates. `whole`: the batch is all samples of its update; else gradients of batches before it are there, and stay."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A step that ran, or did not: `fits`, and the peak where it was measured. `kind`: what it was run for."""

    kind: str
    size: int
    steps: int
    fits: bool
    peak_nbytes: int | None = None


class Trials:
    """Runs steps, counts them, and says which did not fit.

    `config`: how the run will plan, where it does; None for a run without plans. `budget_nbytes` is what a step may take.
    `effective`: samples an update, where they are accumulated; None: every batch has its update.
    """

    def __init__(
        self,
        step: Step,
        source: Source,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        budget_nbytes: int | None,
        config: MemOptConfig | None,
        effective: int | None = None,
    ) -> None:
        self.effective = effective
        self.step, self.source, self.model, self.optimizers = step, source, model, optimizers
        self.device, self.budget_nbytes, self.config = device, budget_nbytes, config
        self.done: list[Trial] = []
        self._unmetered: list[weakref.ref[Any]] = []

    def warm(self, size: int) -> bool:
        """An unwatched step, which makes what a first step makes: optimizer state, gradients, a library's workspaces.

        With plans it is observed within the budget, and the graph thrown away.
        """
        if self.config is not None:
            return self.observe(size, "warm-up") is not None
        with self._running("warm-up", size):
            self.step(self.source.batch(size), None, self.effective is None)
        self._unmetered = [weakref.ref(g.untyped_storage()) for g in self._gradients()]
        return self.done[-1].fits

    def observe(self, size: int, kind: str = "profile") -> Graph | None:
        """The graph of one step at this size, update included; None where it does not fit."""
        config = self.config or MemOptConfig(budget="min")
        quiet = dataclasses.replace(config, profile_steps=_OBSERVED, plan=None, verify=False, verbose=False)
        found: Graph | None = None
        with self._running(kind, size), self._session(quiet) as session:
            self.step(self.source.batch(size), session, self.effective is None)
            session.step_ended()
            state = session.current
            found = state.graphs[-1] if isinstance(state, Observing) and state.graphs else None
        return found if self.done[-1].fits else None

    def confirm(self, size: int) -> Trial:
        """Real steps of the run to come at this size, measured: one; with plans an observed and a planned one."""
        if self.config is not None:
            return self._planned(size, self.config)
        peak: int | None = None
        with self._running("trial", size):
            batch = self.source.batch(size)
            resident = resident_nbytes(resident_tensors(self.model, self.optimizers, batch), self.device)
            unseen = {id(ref()) for ref in self._unmetered}
            gradients = [g for g in self._gradients() if id(g.untyped_storage()) in unseen]
            meter = StepMeter(self.device, resident, gradients)
            try:
                self.step(batch, None, self._whole(size))
                del batch
            finally:
                peak = meter.close()
        return self._judged(peak)

    def _whole(self, size: int) -> bool:
        return self.effective is None or size == self.effective

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _planned(self, size: int, config: MemOptConfig) -> Trial:
        quiet = dataclasses.replace(config, profile_steps=1, plan=None, on_exceed="warn", verify=False, verbose=False)
        peak: int | None = None
        with self._running("trial", size, steps=2), self._session(quiet) as session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                self.step(self.source.batch(size), session, self._whole(size))
                session.step_ended()
            state = session.main
            peak = state.measured_bytes if isinstance(state, Running) else None
        return self._judged(peak)

    def _judged(self, peak: int | None) -> Trial:
        """The last trial, with what was measured: a step above the budget does not fit."""
        last = self.done[-1]
        over = peak is not None and self.budget_nbytes is not None and peak > self.budget_nbytes
        self.done[-1] = dataclasses.replace(last, fits=last.fits and not over, peak_nbytes=peak if last.fits else None)
        return self.done[-1]

    @contextlib.contextmanager
    def _session(self, config: MemOptConfig) -> Iterator[Session]:
        session = Session(self.model, self.optimizers, config)
        try:
            yield session
        finally:
            session.close()

    @contextlib.contextmanager
    def _running(self, kind: str, size: int, steps: int = 1) -> Iterator[None]:
        """Around the steps of a trial: running out of memory, of the device or of plans, is its result."""
        try:
            yield
        except Exhausted:
            raise
        except Exception as error:
            if not isinstance(error, InfeasibleError) and not is_out_of_memory(error):
                raise
            for p in self.model.parameters():
                p.grad = None  # of a backward that did not end
            release(error)
            self.done.append(Trial(kind, size, steps, False))
        else:
            self.done.append(Trial(kind, size, steps, True))
