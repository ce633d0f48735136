"""Which compiled regions run ops again, so that a step keeps its budget.

A compiled region is one stage of a step. Its plans, from keeping all to the smallest, are its options (planner.py). The step is
observed as it was compiled. Where it is above the budget, regions get cheaper options until a model of the step says that it
fits: what all regions save, and the most that one of them takes beyond it while it runs. These regions are compiled again, and
the step is observed again. So a plan is put in force for a step that was measured with the code that will run.

With dynamic shapes the same code serves batches of many shapes. Then a shape may only lower what the code takes, because others
count on it. When code is compiled again, all other shapes are observed again.

The compiler fuses ops and reuses memory, so the model of a region is off by some per cent. Each measured step corrects it.
Eager code around the regions is planned afterwards, as always. It takes a share of the bytes that are too many, in proportion
to what it could save.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from lightning_memopt.compiled import Halves, Region, Regions, compiles
from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life
from lightning_memopt.record import compiled_modules
from lightning_memopt.session.agreement import Agreement
from lightning_memopt.session.foresight import unmodified_peak
from lightning_memopt.session.peak_meter import in_compiled_code
from lightning_memopt.solvers import planner
from lightning_memopt.torch_private import compiled_codes, inlining_code
from lightning_memopt.units import format_nbytes

_TRIES = 5
"""How often regions of a step are compiled again, at most. Each time costs as much as the user's own compilation."""
_DISCARDED = 10
"""So many steps in which code is compiled are not planned from; after them, a step that compiles each time is."""
_OVERSHOOTS = 2
"""So often a step that fits is tried with more bytes and is too large then."""
_REMEMBERED = 64
"""The most signatures whose regions are known."""
_UNSURE = 0.015
"""The first guess allows for so much more: torch splits a region otherwise, and fuses other ops."""
_OFF = 0.07
"""By this share the smallest step may be lower than modelled, as long as none was measured (ADR 15)."""
_LEAST_SLOPE = 0.25
"""Fewer bytes in the model lower the peak by this share of them, at least."""
_UNUSED = 0.05
"""A step that leaves this share of its budget unused may be compiled again with fewer rebuilds."""


class Option(NamedTuple):
    """A plan of a region.

    lives: the plan.
    halves: the bytes that it takes.
    extra_flops: FLOPs that run again.
    rebuilt_ops: ops that run again.
    """

    lives: tuple[Life, ...]
    halves: Halves
    extra_flops: int
    rebuilt_ops: int


@dataclass(eq=False)
class _Stage:
    """A region with its options.

    chosen: index of the option that it is compiled with; None: as torch splits it.
    wanted: for each signature whose step it is part of, the option that this step needs.
    """

    region: Region
    seconds: float
    chosen: int | None = None
    wanted: dict[object, int] = field(default_factory=dict)

    @cached_property
    def options(self) -> list[Option]:
        """From the one with most bytes and fewest FLOPs to the smallest."""
        graph = self.region.graph
        frontier = planner.solve(graph, objective="flops", limit_seconds=self.seconds, dense=True)
        resident = resident_nbytes(graph)
        return [
            Option(
                c.lives,
                Halves(_saved_nbytes(graph, c.lives), c.predicted.peak_nbytes - resident),
                c.predicted.extra_flops,
                c.predicted.rebuilt_ops,
            )
            for c in reversed(frontier.candidates)
        ]

    def wanted_by_others(self, signature: object) -> int:
        """The option with most bytes that keeps the budget of other signatures, which run the same code."""
        return max((i for other, i in self.wanted.items() if other != signature), default=0)

    @property
    def halves(self) -> Halves:
        """Its bytes as it is compiled now."""
        if self.chosen is None:
            assert self.region.unplanned is not None
            return self.region.unplanned
        return self.options[self.chosen].halves


def _saved_nbytes(graph: Graph, lives: tuple[Life, ...]) -> int:
    begins = graph.backward_begins
    return sum(graph.tensors[life.tensor].nbytes for life in lives if life.how == "original" and life.freed_at >= begins)


def _modelled(halves: list[Halves], calls: float = 1) -> int:
    """Bytes of all regions at the peak of a step: what they save in all calls, and what one takes beyond that while it runs."""
    return int(calls * sum(h.saved_nbytes for h in halves)) + max(h.peak_nbytes - h.saved_nbytes for h in halves)


