"""Run real training steps at a given batch size: a warm-up, an observed step, or a measured one.

A step that runs out of memory leaves no tensors behind; its result is that the size does not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from lightning_memopt.batching.batches import TooFewSamplesError
from lightning_memopt.batching.energy import MeasuredEnergy, StepEnergy
from lightning_memopt.batching.oom import is_out_of_memory, release
from lightning_memopt.config import ONLY_OBSERVED, MemOptConfig
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.native import counter
from lightning_memopt.ranks import buckets_nbytes
from lightning_memopt.session import Session
from lightning_memopt.session.measure.peak_meter import StepMeter
from lightning_memopt.session.observe.resident import foreign_nbytes, resident_nbytes, resident_tensors
from lightning_memopt.torch_private import gradient_of, tree_map
from lightning_memopt.trace import count_all

_TILED_STEPS = 8
"""Maximum number of steps until one runs by a plan in tiles (session/loss_head.py)."""


def _quietly(config: MemOptConfig, **options: Any) -> MemOptConfig:
    """The config of a trial: nothing is said, verified, or taken from the user's plan."""
    return dataclasses.replace(config, plan=None, verify=False, verbose=False, **options)


class BatchSource(Protocol):
    """Makes batches of any size.

    size: samples of a batch before the search.
    cap: maximum number of samples of a batch; None if it is not known.
    copies: number of batches that are in the host's memory at once during training.
    """

    size: int
    cap: int | None
    copies: int

    def batch(self, size: int) -> Any:
        """A batch of `size` samples. Raises TooFewSamplesError if the data has fewer."""


Step = Callable[[Any, Session | None, bool], None]
"""`step(batch, session, whole)` runs one training step, update included. If a session is given, the step calls its rounds and
updates. `whole`: the batch has all samples of its update; if not, gradients of earlier batches exist and are kept."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Steps of one batch size that were run for one purpose.

    kind: the purpose: "warm-up", "profile", "trial", "energy" or, with several ranks, "rehearsal" (of a trial without
        collectives).
    size: samples of a batch.
    steps: number of steps that began.
    fits: whether they ended within the memory that they may use.
    peak_nbytes: measured peak; None if it was not measured.
    """

    kind: str
    size: int
    steps: int
    fits: bool
    peak_nbytes: int | None = None


@dataclasses.dataclass
class _Outcome:
    """The result of a trial. `peak_nbytes`: measured peak, None if not measured. `fits` is set when the trial has ended."""

    peak_nbytes: int | None = None
    fits: bool = False


