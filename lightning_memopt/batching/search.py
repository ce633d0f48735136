"""Find a batch size: profile two small sizes, predict every other one, confirm one with real steps; where that fails, bisect.

Everything runs inside `untouched`: afterwards weights, optimizer state, generators, gradients and attributes are bit by bit
what they were. Only a size that ran, and fitted, is ever the answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memopt.batching.batches import Exhausted, host_cap, nbytes_of
from lightning_memopt.batching.choose import MODES, Choice, Chooser, Mode
from lightning_memopt.batching.fit import FitError, StepFit, fit
from lightning_memopt.batching.trials import Source, Step, Trial, Trials
from lightning_memopt.batching.untouched import untouched
from lightning_memopt.config import MemOptConfig, device_nbytes, disabled
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.runtime import Program
from lightning_memopt.session import costs
from lightning_memopt.session.observation import smoothed
from lightning_memopt.solvers import planner
from lightning_memopt.units import format_nbytes
from lightning_memopt.versions import supported

Permitted = Callable[[int], Sequence[int]]
"""The sizes that may be chosen, up to a limit, rising."""

CLOSE = 0.02
"""Bisection ends where the smallest size that failed is this share above the largest one that ran."""
_UNLIMITED = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """The batch size that was found, and how.

    `predicted_peak_bytes`, `samples_per_second` and `joules_per_sample` are predictions, None where nothing could be fitted;
    `confirmed_peak_bytes` was measured, in a real step at this size, None where another profiler was running. `trials` are
    all steps that ran; `trial_steps` those beyond the profile. `why` says why the first prediction was not the answer; empty
    where it was.
    """

    size: int
    before: int
    mode: Mode
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    confirmed_peak_bytes: int | None
    samples_per_second: float | None
    joules_per_sample: float | None
    planned: bool
    trials: tuple[Trial, ...]
    why: str = ""

    @property
    def trial_steps(self) -> int:
        return sum(t.steps for t in self.trials if t.kind == "trial")

    @property
    def profile_steps(self) -> int:
        return sum(t.steps for t in self.trials if t.kind != "trial")

    def __str__(self) -> str:
        def nbytes(n: int | None) -> str:
            return "unknown" if n is None else format_nbytes(n)

        rate = "" if self.samples_per_second is None else f", {self.samples_per_second:.1f} samples/s predicted"
        energy = "" if self.joules_per_sample is None else f", {self.joules_per_sample:.3g} J/sample predicted"
        how = f"{self.trial_steps} trial steps beyond {self.profile_steps} profiled"
        how += f", because {self.why}" if self.why else ""
        return (
            f"MemOpt: batch {self.before} -> {self.size} ({self.mode}{', with a plan' if self.planned else ''}): peak "
            f"{nbytes(self.predicted_peak_bytes)} predicted, {nbytes(self.confirmed_peak_bytes)} confirmed of "
            f"{nbytes(self.budget_bytes)}{rate}{energy}; {how}"
        )


@dataclass(kw_only=True)
class Search:
    """What to search, and within what. `find` does it.

    Args:
        step: one whole training step on a batch, update included.
        source: where batches come from.
        model, optimizers: what the step trains.
        keep: whatever else a step may change: a datamodule, schedulers, a precision plugin, the loader.
        config: how the run will plan; None for a run without plans.
        budget_nbytes: what a step may take of the device; None for all of it.
        mode: "largest", "throughput", or "energy", which needs `watts`.
        permitted: the sizes that may be chosen; all by default.
        effective: samples between two updates where they are accumulated over batches; `step` is told when one batch is all.
        spare_nbytes: what a batch of all samples of an update does without at best: the gradients of others before it.
        max_size: no size is larger.
        watts: what the device draws while it trains.
    """

    step: Step
    source: Source
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    device: torch.device
    keep: Sequence[Any] = ()
    config: MemOptConfig | None = None
    budget_nbytes: int | None = None
    mode: Mode = "largest"
    permitted: Permitted | None = None
    effective: int | None = None
    spare_nbytes: int = 0
    max_size: int | None = None
    watts: float | None = None

    def find(self) -> Found:
        """Search. Raises InfeasibleError where no permitted size fits, ConfigError for options that contradict each other."""
        self._check()
        config = self.config if not disabled() and supported() else None
        limit = self.budget_nbytes if self.budget_nbytes is not None else device_nbytes(self.device)
        trials = Trials(self.step, self.source, self.model, self.optimizers, self.device, limit, config, self.effective)
        with untouched(self.model, self.optimizers, *self.keep):
            return _Run(self, trials, limit).found()

    def _check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use {', '.join(map(repr, MODES))}.")
        if self.max_size is not None and (not isinstance(self.max_size, int) or self.max_size < 1):
            raise ConfigError(f"max_size is {self.max_size!r}; give the largest batch size as an int, 1 or more.")
        if self.mode == "energy" and self.watts is None:
            raise ConfigError(
                "mode='energy' needs the power that the device draws, which nothing here knows. Give watts=, or use "
                "mode='throughput'."
            )
        if self.watts is not None and not self.watts > 0:
            raise ConfigError(f"watts is {self.watts!r}; give the power that the device draws in training, above 0.")
        if any(nn.parameter.is_lazy(p) for p in self.model.parameters()):
            raise ConfigError("The model has lazy parameters, which no trial could unmake. Run one batch through it first.")


class _Run:
    """One search, from profile to answer."""

    def __init__(self, search: Search, trials: Trials, limit: int) -> None:
        self.search, self.trials, self.limit = search, trials, limit
        self.source = trials.source
        self.cap = search.max_size or _UNLIMITED
        self.fitted: Chooser | None = None
        self.why = ""
        self._lower(self.source.cap)

    def _lower(self, cap: int | None) -> None:
        self.cap = min(self.cap, cap or self.cap)

    def permitted(self, limit: int) -> Sequence[int]:
        limit = min(limit, self.cap)
        return self.search.permitted(limit) if self.search.permitted is not None else range(1, limit + 1)

    # -- the two sizes -----------------------------------------------------------------------------

    def found(self) -> Found:
        small, large = self._profiled()
        if self.fitted is not None:
            choice = self._chosen()
            if choice is not None:
                return choice
        return self._bisected(max(small, large))

    def _profiled(self) -> tuple[int, int]:
        """Observe two sizes, at most what is used now; smaller ones where those do not fit. Not 1 if that can be: torch takes
        other ways for dimensions of 1. Returns both."""
        small = min(self.cap, max(2, self.source.size // 2))
        while not self._runs(self.trials.warm, small):
            if small == 1:
                raise self._nothing("not even a batch of 1 fits")
            small = max(1, min(small // 2, self.cap))
        first = self._observed(small)
        large = min(2 * small, self.cap)
        if first is None or large <= small:
            self.why = "one step could not be recorded" if first is None else "there is only one size to profile"
            return small, small
        second = self._observed(large)
        if second is None and large > self.cap >= small:  # the data ended
            large = self.cap
            second = self._observed(large) if large > small else None
        if second is None and small > 1:  # the larger one does not fit: the smaller is the larger of two
            small, large = small // 2, small
            first, second = self._observed(small), first
        if first is None or second is None:
            self.why = "the larger of two sizes did not fit"
            return small, small
        self._fit(first, second, (small, large))
        return small, large

    def _runs(self, trial: Callable[[int], bool], size: int) -> bool:
        try:
            return trial(size)
        except Exhausted as short:
            self._lower(short.there)
            if short.there < 1:
                raise ConfigError("The data gave no sample. Give a loader with data.") from None
            return False

    def _observed(self, size: int) -> Graph | None:
        found: list[Graph] = []

        def observe(size: int) -> bool:
            graph = self.trials.observe(size)
            if graph is not None:
                found.append(smoothed([graph]))
            return graph is not None

        self._runs(observe, size)
        return found[0] if found else None

    def _fit(self, first: Graph, second: Graph, sizes: tuple[int, int]) -> None:
        try:
            fitted = fit(first, second, sizes)
        except FitError as error:
            self.why = str(error)
            return
        nbytes = [nbytes_of(self.source.batch(size)) for size in sizes]
        self._lower(host_cap((nbytes[1] - nbytes[0]) / (sizes[1] - sizes[0]), self.source.copies))
        self.fitted = self._chooser(fitted, self.limit)

    def _chooser(self, fitted: StepFit, limit: int) -> Chooser:
        config = self.trials.config
        room = limit - (config.headroom if config is not None else 0)
        return Chooser(fitted, room, config is not None, self.search.effective, self.search.spare_nbytes, self._solve)

    def _solve(self, graph: Graph) -> planner.Frontier:
        assert self.trials.config is not None
        kind = costs.measured(graph.device)
        return planner.solve(
            graph,
            objective=self.trials.config.objective,
            limit_seconds=self.trials.config.solver_seconds,
            overhead=lambda lives: kind.of(Program(graph, lives)),
        )

    # -- the answer --------------------------------------------------------------------------------

    def _chosen(self) -> Found | None:
        """Predict and confirm; again, with what the trial before measured, where it did not fit. None: bisect."""
        assert self.fitted is not None
        for _ in range(3):
            choice = self.fitted.choose(self.search.mode, self.permitted, self.cap)
            if choice is None:
                self.why = "no permitted size was predicted to fit"
                return None
            try:
                trial = self.trials.confirm(choice.size)
            except Exhausted as short:  # nothing ran
                self._lower(short.there)
                continue
            if trial.fits:
                return self._answer(trial, choice)
            if choice.size == self.search.effective:  # it was hoped for
                self._lower(choice.size - 1)
                continue
            self.why = "a trial step ran out of memory"
            if trial.peak_nbytes is None:
                return None
            self.why = f"a trial step took {trial.peak_nbytes} bytes, {choice.peak_nbytes} were predicted"
            if trial.peak_nbytes <= choice.peak_nbytes:
                return None
            # what the prediction lacks, it lacks in proportion
            self.fitted = self._chooser(self.fitted.fit, self.limit * choice.peak_nbytes // trial.peak_nbytes)
        return None

    def _bisected(self, known: int) -> Found:
        """The largest permitted size by real steps alone, to within `CLOSE`: from the largest that ran, between it and the
        smallest that did not; halved by ratio while they are far apart."""
        sizes = self.permitted(self.cap)
        best: Trial | None = None
        low, high = -1, len(sizes)
        failed = min((t.size for t in self.trials.done if not t.fits), default=None)
        if failed is not None:
            high = bisect_left(sizes, failed)
        i = max(0, bisect_right(sizes, known) - 1)
        while low + 1 < high:
            i = min(max(i, low + 1), high - 1)
            try:
                trial = self.trials.confirm(sizes[i])
            except Exhausted as short:
                self._lower(short.there)
                high = min(high, bisect_right(sizes, self.cap))
                i = high - 1  # what was there may fit
                continue
            if trial.fits:
                best, low = trial, i
            else:
                high = i
            if high == len(sizes):  # nothing failed yet
                i = bisect_left(sizes, 2 * sizes[i])
            elif best is not None and sizes[high] - best.size <= max(1, CLOSE * best.size):
                break
            else:
                small, large = (best.size if best is not None else 1), sizes[high]
                middle = math.isqrt(small * large) if large > 4 * small else (small + large) // 2
                i = bisect_left(sizes, middle)
        if best is None:
            smallest = f"the smallest permitted size is {sizes[0]}, and it does not fit" if sizes else "no size is permitted"
            raise self._nothing(smallest)
        return self._answer(best, None if self.fitted is None else self.fitted.predicted(best.size))

    def _answer(self, trial: Trial, choice: Choice | None) -> Found:
        rate = choice.samples_per_second if choice is not None else None
        watts = self.search.watts
        return Found(
            size=trial.size,
            before=self.source.size,
            mode=self.search.mode,
            budget_bytes=self.search.budget_nbytes,
            predicted_peak_bytes=choice.peak_nbytes if choice is not None else None,
            confirmed_peak_bytes=trial.peak_nbytes,
            samples_per_second=rate,
            joules_per_sample=watts / rate if watts is not None and rate else None,
            planned=choice.planned if choice is not None else self.trials.config is not None,
            trials=tuple(self.trials.done),
            why=self.why,
        )

    def _nothing(self, why: str) -> InfeasibleError:
        tried = ", ".join(str(size) for size in sorted({t.size for t in self.trials.done}, reverse=True))
        return InfeasibleError(
            f"No batch size fits {self.limit} bytes ({format_nbytes(self.limit)}): {why} (tried {tried or 'none'}). The model, "
            "its optimizer and the batch size are as they were. Raise the budget, or make the model or the samples smaller.",
            budget_nbytes=self.limit,
        )


def divisors(effective: int) -> Permitted:
    """The sizes that give `effective` samples an update by accumulating whole batches."""
    if not isinstance(effective, int) or effective < 1:
        raise ConfigError(f"effective is {effective!r}; give the samples between two updates, 1 or more.")
    found = [size for size in range(1, effective + 1) if effective % size == 0]
    return lambda limit: [size for size in found if size <= limit]
