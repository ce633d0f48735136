"""Search for a batch size: profile two small sizes, predict all others, confirm the best by real steps; else bisect.

Everything runs inside `untouched`: weights, optimizer state, generators, gradients and attributes are restored bit by bit.
The result is always a size that really ran and fitted. See docs/adr/0010-batch-size-from-two-traces.md.

If several ranks train the model, they search together for one size that fits on every rank (`together.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memopt.batching.bisection import bisected
from lightning_memopt.batching.choose import MODES, Chooser, Mode, SizeEstimate
from lightning_memopt.batching.energy import EnergyModel, StepEnergy, fitted, given
from lightning_memopt.batching.fit import StepFit
from lightning_memopt.batching.plans import EitherPlans, ParkingPlans, Plans
from lightning_memopt.batching.profile import in_tiles, profile, sharpened
from lightning_memopt.batching.result import BatchSizeResult
from lightning_memopt.batching.together import TrialsOfRanks
from lightning_memopt.batching.trials import BatchSource, Step, Trial, Trials
from lightning_memopt.batching.untouched import untouched
from lightning_memopt.clocks import perf_counter
from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import ConfigError, InfeasibleError, UnsupportedError
from lightning_memopt.graph import Graph
from lightning_memopt.plan.logits import are_worth_tiles
from lightning_memopt.ranks import Ranks, joins, ranks_of, wrapper_of
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.solve.machine import machine_of
from lightning_memopt.session.solve.solving import frontier_of
from lightning_memopt.solvers.planner import Frontier
from lightning_memopt.telemetry.sources import Clock
from lightning_memopt.units import format_nbytes
from lightning_memopt.versions import supported

_ATTEMPTS = 3
"""Maximum number of predictions that are tried before bisection."""
_UNLIMITED = 1 << 20
"""The cap on the batch size, in samples, if none is given."""


@dataclass(kw_only=True)
class Search:
    """A search for a batch size; `find` runs it.

    Args:
        step: runs one whole training step on a batch, update included.
        source: makes the batches.
        model, optimizers: what the step trains.
        device: the training device.
        budget_nbytes: bytes of the device that a step may use.
        keep: other objects that a step may change: a datamodule, schedulers, a precision plugin, the loader.
        config: options of the run that will follow; None if it has no plans.
        mode: "largest", "throughput", or "energy", which needs a device whose energy can be read, or `watts`.
        effective: samples between two updates if gradients are accumulated over batches. Only sizes that divide it are
            chosen, and `step` is told whether one batch has all of them.
        spare_nbytes: maximum bytes of gradients that a step saves if one batch has all `effective` samples.
        max_size: the largest size that may be chosen; None for no limit.
        watts: power that the device draws in training; None: it is measured if it is needed.
        clock: gives seconds; used to measure energy.
    """

    step: Step
    source: BatchSource
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
    clock: Clock = perf_counter

    def find(self) -> BatchSizeResult:
        """Run the search. Raises InfeasibleError if no permitted size fits, ConfigError for options that are not accepted,
        RankFailedError if another rank failed, UnsupportedError for a model that the ranks do not train by DDP.
        """
        ranks = ranks_of(self.model)
        if ranks is None:
            return self._find(None)
        ranks.begin()
        try:
            return self._find(ranks)
        except BaseException as error:
            failed = ranks.ended_by(error)
            if failed is not None:
                raise failed from error
            raise
        finally:
            ranks.leave()

    def _find(self, ranks: Ranks | None) -> BatchSizeResult:
        self._check(ranks)
        with ExitStack() as stack:
            energy: StepEnergy | None = None
            if self.mode == "energy" and self.watts is None:
                energy = stack.enter_context(closing(StepEnergy(self.device, self.clock)))
            stack.enter_context(untouched(self.model, self.optimizers, *self.keep))
            return _RunningSearch(self, energy, ranks).run()

    def _check(self, ranks: Ranks | None) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use {', '.join(map(repr, MODES))}.")
        if self.max_size is not None and (not isinstance(self.max_size, int) or self.max_size < 1):
            raise ConfigError(f"max_size is {self.max_size!r}; give the largest batch size as an int, 1 or more.")
        if self.effective is not None and (not isinstance(self.effective, int) or self.effective < 1):
            raise ConfigError(f"effective is {self.effective!r}; give the samples between two updates, 1 or more.")
        if self.watts is not None and not self.watts > 0:
            raise ConfigError(f"watts is {self.watts!r}; give the power that the device draws in training, above 0.")
        if any(nn.parameter.is_lazy(p) for p in self.model.parameters()):
            raise ConfigError(
                "The model has lazy parameters, which a trial would initialise for good. Run one batch through it first."
            )
        if ranks is None:
            return
        if wrapper_of(self.model) is None:
            raise UnsupportedError(
                "The ranks share this model without a DistributedDataParallel around it. A search on several ranks needs that: "
                "wrap the model, or set the batch size by hand."
            )
        if joins(self.model):
            raise UnsupportedError("A search inside of `Join` would run its collectives in every trial. Run the search before.")
        if self.mode == "energy" and self.watts is None:
            raise UnsupportedError(
                f"mode='energy' repeats steps by the clock, which {ranks.size} ranks cannot do in step. Give watts=, or use "
                "mode='throughput'."
            )


class _RunningSearch:
    """The state of one search while it runs, from the profile to the result."""

    def __init__(self, search: Search, energy: StepEnergy | None, ranks: Ranks | None) -> None:
        self.search, self.ranks = search, ranks
        self.config = search.config if not disabled() and supported() else None
        self.limit = search.budget_nbytes
        wrapper = None if ranks is None else wrapper_of(search.model)
        kind = Trials if ranks is None or wrapper is None else partial(TrialsOfRanks, ranks, wrapper)
        self.trials = kind(
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
        self.energy_model: EnergyModel | None = None if search.watts is None else given(search.watts)
        self.chooser: Chooser | None = None
        self.why = ""

    def permitted(self, limit: int) -> Sequence[int]:
        """The sizes up to `limit` that may be chosen, ascending."""
        limit = min(limit, self.trials.cap)
        effective = self.search.effective
        if effective is None:
            return range(1, limit + 1)
        return [size for size in range(1, min(limit, effective) + 1) if effective % size == 0]

    def run(self) -> BatchSizeResult:
        """The result of this rank's search, or of the first rank's. Raises InfeasibleError on all ranks if no size fits."""
        trials = self.trials
        if not isinstance(trials, TrialsOfRanks):
            return self.result()
        options = {"mode": self.search.mode, "effective": self.search.effective, "planned": self.config is not None}
        self.limit = trials.begin(options)
        if trials.ranks.rank:
            return trials.follow()
        try:
            result = self.result()
        except InfeasibleError as error:
            trials.refuse(error)
            raise
        trials.finish(result)
        return result

    def result(self) -> BatchSizeResult:
        """Profile, predict and confirm; bisect if that gives no result. Raises InfeasibleError if no size fits."""
        profiled = profile(self.trials)
        if profiled is None:
            raise self._infeasible("not even a batch of 1 fits")
        self.why = profiled.why
        result = None if profiled.step is None else self._predicted(profiled.step)
        if result is not None:
            return result
        best = bisected(self.trials, self.permitted, profiled.largest)
        if best is None:
            sizes = self.permitted(self.trials.cap)
            why = f"the smallest permitted size is {sizes[0]}, and it does not fit" if sizes else "no size is permitted"
            raise self._infeasible(why)
        if self.trials.energy is not None:
            best = self.trials.confirm(best.size, measure_energy=True) or best
        return self._result_of(best, None if self.chooser is None else self.chooser.predicted(best.size))

    def _predicted(self, step: StepFit) -> BatchSizeResult | None:
        """Predict a size and confirm it; if the trial does not fit, correct the limit by its peak and repeat. None: bisect."""
        step = sharpened(self.trials.observe, step, self._chooser(step, None, self.limit).largest_unmodified(self.trials.cap))
        plans = self._plans(step)
        limit = self.limit
        if self.trials.energy is not None:
            plain = self._chooser(step, None, limit).largest_unmodified(self.trials.cap)
            self.energy_model = self._measured_energy_model(plain, self.trials.energy)
        for _ in range(_ATTEMPTS):
            self.chooser = self._chooser(step, plans, limit)
            estimate = self.chooser.choose(self.search.mode, self.permitted, self.trials.cap)
            if estimate is None:
                self.why = "no permitted size was predicted to fit"
                return None
            trial = self.trials.confirm(estimate.size, measure_energy=True)
            if trial is None:  # no step ran: the data has fewer samples
                continue
            if trial.fits:
                return self._result_of(trial, estimate)
            if estimate.size == self.search.effective:  # its estimate is a best case (`spare_nbytes`): take a smaller one
                self.trials.cap = estimate.size - 1
                continue
            self.why = "a trial step ran out of memory"
            if trial.peak_nbytes is None:
                return None
            self.why = f"a trial step took {trial.peak_nbytes} bytes, {estimate.peak_nbytes} were predicted"
            if trial.peak_nbytes <= estimate.peak_nbytes:
                return None
            # assume that the predictions are too low by the same factor at every size
            limit = self.limit * estimate.peak_nbytes // trial.peak_nbytes
        return None

    def _plans(self, step: StepFit) -> Plans | EitherPlans | None:
        """Makes plans as a session of the run that follows will; None if it has no plans."""
        if self.config is None:
            return None
        plain = self._plans_of(step, self.config)
        if self.config.tile == "off":
            return plain
        limit = self.limit - self.config.headroom
        graph = step.at(max(step.sizes[1], plain.largest(0, self.trials.cap, limit)))
        worth = are_worth_tiles(graph, unmodified_peak(graph, plain.machine))
        tiled = in_tiles(self.trials, step.sizes) if worth else None
        if tiled is None:
            return plain
        largest = self._plans_of(tiled, self.config).largest(0, self.trials.cap, limit)
        tiled = sharpened(self.trials.observe_tiles, tiled, largest)
        return EitherPlans(plain, self._plans_of(tiled, self.config))

    def _plans_of(self, step: StepFit, config: MemOptConfig) -> Plans:
        offloading = Offloading(self.search.device, config)  # no plan is executed, so nothing has to be closed
        offloading.look_for_room()
        machine = machine_of(self.search.device)

        def solve(graph: Graph) -> Frontier:
            return frontier_of(graph, offloading, lambda _: None, machine)

        return ParkingPlans(step, solve, offloading, machine) if offloading.wanted else Plans(step, solve, machine)

    def _chooser(self, step: StepFit, plans: Plans | EitherPlans | None, budget_nbytes: int) -> Chooser:
        headroom = self.config.headroom if self.config is not None else 0
        limit = budget_nbytes - headroom
        machine = machine_of(self.search.device)
        return Chooser(step, limit, plans, self.search.effective, self.search.spare_nbytes, self.energy_model, machine)

    def _measured_energy_model(self, plain: int, energy: StepEnergy) -> EnergyModel | None:
        """Measure energy at two sizes well below `plain`, the largest size that needs no plan; None if `plain` is 0."""
        sizes = sorted({max(1, plain // 8), max(1, plain // 2)}) if plain else []
        measurements = [measured for measured in map(self.trials.measure_energy, sizes) if measured is not None]
        if measurements:
            smaller = measurements[0] if len(measurements) > 1 else None
            return fitted(smaller, measurements[-1], energy.approximate)
        self.why = "no size fits without a plan, so no energy was measured beforehand and the fastest size was taken"
        return None

    def _result_of(self, trial: Trial, estimate: SizeEstimate | None) -> BatchSizeResult:
        measured = self.trials.measured
        before = self.search.source.size
        before_estimate = self.chooser.unmodified(before) if self.chooser is not None else None
        return BatchSizeResult(
            size=trial.size,
            before=before,
            mode=self.search.mode,
            budget_nbytes=self.limit,
            predicted_peak_nbytes=estimate.peak_nbytes if estimate is not None else None,
            confirmed_peak_nbytes=trial.peak_nbytes,
            samples_per_second=estimate.samples_per_second if estimate is not None else None,
            before_samples_per_second=before_estimate.samples_per_second if before_estimate is not None else None,
            joules_per_sample=estimate.joules_per_sample if estimate is not None else None,
            measured_joules_per_sample=measured.joules_per_step / measured.size if measured is not None else None,
            energy_source=self.energy_model.source if self.energy_model is not None else "",
            planned=estimate.planned if estimate is not None else self.config is not None,
            trials=tuple(self.trials.done),
            why=self.why,
            ranks=1 if self.ranks is None else self.ranks.size,
        )

    def _infeasible(self, why: str) -> InfeasibleError:
        tried = ", ".join(str(size) for size in sorted({trial.size for trial in self.trials.done}, reverse=True))
        where = ""
        if isinstance(self.trials, TrialsOfRanks) and self.trials.too_large_on:
            where = f" on rank {', '.join(map(str, self.trials.too_large_on))}"
        return InfeasibleError(
            f"No batch size fits {self.limit} bytes ({format_nbytes(self.limit)}){where}: {why} (tried {tried or 'none'}). The "
            "model, its optimizer and the batch size are as they were. Raise the budget, or make the model or the "
            "samples smaller.",
            budget_nbytes=self.limit,
        )