class _Measured(NamedTuple):
    """An observed step.

    modelled_nbytes: what its regions are modelled to take.
    peak_nbytes: its peak.
    chosen: for each region, as `_Stage.chosen`.
    least_nbytes: its peak with the smallest plan of the eager code around the regions.
    fits: whether it is within the limit, or can be by a plan of the eager code. (Before the first try the regions help.)
    """

    modelled_nbytes: int
    peak_nbytes: int
    chosen: list[int | None]
    least_nbytes: int
    fits: bool


@dataclass(eq=False)
class _Step:
    """The regions of one input signature's step.

    stages: id of a region -> the region with its options.
    signature: that of the step.
    measured: the observed step of each way in which it was compiled.
    tries: how often it was compiled again.
    splits: how many graphs had been split when its last observed step was over.
    discarded: how many observed steps were discarded because code was compiled in them.
    calls: how often a region was called in the last forward, on average. Layers may share one.
    """

    stages: dict[int, _Stage] = field(default_factory=dict)
    signature: object = None
    measured: list[_Measured] = field(default_factory=list)
    tries: int = 0
    splits: int = 0
    discarded: int = 0
    calls: float = 1

    def expected(self, modelled: int) -> float:
        """The peak of the step where its regions are modelled to take so many bytes: that of the nearest measured step, and
        the difference, which weighs as much as it did between measured steps. A little more before one was measured as split
        here.
        """
        first = self.measured[0]
        if not self.tries:
            return (1 + _UNSURE) * (first.peak_nbytes + modelled - first.modelled_nbytes)
        near = min(self.measured, key=lambda m: abs(m.modelled_nbytes - modelled))
        others = [m for m in self.measured if m.modelled_nbytes != near.modelled_nbytes]
        slope = 1.0
        if others:
            other = min(others, key=lambda m: abs(m.modelled_nbytes - modelled))
            rise = other.peak_nbytes - near.peak_nbytes
            slope = max(_LEAST_SLOPE, rise / (other.modelled_nbytes - near.modelled_nbytes))
        return near.peak_nbytes + slope * (modelled - near.modelled_nbytes)


