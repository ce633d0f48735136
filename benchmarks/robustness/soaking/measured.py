"""Run the loop of a soak in this process, plainly or planned, and take samples of what is there."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.robustness.samples import EVERY, Samples, depots_of_plans, fixed_rates, hooks, sample
from benchmarks.robustness.soaking.draws import RESTARTS, draw
from benchmarks.robustness.soaking.loop import Loop, ctrl_c
from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import engine
from lightning_memopt.native import install as install_counter
from lightning_memopt.plan import Life
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.session.judge.states import Running

WARM = 400
"""Number of steps in which every shape and fault has occurred, so that the states of all signatures exist."""
QUICK: dict[str, Any] = {"profile_steps": 2, "solver_seconds": 0.2, "verbose": False}
"""A soak asks whether steps under plans are exact, not how good the plans are."""


@dataclass(frozen=True)
class Combination:
    """Techniques that are on in one run of the loop.

    options: of `optimize`.
    proves: techniques that must have been on: a budget of bytes may be kept without the others.
    early: the loop lets parameters be updated in backward.
    head: the model has a loss head.
    """

    options: dict[str, Any]
    proves: tuple[str, ...]
    early: bool = False
    head: bool = False


_PARKS: dict[str, Any] = {"offload": "disk", "compress": "lossless"}
_PROVES = ("recompute", "offload", "compress")
COMBINATIONS = {
    "early updates": Combination(
        _PARKS | {"budget": "min", "optimizer_in_backward": "always"}, (*_PROVES, "optimizer_in_backward"), early=True
    ),
    "late updates": Combination(_PARKS | {"budget": "min"}, _PROVES),
    "tiles": Combination(_PARKS | {"budget": "min", "tile": "exact"}, (*_PROVES, "tiles"), head=True),
    "planned pool": Combination(_PARKS | {"budget": "2MiB", "pool": "planned"}, ("recompute", "pool")),
}


@dataclass
class Techniques:
    """What was on in the forwards and steps of a planned loop.

    forwards: kind -> how many: "planned" by the plan, "deviating" from it, or without one ("observing", "waiting", "failed").
    early: how many parameters are updated in backward.
    tiled: how many forwards ran in tiles, as planned.
    pooled: steps that the planned pool served.
    rebuilt_ops: ops that one step of a plan in force runs again, at most.
    forms: forms in which plans in force park tensors.
    moved_nbytes: bytes that went to tiers and back under one plan: the most that were seen.
    """

    forwards: Counter[str] = field(default_factory=Counter)
    early: int = 0
    tiled: int = 0
    pooled: int = 0
    rebuilt_ops: int = 0
    forms: set[str] = field(default_factory=set)
    moved_nbytes: int = 0

    def forward_ended(self, run: Run) -> None:
        state = run.session._current
        if not isinstance(state, Running):
            self.forwards[type(state).__name__.lower()] += 1
            return
        deviation = state.drift.deviations[-1] if state.drift.deviations else None
        deviates = deviation is not None and bool(deviation.first or deviation.unplanned_nbytes)
        self.forwards["deviating" if deviates else "planned"] += 1
        tiles = run.session._tiling.mode
        self.tiled += tiles is not None and tiles.outcome.heads > 0
        self.rebuilt_ops = max(self.rebuilt_ops, state.plan.predicted.rebuilt_ops)
        forms = {life.form for life in state.plan.lives if life.how == "fetch"}
        self.forms |= forms
        if "disk" in "".join(forms) and not self.moved_nbytes:  # when the run ends, another plan may be in force
            self._moved(run)

    def _moved(self, run: Run) -> None:
        transfers = run.session.transfers()
        if transfers is not None:
            self.moved_nbytes = max(self.moved_nbytes, transfers.moved_nbytes)

    def run_ends(self, run: Run) -> None:
        self._moved(run)
        pool = run.status().pool
        self.pooled += 0 if pool is None else pool.steps
        self.early = max(self.early, 0 if run.session._early is None else len(run.session._early.early))

    def on(self) -> list[str]:
        """The techniques that were on."""
        seen = {
            "recompute": bool(self.rebuilt_ops),
            "offload": self.moved_nbytes > 0 and any("disk" in form for form in self.forms),
            "compress": any(map(codec_of, self.forms)),
            "pool": self.pooled > 0,
            "optimizer_in_backward": self.early > 0,
            "tiles": self.tiled > self.forwards["planned"] / 2,
        }
        return [name for name, on in seen.items() if on]

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"forwards": dict(self.forwards), "forms": sorted(self.forms)}


class Soak:
    """`count` steps of the loop of a combination. `options`: of `optimize`; None: the loop is plain."""

    def __init__(
        self, seed: int, count: int, combination: Combination, options: dict[str, Any] | None, folder: Path, digests: Path
    ) -> None:
        self.seed = seed
        self.count = count
        self.combination = combination
        self.options = options
        self.loop = Loop(seed, combination.early, folder, combination.head)
        self.folder, self.digests = folder, digests
        self.techniques = Techniques()
        self.samples = Samples(count // EVERY + 1, WARM)
        self.outcomes: Counter[str] = Counter()

    def runs(self) -> None:
        """All steps, restarts among them."""
        ends = [number for number in RESTARTS if number < self.count] + [self.count]
        begin = 0
        for end in ends:
            if begin:
                self.loop.renewed()
            with self._opened() as run:
                for number in range(begin, end):
                    self._step(number, run)
                if run is not None:
                    self.techniques.run_ends(run)
            begin = end

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Run | None]:
        loop = self.loop
        if self.options is None:
            yield None
            return
        with optimize(loop.model, loop.optimizer, **QUICK, **self.options) as run:
            loop.run, loop.heard = run, partial(self.techniques.forward_ended, run)
            try:
                yield run
            finally:
                loop.run, loop.heard = None, lambda: None

    def _step(self, number: int, run: Run | None) -> None:
        loop = self.loop
        loop.step(number, draw(self.seed, number, self.combination.early, self.combination.head))
        self.outcomes[loop.outcome] += 1
        with self.digests.open("a") as file:  # not kept: what the soak has grows otherwise
            file.write(json.dumps([loop.outcome, *loop.digests]) + "\n")
        if number % EVERY == EVERY // 2:
            self.samples.take(sample(run, loop.model, loop.optimizer, self.folder), _in_force(run))


def _in_force(run: Run | None) -> Hashable:
    """The run, the state of each of its signatures, with what its plan decides; what is parked between steps, as the plans of
    the last steps say; how many solves there were, and lives of plans are kept; and how many tiers depots have: a depot whose
    tier still has bytes of a step that was interrupted gets another one, and keeps it.
    """
    if run is None:
        return None
    lives = sum(type(o) is Life for o in gc.get_objects())

    def decided(s: object) -> int:
        return hash((s.plan.lives, s.plan.updates, s.plan.states, s.plan.weights)) if isinstance(s, Running) else 0

    plans = ((str(signature), type(s).__name__, decided(s)) for signature, s in run.session._plan_cache.items())
    at_rest = run.session._at_rest
    weights = at_rest.weights.parked
    paths = None if weights is None else tuple(sorted(weights.paths))
    tiers = sum(1 for depot in (*depots_of_plans(run), at_rest.states._depot) for _ in depot)
    solves = run.session._plan_cache.solves.count
    return id(run), solves, lives, tuple(sorted(plans)), hash(at_rest.states._states), paths, tiers


def measured(seed: int, count: int, combination: Combination, plain: bool, digests: Path) -> dict[str, Any]:
    """Run the loop, with this combination or plainly. `digests`: a file that gets a line for each step."""
    options = None if plain else combination.options
    install_counter()
    with tempfile.TemporaryDirectory() as name, fixed_rates(), ctrl_c(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options is not None and options.get("offload") == "disk":
            options = options | {"offload": f"disk:{name}"}
        digests.unlink(missing_ok=True)
        soak = Soak(seed, count, combination, options, Path(name), digests)
        gc.collect()
        gc.freeze()  # what modules made is not walked for each sample, and not counted
        before = hooks(soak.loop.model, soak.loop.optimizer)
        soak.runs()
        native = engine.loaded()
        native_ops, python_ops = (0, 0) if native is None else native.counts()
        left = hooks(soak.loop.model, soak.loop.optimizer) - before
    return {
        "engine": "plain" if options is None else "python" if native is None else "native",
        "steps": count,
        "outcomes": dict(soak.outcomes),
        "timers_landed": soak.loop.landed,
        "modes_left": soak.loop.modes_left,
        "native_ops": native_ops,
        "python_ops": python_ops,
        "techniques": soak.techniques.as_dict(),
        "on": soak.techniques.on(),
        "hooks_left": left,
        "samples": soak.samples.count,
        "first_and_last": soak.samples.ends,
        "growth": soak.samples.growth(),
        "torch": torch.__version__,
    }