class Trials:
    """Runs real steps, counts them in `done`, and reports which sizes fit.

    Args:
        step: runs one training step.
        source: makes the batches.
        model, optimizers: what the step trains.
        device: the training device.
        budget_nbytes: bytes that a step may use.
        config: options of the run that will follow; None if it has no plans.
        effective: samples of an update if gradients are accumulated over batches; None if every batch has its update.
        cap: the largest size that may be tried. Lowered when the data turns out to have fewer samples.
    """

    _together = False
    """Whether other ranks run the same steps."""

    def __init__(
        self,
        step: Step,
        source: BatchSource,
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
        self.measured: MeasuredEnergy | None = None
        """Energy of the size that was last confirmed; None if it was not measured."""
        self.energy: StepEnergy | None = None
        self._step = step
        self._begun = 0  # number of steps that began
        self._unmetered: list[weakref.ref[Any]] = []  # storages of gradients that were allocated before any `StepMeter`
        if on_host(device):
            count_all(lambda _: None)

    # -- kinds of steps ---------------------------------------------------------------------------

    def warm(self, size: int) -> bool:
        """Run one step, so that optimizer state, gradients and workspaces of libraries exist. Returns whether it fitted.

        With plans the step is observed within the budget, and its graph is thrown away.
        """
        if self.config is not None:
            return Trials.observe(self, size, "warm-up") is not None  # not as a trial of its own, where several ranks run it
        with self._running("warm-up", size) as trial:
            self._run(self._batch(size), None, self.effective is None)
        self._unmetered = [weakref.ref(g.untyped_storage()) for g in self._gradients()]
        return trial.fits

    def observe(self, size: int, kind: str = "profile") -> Graph | None:
        """The graph of one step of this size, update included; None if it does not fit, or the data has no such batch."""
        config = self.config or MemOptConfig(budget="min")
        quiet = _quietly(config, profile_steps=ONLY_OBSERVED)
        graph: Graph | None = None
        with self._running(kind, size) as trial, self._session(quiet) as session:
            self._run(self._batch(size), session, self.effective is None)
            session.step_ended()
            graph = session.observed_graph
        return graph if trial.fits else None

    def observe_tiles(self, size: int) -> Graph | None:
        """The graph of one step of this size whose loss head runs in the smallest tiles; None if the step does not fit, or no
        head runs in tiles.
        """
        assert self.config is not None
        quiet = _quietly(self.config, budget="min", profile_steps=1, pool=None)
        graph: Graph | None = None
        with self._running("profile", size) as trial, self._session(quiet) as session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(_TILED_STEPS):
                self._run(self._batch(size), session, self.effective is None)
                session.step_ended()
                if session.plan is not None:
                    break
            status = session.status()
            if status.plan is not None and status.plan.tiles:
                graph = status.graph
        return graph if trial.fits else None

    def confirm(self, size: int, measure_energy: bool = False) -> Trial | None:
        """Run and measure steps as the run that follows will: one step; with plans, an observed and a planned one.

        Returns None if the data has no such batch. `measure_energy`: also repeat the step to measure its energy into
        `measured`, if it fits and one batch is a whole update.
        """
        trials_before = len(self.done)
        self.measured = None
        measure_energy = measure_energy and self._whole(size)
        if self.config is not None:
            self._planned(size, self.config, measure_energy)
        elif self._unplanned(size) and measure_energy:
            self.measured = self.measure_energy(size)
        return next((trial for trial in self.done[trials_before:] if trial.kind == "trial"), None)

    def _unplanned(self, size: int) -> bool:
        """Measure one step without a plan. Returns whether it fits."""
        with self._running("trial", size) as trial:
            batch = self._batch(size)
            tensors = list(resident_tensors(self.model, self.optimizers, batch))
            resident = resident_nbytes(tensors, self.device) + buckets_nbytes(self.model)
            foreign = foreign_nbytes(tensors, counter())
            del tensors
            unmetered = {id(ref()) for ref in self._unmetered}
            gradients = [g for g in self._gradients() if id(g.untyped_storage()) in unmetered]
            meter = StepMeter(self.device, resident, gradients, foreign)
            try:
                self._run(batch, None, self._whole(size))
                del batch
            finally:
                trial.peak_nbytes = meter.close()
        return trial.fits

    def _planned(self, size: int, config: MemOptConfig, measure_energy: bool) -> None:
        """Measure an observed step and a planned one; with tiles, several steps are observed before."""
        steps = 2 if config.tile == "off" else _TILED_STEPS
        quiet = _quietly(config, profile_steps=1, pool=None, on_exceed="warn")
        with self._running("trial", size) as trial, self._session(quiet) as session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(steps):
                self._run(self._batch(size), session, self._whole(size))
                session.step_ended()
                trial.peak_nbytes = session.status().measured_peak_nbytes
                if trial.peak_nbytes is not None and not self._together:
                    break
            if measure_energy and not self._over(trial.peak_nbytes):
                self.measured = self.measure_energy(size, session)

    def measure_energy(self, size: int, session: Session | None = None) -> MeasuredEnergy | None:
        """Repeat steps of a size that fits and measure their energy; None without a meter, or if the data has no such batch."""
        if self.energy is None:
            return None
        measured: MeasuredEnergy | None = None
        with self._running("energy", size):
            batch = self._batch(size)

            def run_once() -> None:
                # new dicts and lists for each step, because a step may take items out of its batch
                self._run(tree_map(lambda t: t, batch), session, self._whole(size))
                if session is not None:
                    session.step_ended()

            run_once()  # the first step at a size does extra work, which is not measured
            measured = self.energy.measure(run_once, size)
        return measured

    # -- common to all kinds -----------------------------------------------------------------------

    def _batch(self, size: int) -> Any:
        return self.source.batch(size)

    def _too_large(self, error: Exception) -> bool:
        """Whether an error that ended a trial means that its size does not fit, so that the search goes on."""
        return isinstance(error, InfeasibleError) or is_out_of_memory(error)

    def _run(self, batch: Any, session: Session | None, whole: bool) -> None:
        self._begun += 1
        self._step(batch, session, whole)

    def _whole(self, size: int) -> bool:
        """Whether a batch of this size has all samples of its update."""
        return self.effective is None or size == self.effective

    def _gradients(self) -> list[torch.Tensor]:
        return [g for p in self.model.parameters() if (g := gradient_of(p)) is not None]

    def _over(self, peak_nbytes: int | None) -> bool:
        return peak_nbytes is not None and peak_nbytes > self.budget_nbytes

    @contextlib.contextmanager
    def _session(self, config: MemOptConfig) -> Iterator[Session]:
        session = Session(self.model, self.optimizers, config)
        try:
            yield session
        except Exception as error:
            session.ended_by(error)  # so that no other rank waits for this one
            raise
        finally:
            session.close()

    @contextlib.contextmanager
    def _running(self, kind: str, size: int) -> Iterator[_Outcome]:
        """Run the steps of a trial inside this context, and add the `Trial` to `done`.

        A trial does not fit if memory ran out, if no plan fits, or if the measured peak is above the budget. If the data has no
        such batch, nothing is added and `cap` is lowered. Trials may be nested.
        """
        trials_before, begun_before = len(self.done), self._begun
        ran = False
        outcome = _Outcome()
        try:
            yield outcome
        except TooFewSamplesError as error:
            if error.available < 1:
                raise ConfigError("The data gave no sample. Give a loader with data.") from None
            self.cap = min(self.cap, error.available)
            return
        except Exception as error:
            if not self._too_large(error):
                raise
            for p in self.model.parameters():
                p.grad = None  # an interrupted backward left partial gradients
            release(error)
        else:
            ran = True
            outcome.fits = not self._over(outcome.peak_nbytes)
        steps_of_nested = sum(trial.steps for trial in self.done[trials_before:])
        steps = self._begun - begun_before - steps_of_nested
        self.done.insert(trials_before, Trial(kind, size, steps, outcome.fits, outcome.peak_nbytes if ran else None))
