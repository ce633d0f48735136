"""Find a batch size: profile two small sizes, predict every other one, confirm one with real steps; where that fails, bisect.

Everything runs inside `untouched`: afterwards weights, optimizer state, generators, gradients and attributes are bit by bit
what they were. Only a size that ran, and fitted, is ever the answer.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memopt.batching.batches import host_cap, nbytes_of
from lightning_memopt.batching.choose import MODES, Choice, Chooser, Mode
from lightning_memopt.batching.energy import Joules, StepEnergy, fitted, given
from lightning_memopt.batching.fit import FitError, StepFit, fit
from lightning_memopt.batching.found import Found
from lightning_memopt.batching.plans import AwayPlans, Plans
from lightning_memopt.batching.trials import Source, Step, Trial, Trials
from lightning_memopt.batching.untouched import untouched
from lightning_memopt.config import MemOptConfig, device_nbytes, disabled
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.session.buckets import frontier_of
from lightning_memopt.session.hybrid import Hybrid
from lightning_memopt.session.observation import smoothed
from lightning_memopt.telemetry.sources import Clock
from lightning_memopt.units import format_nbytes
from lightning_memopt.versions import supported

Permitted = Callable[[int], Sequence[int]]
"""The sizes that may be chosen, up to a limit, rising."""

CLOSE = 0.02
"""Bisection ends where the smallest size that failed is this share above the largest one that ran."""
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
        budget_nbytes: what a step may take of the device; None for all of it.
        mode: "largest", "throughput", or "energy", which needs a device whose energy can be read, or `watts`.
        permitted: the sizes that may be chosen; all by default.
        effective: samples between two updates where they are accumulated over batches; `step` is told when one batch is all.
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
    keep: Sequence[Any] = ()
    config: MemOptConfig | None = None
    budget_nbytes: int | None = None
    mode: Mode = "largest"
    permitted: Permitted | None = None
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
        if self.watts is not None and not self.watts > 0:
            raise ConfigError(f"watts is {self.watts!r}; give the power that the device draws in training, above 0.")
        if any(nn.parameter.is_lazy(p) for p in self.model.parameters()):
            raise ConfigError("The model has lazy parameters, which no trial could unmake. Run one batch through it first.")


class _Run:
    """One search, from profile to answer."""

    def __init__(self, search: Search, energy: StepEnergy | None) -> None:
        self.search = search
        self.config = search.config if not disabled() and supported() else None
        self.limit = search.budget_nbytes if search.budget_nbytes is not None else device_nbytes(search.device)
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
        limit = min(limit, self.trials.cap)
        return self.search.permitted(limit) if self.search.permitted is not None else range(1, limit + 1)

    def found(self) -> Found:
        known, step = self._profiled()
        answer = None if step is None else self._predicted(step)
        return answer if answer is not None else self._bisected(known)

    # -- the two sizes -----------------------------------------------------------------------------

    def _profiled(self) -> tuple[int, StepFit | None]:
        """The largest size that was run, and the step fitted to two sizes; None where it cannot be.

        The sizes are at most what is used now, and smaller ones where those do not fit. Not 1 if that can be: torch takes other
        ways for dimensions of 1.
        """
        trials = self.trials
        one = min(trials.cap, max(2, trials.source.size // 2))
        while not trials.warm(one):
            if one == 1:
                raise self._nothing("not even a batch of 1 fits")
            one = max(1, min(one // 2, trials.cap))
        first = trials.observe(one)
        if first is None:
            self.why = "one step could not be recorded"
            return one, None
        other, second = min(2 * one, trials.cap), None
        if other > one:
            second = trials.observe(other)
        if second is None and one < trials.cap < other:  # the data ended
            other = trials.cap
            second = trials.observe(other)
        if second is None and one > 1:
            other = one // 2
            second = trials.observe(other)
        if second is None:
            self.why = "there is only one size to profile"
            return one, None
        (small, a), (large, b) = sorted(((one, smoothed([first])), (other, smoothed([second]))), key=lambda pair: pair[0])
        try:
            found = fit(a, b, (small, large))
        except FitError as error:
            self.why = str(error)
            return large, None
        nbytes = [nbytes_of(trials.source.batch(size)) for size in (small, large)]
        trials.cap = min(trials.cap, host_cap((nbytes[1] - nbytes[0]) / (large - small), trials.source.copies) or trials.cap)
        return large, found

    # -- the answer --------------------------------------------------------------------------------

    def _predicted(self, step: StepFit) -> Found | None:
        """Predict and confirm; again, with what the trial before measured, where it did not fit. None: bisect."""
        plans, limit = self._plans(step), self.limit
        for _ in range(_ATTEMPTS):
            self.chooser = self._chooser(step, plans, limit)
            choice = self.chooser.choose(self.search.mode, self.permitted, self.trials.cap)
            if choice is None:
                self.why = "no permitted size was predicted to fit"
                return None
            trial = self.trials.confirm(choice.size)
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
        found = Chooser(step, room, plans, self.search.effective, self.search.spare_nbytes)
        if self.joules is None and self.trials.energy is not None:
            self.joules = self._joules(found.largest_unmodified(self.trials.cap), self.trials.energy)
        found.joules = self.joules
        return found

    def _joules(self, plain: int, energy: StepEnergy) -> Joules | None:
        """Measured at two sizes well below the largest that needs no plan; None where every size needs one."""
        sizes = sorted({max(1, plain // 8), max(1, plain // 2)}) if plain else []
        spent = [one for one in map(self.trials.spend, sizes) if one is not None]
        if spent:
            return fitted(spent[0] if len(spent) > 1 else None, spent[-1], energy.approximate)
        self.why = "no size fits without a plan, so that no energy was measured before: the fastest one was taken"
        return None

    def _bisected(self, known: int) -> Found:
        """The largest permitted size by real steps alone, to within `CLOSE`: from the largest that ran, between it and the
        smallest that did not; halved by ratio while they are far apart."""
        sizes = self.permitted(self.trials.cap)
        best: Trial | None = None
        low, high = -1, len(sizes)
        failed = min((t.size for t in self.trials.done if not t.fits), default=None)
        if failed is not None:
            high = bisect_left(sizes, failed)
        i = max(0, bisect_right(sizes, known) - 1)
        while low + 1 < high:
            i = min(max(i, low + 1), high - 1)
            trial = self.trials.confirm(sizes[i])
            if trial is None:  # what the data gave may fit
                high = min(high, bisect_right(sizes, self.trials.cap))
                i = high - 1
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
        return self._answer(best, None if self.chooser is None else self.chooser.predicted(best.size))

    def _answer(self, trial: Trial, choice: Choice | None) -> Found:
        spent = self.trials.spent
        return Found(
            size=trial.size,
            before=self.search.source.size,
            mode=self.search.mode,
            budget_bytes=self.search.budget_nbytes,
            predicted_peak_bytes=choice.peak_nbytes if choice is not None else None,
            confirmed_peak_bytes=trial.peak_nbytes,
            samples_per_second=choice.samples_per_second if choice is not None else None,
            joules_per_sample=choice.joules_per_sample if choice is not None else None,
            measured_joules_per_sample=spent.each / spent.size if spent is not None and spent.size == trial.size else None,
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


def divisors(effective: int) -> Permitted:
    """The sizes that give `effective` samples an update by accumulating whole batches."""
    if not isinstance(effective, int) or effective < 1:
        raise ConfigError(f"effective is {effective!r}; give the samples between two updates, 1 or more.")
    found = [size for size in range(1, effective + 1) if effective % size == 0]
    return lambda limit: [size for size in found if size <= limit]
