"""Find a batch size: profile two small sizes, predict every other one, confirm one with real steps; where that fails, bisect.

Everything runs inside `untouched`: afterwards weights, optimizer state, generators, gradients and attributes are bit by bit
what they were. Only a size that ran, and fitted, is ever the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memopt.batching.bisection import bisected
from lightning_memopt.batching.choose import MODES, Choice, Chooser, Mode
from lightning_memopt.batching.energy import Joules, StepEnergy, fitted, given
from lightning_memopt.batching.fit import StepFit
from lightning_memopt.batching.found import Found
from lightning_memopt.batching.plans import AwayPlans, Plans
from lightning_memopt.batching.profile import profile, sharpened
from lightning_memopt.batching.trials import Source, Step, Trial, Trials
from lightning_memopt.batching.untouched import untouched
from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.session.hybrid import Hybrid
from lightning_memopt.session.solving import frontier_of
from lightning_memopt.telemetry.sources import Clock
from lightning_memopt.units import format_nbytes
from lightning_memopt.versions import supported

_ATTEMPTS = 3
"""Predictions that are tried before bisection."""
_UNLIMITED = 1 << 20


@dataclass(kw_only=True)
class Search:
    """What to search, and within what. `find` does it.

    Args:
        step: one whole training step on a batch, update included.
        source: where batches come from.
        model, optimizers: what the step trains.
        keep: whatever else a step may change: a datamodule, schedulers, a precision plugin, the loader.
        config: how the run will plan; None for a run without plans.
        budget_nbytes: what a step may take of the device.
        mode: "largest", "throughput", or "energy", which needs a device whose energy can be read, or `watts`.
        effective: samples between two updates, where they are accumulated over batches: only sizes that divide them are chosen,
            and `step` is told when one batch is all.
        spare_nbytes: what a batch of all samples of an update does without at best: the gradients of others before it.
        max_size: no size is larger.
        watts: what the device draws while it trains; None: it is measured where it is needed.
        clock: seconds, for energy.
    """

    step: Step
    source: Source
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    device: torch.device
    budget_nbytes: int
    keep: Sequence[Any] = ()
    config: MemOptConfig | None = None
    mode: Mode = "largest"
    effective: int | None = None
    spare_nbytes: int = 0
    max_size: int | None = None
    watts: float | None = None
    clock: Clock = time.perf_counter

    def find(self) -> Found:
        """Search. Raises InfeasibleError where no permitted size fits, ConfigError for options that contradict each other."""
        self._check()
        with ExitStack() as stack:
            energy: StepEnergy | None = None
            if self.mode == "energy" and self.watts is None:
                energy = stack.enter_context(closing(StepEnergy(self.device, self.clock)))
            stack.enter_context(untouched(self.model, self.optimizers, *self.keep))
            return _Run(self, energy).found()

    def _check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use {', '.join(map(repr, MODES))}.")
        if self.max_size is not None and (not isinstance(self.max_size, int) or self.max_size < 1):
            raise ConfigError(f"max_size is {self.max_size!r}; give the largest batch size as an int, 1 or more.")
        if self.effective is not None and (not isinstance(self.effective, int) or self.effective < 1):
            raise ConfigError(f"effective is {self.effective!r}; give the samples between two updates, 1 or more.")
        if self.watts is not None and not self.watts > 0:
            raise ConfigError(f"watts is {self.watts!r}; give the power that the device draws in training, above 0.")
        if any(nn.parameter.is_lazy(p) for p in self.model.parameters()):
            raise ConfigError("The model has lazy parameters, which no trial could unmake. Run one batch through it first.")


class _Run:
    """One search, from profile to answer."""

    def __init__(self, search: Search, energy: StepEnergy | None) -> None:
        self.search = search
        self.config = search.config if not disabled() and supported() else None
        self.limit = search.budget_nbytes
        self.trials = Trials(
            search.step,
            search.source,
            search.model,
            search.optimizers,
            search.device,
            self.limit,
            self.config,
            search.effective,
            search.max_size or _UNLIMITED,
        )
        self.trials.energy = energy
        self.joules: Joules | None = None if search.watts is None else given(search.watts)
        self.chooser: Chooser | None = None
        self.why = ""

    def permitted(self, limit: int) -> Sequence[int]:
        """The sizes that may be chosen, up to a limit, rising."""
        limit, effective = min(limit, self.trials.cap), self.search.effective
        if effective is None:
            return range(1, limit + 1)
        return [size for size in range(1, min(limit, effective) + 1) if effective % size == 0]

    def found(self) -> Found:
        profiled = profile(self.trials)
        if profiled is None:
            raise self._nothing("not even a batch of 1 fits")
        self.why = profiled.why
        answer = None if profiled.step is None else self._predicted(profiled.step)
        if answer is not None:
            return answer
        best = bisected(self.trials, self.permitted, profiled.largest)
        if best is None:
            sizes = self.permitted(self.trials.cap)
            smallest = f"the smallest permitted size is {sizes[0]}, and it does not fit" if sizes else "no size is permitted"
            raise self._nothing(smallest)
        if self.trials.energy is not None:
            best = self.trials.confirm(best.size, spend=True) or best
        return self._answer(best, None if self.chooser is None else self.chooser.predicted(best.size))

    def _predicted(self, step: StepFit) -> Found | None:
        """Predict and confirm; again, with what the trial before measured, where it did not fit. None: bisect."""
        step = sharpened(self.trials, step, self._chooser(step, None, self.limit).largest_unmodified(self.trials.cap))
        plans, limit = self._plans(step), self.limit
        if self.trials.energy is not None:
            plain = self._chooser(step, None, limit).largest_unmodified(self.trials.cap)
            self.joules = self._joules(plain, self.trials.energy)
        for _ in range(_ATTEMPTS):
            self.chooser = self._chooser(step, plans, limit)
            choice = self.chooser.choose(self.search.mode, self.permitted, self.trials.cap)
            if choice is None:
                self.why = "no permitted size was predicted to fit"
                return None
            trial = self.trials.confirm(choice.size, spend=True)
            if trial is None:  # nothing ran: the data gave less
                continue
            if trial.fits:
                return self._answer(trial, choice)
            if choice.size == self.search.effective:  # it was hoped for
                self.trials.cap = choice.size - 1
                continue
            self.why = "a trial step ran out of memory"
            if trial.peak_nbytes is None:
                return None
            self.why = f"a trial step took {trial.peak_nbytes} bytes, {choice.peak_nbytes} were predicted"
            if trial.peak_nbytes <= choice.peak_nbytes:
                return None
            # what the prediction lacks, it lacks in proportion
            limit = self.limit * choice.peak_nbytes // trial.peak_nbytes
        return None

    def _plans(self, step: StepFit) -> Plans | None:
        """Plans as a session of this run will make them."""
        if self.config is None:
            return None
        hybrid = Hybrid(self.search.device, self.config)  # no plan is carried out here: nothing to close
        solve = lambda graph: frontier_of(graph, hybrid, lambda _: None)  # noqa: E731
        return AwayPlans(step, solve, hybrid) if hybrid.wanted else Plans(step, solve)

    def _chooser(self, step: StepFit, plans: Plans | None, limit: int) -> Chooser:
        room = limit - (self.config.headroom if self.config is not None else 0)
        return Chooser(step, room, plans, self.search.effective, self.search.spare_nbytes, self.joules)

    def _joules(self, plain: int, energy: StepEnergy) -> Joules | None:
        """Measured at two sizes well below the largest that needs no plan; None where every size needs one."""
        sizes = sorted({max(1, plain // 8), max(1, plain // 2)}) if plain else []
        spent = [one for one in map(self.trials.spend, sizes) if one is not None]
        if spent:
            return fitted(spent[0] if len(spent) > 1 else None, spent[-1], energy.approximate)
        self.why = "no size fits without a plan, so that no energy was measured before: the fastest one was taken"
        return None

    def _answer(self, trial: Trial, choice: Choice | None) -> Found:
        spent, before = self.trials.spent, self.search.source.size
        return Found(
            size=trial.size,
            before=before,
            mode=self.search.mode,
            budget_nbytes=self.search.budget_nbytes,
            predicted_peak_nbytes=choice.peak_nbytes if choice is not None else None,
            confirmed_peak_nbytes=trial.peak_nbytes,
            samples_per_second=choice.samples_per_second if choice is not None else None,
            before_samples_per_second=self.chooser.unmodified(before).samples_per_second if self.chooser is not None else None,
            joules_per_sample=choice.joules_per_sample if choice is not None else None,
            measured_joules_per_sample=spent.each / spent.size if spent is not None else None,
            energy_source=self.joules.source if self.joules is not None else "",
            planned=choice.planned if choice is not None else self.config is not None,
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