class CompiledRegions:
    """The compiled regions of a session's model.

    changed: whether regions were given other options after the last observed step.
    """

    def __init__(self, model: nn.Module, config: MemOptConfig, enabled: bool, agreement: Agreement) -> None:
        self._enabled, self._agreement = enabled and config.recompute, agreement
        self._model = weakref.ref(model)
        self._begun = False
        self._seconds = config.solver_seconds
        self._regions = Regions()
        self._stages: dict[int, _Stage] = {}
        self._steps: dict[object, _Step] = {}
        self._now = _Step()
        self.changed = False

    @property
    def enabled(self) -> bool:
        """Whether they may be planned. (Ranks would have to agree on how often a step is observed.)"""
        return self._enabled and self._agreement.alone

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Around a forward: regions that are compiled are read, and split by their plans."""
        if not self.enabled:
            yield
            return
        if not self._begun and not in_compiled_code():  # what runs now cannot be compiled again now
            self._begun = True
            if self._was_compiled():
                self._regions.forget_all()
        try:
            with self._regions.listening():
                yield
        finally:
            self._take_seen()
            self._now.calls = self._calls(self._stages_of_step())

    def _calls(self, stages: Sequence[_Stage]) -> float:
        """As `_Step.calls`. The first forward does not show runs of code: then modules with the code of a region count."""
        codes, model = {code for stage in stages for code in stage.region.codes}, self._model() or nn.Module()
        runs = self._regions.runs or sum(getattr(type(m).forward, "__code__", None) in codes for m in model.modules())
        return max(1, runs / max(1, len(stages)))

    def _was_compiled(self) -> bool:
        """Whether the model ran compiled before: nobody asked then how its regions are to be split."""
        model, codes = self._model(), compiled_codes() if compiles() else []
        if model is None or not codes:
            return False
        forwards = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
        return bool(compiled_modules(model)) or any(code in codes for code in {*forwards, inlining_code()})

    def runs(self, signature: object) -> None:
        """A forward of this signature begins."""
        self._now = self._steps.get(signature) or _Step(signature=signature, splits=self._regions.splits)

    def _keep(self) -> None:
        """Remember the step of this signature, of which something is known. A run with many shapes has many signatures."""
        self._steps[self._now.signature] = self._now
        if len(self._steps) > _REMEMBERED:
            del self._steps[next(iter(self._steps))]

    def _take_seen(self) -> None:
        """The regions that this forward has split are stages of its step."""
        while self._regions.seen:
            region = self._regions.seen.pop(0)
            self._keep()
            self._add(region)

    def _add(self, region: Region) -> None:
        """The region is a stage of the current step."""
        self._now.stages[id(region)] = self._stages.setdefault(id(region), _Stage(region, self._seconds))

    def _stages_of_step(self) -> list[_Stage]:
        """The stages of the current step, as they are compiled now."""
        for region in self._regions.by_key.values():
            if region.dynamic and region.codes and id(region) not in self._now.stages:
                self._add(region)  # compiled when a batch of another shape ran
        return [stage for stage in self._now.stages.values() if not stage.region.forgotten]

    @property
    def said(self) -> str | None:
        """What became of the regions, for the report; None where none could be planned."""
        stages = [stage for stage in self._stages.values() if not stage.region.forgotten]
        if not stages:
            return None
        planned = [s.options[s.chosen] for s in stages if s.chosen is not None]
        text = f"{len(planned)} of {len(stages)} compiled regions run ops again"
        if planned:
            flops = sum(op.flops for s in stages for op in s.region.graph.ops) or 1
            extra = sum(option.extra_flops for option in planned) / flops
            text += f" ({sum(option.rebuilt_ops for option in planned)} ops, {100 * extra:.1f} % of all FLOPs)"
        return text if not self.opaque else f"{text}; not planned: {self.opaque}"

    @property
    def opaque(self) -> str:
        """Why regions could not be planned; empty where all could."""
        others = [] if self._agreement.alone else ["several processes train together"]
        return "; ".join([*others, *self._regions.opaque])

    def savable_nbytes(self, surely: bool) -> int:
        """Bytes by which another way to compile the regions could lower the peak: as modelled (`surely`), or at most."""
        stages = self._stages_of_step()
        if not stages or self._now.tries >= _TRIES:
            return 0
        both = [s.halves for s in stages], [s.options[-1].halves for s in stages]
        now, least = (_modelled(halves, self._now.calls) for halves in both)
        return max(0, now - least + (0 if surely or self._now.tries else int(_OFF * least)))

    def compiled_again(self, graph: Graph, limit_nbytes: int | None, say: Callable[[str], None]) -> bool:
        """After an observed step: whether it is to be observed again, because regions were given other options, or because
        code was compiled in it, which takes memory of its own.
        """
        step, stages = self._now, self._stages_of_step()
        self.changed = False
        compiled_now, step.splits = step.splits != self._regions.splits, self._regions.splits
        if compiled_now and step.discarded < _DISCARDED:
            step.discarded += 1
            self._keep()
            return True
        if not (stages and self.enabled):
            return False
        self._keep()
        now: list[int | None] = [s.chosen for s in stages]
        modelled, peak = _modelled([s.halves for s in stages], step.calls), unmodified_peak(graph)
        if step.measured and len(step.measured[-1].chosen) != len(now):
            step.measured.clear()  # it has other regions now
        limit = math.inf if limit_nbytes is None else limit_nbytes
        least = planner.smallest_nbytes(graph) if peak > limit else peak
        fits = peak <= limit or (step.tries > 0 and least <= limit)
        step.measured.append(_Measured(modelled, peak, now, least, fits))
        chosen = self._better(step, stages, limit_nbytes)
        if chosen is None:
            return False
        for stage, i in zip(stages, chosen, strict=True):
            if i is not None and stage.region.dynamic:
                stage.wanted[step.signature] = i
        if chosen == now:
            return False
        self.changed, changed = True, [s.region for s, i in zip(stages, chosen, strict=True) if s.chosen != i]
        for stage, i in zip(stages, chosen, strict=True):
            stage.chosen, stage.region.lives = i, None if i is None else stage.options[i].lives
        self._regions.forget(changed)
        ops = sum(0 if s.chosen is None else s.options[s.chosen].rebuilt_ops for s in stages)
        expected = format_nbytes(int(step.expected(_modelled([s.halves for s in stages], step.calls))))
        step.tries += 1
        say(
            f"MemOpt: compiling {len(changed)} of {len(stages)} compiled regions again, to run {ops} ops again: the step took "
            f"{format_nbytes(peak)}, {expected} are expected"
        )
        return True

    def _better(self, step: _Step, stages: list[_Stage], limit_nbytes: int | None) -> Sequence[int | None] | None:
        """A better choice of options than the one that was measured last; None where that one is to stay."""
        if limit_nbytes is None:
            return _cheapest(step, stages, None) if step.tries < _TRIES else None
        last, kept = step.measured[-1], [m for m in step.measured if m.fits]
        overshot = [] if not kept else [m.chosen for m in step.measured[step.measured.index(kept[0]) :] if not m.fits]
        tries_left = step.tries < _TRIES and len(overshot) < _OVERSHOOTS
        target = limit_nbytes + self._eager_share(last, limit_nbytes)
        if kept and not last.fits:  # with more bytes it was too much: between the two, or back
            chosen = _cheapest(step, stages, target) if tries_left else []
            best = _not_above(step, stages, max(kept, key=lambda m: m.peak_nbytes).chosen)
            return best if not chosen or any(m.chosen == chosen for m in step.measured) else chosen
        if not tries_left or (kept and not self._wasteful(stages, last.peak_nbytes, limit_nbytes)):
            return None
        chosen = _cheapest(step, stages, target)
        return None if chosen in overshot else chosen

    def _wasteful(self, stages: list[_Stage], peak: int, limit_nbytes: int) -> bool:
        """Whether the regions run ops again although much of the budget is unused."""
        runs_again = any(s.region.checkpointed if s.chosen is None else s.options[s.chosen].extra_flops for s in stages)
        return runs_again and limit_nbytes - peak > _UNUSED * limit_nbytes

    def _eager_share(self, measured: _Measured, limit_nbytes: int) -> int:
        """How many bytes too many are left to eager code around the regions."""
        eager = max(0, measured.peak_nbytes - measured.least_nbytes)
        too_many = max(0, measured.peak_nbytes - limit_nbytes)
        return int(too_many * eager / (eager + self.savable_nbytes(True))) if eager else 0

    def close(self) -> None:
        """The run is over: the regions are as their user compiles them, when they run next."""
        if not in_compiled_code():
            self._regions.forget(region for region in self._regions.by_key.values() if region.lives is not None)


def _not_above(step: _Step, stages: list[_Stage], chosen: Sequence[int | None]) -> list[int | None]:
    """These options, or those with fewer bytes that other signatures need."""
    needed = [s.wanted_by_others(step.signature) for s in stages]
    return [i if i is None and not n else max(i or 0, n) for i, n in zip(chosen, needed, strict=True)]


def _cheapest(step: _Step, stages: list[_Stage], target: int | None) -> list[int]:
    """Indices of options with few FLOPs whose step is expected within the target (None: the smallest ones).

    Begins with the most bytes. As long as it is too much, the region moves to its next option that gives most bytes for a FLOP.
    """
    if target is None:
        return [len(s.options) - 1 for s in stages]
    indices = [s.wanted_by_others(step.signature) for s in stages]

    def modelled(indices: list[int]) -> int:
        return _modelled([s.options[i].halves for s, i in zip(stages, indices, strict=True)], step.calls)

    while step.expected(modelled(indices)) > target:
        now = modelled(indices)
        moves = []
        for k, stage in enumerate(stages):
            for i in range(indices[k] + 1, len(stage.options)):
                saved = now - modelled([*indices[:k], i, *indices[k + 1 :]])
                flops = stage.options[i].extra_flops - stage.options[indices[k]].extra_flops
                if saved > 0:
                    moves.append(((flops + 1) / saved, i - indices[k], k, i))
                    break
        if not moves:
            return [len(s.options) - 1 for s in stages]
        _, _, k, i = min(moves)
        indices[k] = i
    return indices
