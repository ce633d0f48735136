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
from lightning_memopt.batching.energy import Spent, StepEnergy
from lightning_memopt.batching.oom import is_out_of_memory, release
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.session import Session
from lightning_memopt.session.budget import foreign_nbytes, resident_nbytes, resident_tensors
from lightning_memopt.session.peak_meter import StepMeter
from lightning_memopt.torch_private import tree_map
from lightning_memopt.trace import count_all

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
    """Steps that ran, or did not: `fits`, and the peak where it was measured. `kind`: what they were run for, "warm-up",
    "profile", "trial" or "energy"."""

    kind: str
    size: int
    steps: int
    fits: bool
    peak_nbytes: int | None = None


@dataclasses.dataclass
class _Outcome:
    """What a trial comes to; `fits` is known when it is over."""

    peak_nbytes: int | None = None
    fits: bool = False


class Trials:
    """Runs steps, counts them, and says which did not fit.

    `config`: how the run will plan, where it does; None for a run without plans. `budget_nbytes` is what a step may take.
    `effective`: samples an update, where they are accumulated; None: every batch has its update. `cap`: no size is larger, as
    asked for or as the data is seen to give.
    """

    def __init__(
        self,
        step: Step,
        source: Source,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        budget_nbytes: int,
        config: MemOptConfig | None,
        effective: int | None,
        cap: int,
    ) -> None:
        self.source, self.model, self.optimizers, self.effective = source, model, optimizers, effective
        self.device, self.budget_nbytes, self.config = device, budget_nbytes, config
        self.cap = min(cap, source.cap or cap)
        self.done: list[Trial] = []
        self.spent: Spent | None = None
        """Of the size that was last confirmed, where that was asked for."""
        self.energy: StepEnergy | None = None
        self._step, self._begun = step, 0
        self._unmetered: list[weakref.ref[Any]] = []
        if device.type == "cpu":
            count_all(lambda _: None)

    # -- three kinds of steps ----------------------------------------------------------------------

    def warm(self, size: int) -> bool:
        """An unwatched step, which makes what a first step makes: optimizer state, gradients, a library's workspaces.

        With plans it is observed within the budget, and the graph thrown away.
        """
        if self.config is not None:
            return self.observe(size, "warm-up") is not None
        with self._running("warm-up", size) as trial:
            self._run(self.source.batch(size), None, self.effective is None)
        self._unmetered = [weakref.ref(g.untyped_storage()) for g in self._gradients()]
        return trial.fits

    def observe(self, size: int, kind: str = "profile") -> Graph | None:
        """The graph of one step at this size, update included; None where it does not fit, or the data has no such batch."""
        config = self.config or MemOptConfig(budget="min")
        quiet = dataclasses.replace(config, profile_steps=_OBSERVED, plan=None, verify=False, verbose=False)
        graph: Graph | None = None
        with self._running(kind, size) as trial, self._session(quiet) as session:
            self._run(self.source.batch(size), session, self.effective is None)
            session.step_ended()
            graph = session.observed_graph
        return graph if trial.fits else None

    def confirm(self, size: int, spend: bool = False) -> Trial | None:
        """Real steps of the run to come at this size, measured: one; with plans an observed and a planned one. None: the data
        has no such batch. `spend`: where they fit, and a batch is an update, `spent` is filled from more of them.
        """
        before, self.spent = len(self.done), None
        spend = spend and self._whole(size)
        if self.config is not None:
            self._planned(size, self.config, spend)
        elif self._unplanned(size) and spend:
            self.spent = self.spend(size)
        return next((t for t in self.done[before:] if t.kind == "trial"), None)

    def _unplanned(self, size: int) -> bool:
        with self._running("trial", size) as trial:
            batch = self.source.batch(size)
            tensors = list(resident_tensors(self.model, self.optimizers, batch))
            resident, foreign = resident_nbytes(tensors, self.device), foreign_nbytes(tensors)
            del tensors
            unseen = {id(ref()) for ref in self._unmetered}
            gradients = [g for g in self._gradients() if id(g.untyped_storage()) in unseen]
            meter = StepMeter(self.device, resident, gradients, foreign)
            try:
                self._run(batch, None, self._whole(size))
                del batch
            finally:
                trial.peak_nbytes = meter.close()
        return trial.fits

    def _planned(self, size: int, config: MemOptConfig, spend: bool) -> None:
        quiet = dataclasses.replace(config, profile_steps=1, plan=None, on_exceed="warn", verify=False, verbose=False)
        with self._running("trial", size) as trial, self._session(quiet) as session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                self._run(self.source.batch(size), session, self._whole(size))
                session.step_ended()
            trial.peak_nbytes = session.status().measured_peak_nbytes
            if spend and not self._over(trial.peak_nbytes):
                self.spent = self.spend(size, session)

    def spend(self, size: int, session: Session | None = None) -> Spent | None:
        """Steps at a size that fits, repeated while energy is read; None where it is not, or the data has no such batch."""
        if self.energy is None:
            return None
        found: Spent | None = None
        with self._running("energy", size):
            batch = self.source.batch(size)

            def again() -> None:
                self._run(tree_map(lambda t: t, batch), session, self._whole(size))  # dicts and lists of its own, to take from
                if session is not None:
                    session.step_ended()

            again()  # what only a first step at this size does is not measured
            found = self.energy.measure(again, size)
        return found

    # -- around them -------------------------------------------------------------------------------

    def _run(self, batch: Any, session: Session | None, whole: bool) -> None:
        self._begun += 1
        self._step(batch, session, whole)

    def _whole(self, size: int) -> bool:
        return self.effective is None or size == self.effective

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _over(self, peak_nbytes: int | None) -> bool:
        return peak_nbytes is not None and peak_nbytes > self.budget_nbytes

    @contextlib.contextmanager
    def _session(self, config: MemOptConfig) -> Iterator[Session]:
        session = Session(self.model, self.optimizers, config)
        try:
            yield session
        finally:
            session.close()

    @contextlib.contextmanager
    def _running(self, kind: str, size: int) -> Iterator[_Outcome]:
        """Around the steps of a trial: running out of memory, of the device or of plans, is its result, and so is a peak above
        the budget. Where the data has no such batch, nothing ran, and `cap` is lowered. Trials may be nested."""
        at, begun, ran = len(self.done), self._begun, False
        outcome = _Outcome()
        try:
            yield outcome
        except Exhausted as short:
            if short.there < 1:
                raise ConfigError("The data gave no sample. Give a loader with data.") from None
            self.cap = min(self.cap, short.there)
            return
        except Exception as error:
            if not isinstance(error, InfeasibleError) and not is_out_of_memory(error):
                raise
            for p in self.model.parameters():
                p.grad = None  # of a backward that did not end
            release(error)
        else:
            ran, outcome.fits = True, not self._over(outcome.peak_nbytes)
        steps = self._begun - begun - sum(t.steps for t in self.done[at:])
        self.done.insert(at, Trial(kind, size, steps, outcome.fits, outcome.peak_nbytes if ran else None))
