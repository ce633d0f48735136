"""Which plan each compiled region of a step gets, so that the step keeps its budget.

The plans of a region, from keeping all to the smallest, are its options (planner.py). A model of the step says what it takes
with other options: what all regions save in all their calls, and the most that one of them takes beyond it while it runs. The
compiler fuses ops and reuses memory, so the model is off by some per cent, and each measured step corrects it.

Regions and the eager code around them share the bytes in one choice: of all plans of the eager code, each beside the cheapest
options of the regions that then keep the budget, the pair that adds the fewest seconds. The eager code is planned once more
when the regions have been compiled, for the step that was measured with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lightning_memopt.compiled import Halves, Region
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.frontier import Frontier

_TRIES = 5
"""How often regions of a step are compiled again, at most. Each time costs as much as the user's own compilation."""
_OVERSHOOTS = 2
"""So often a step that fits is tried with more bytes and is too large then."""
_UNSURE = 0.015
"""The first guess is this much larger: torch splits a region in another way, and fuses other ops."""
_OFF = 0.07
"""By this share the smallest step may be lower than modelled, as long as none was measured (ADR 15)."""
_LEAST_SLOPE = 0.25
"""Fewer bytes in the model lower the peak by this share of them, at least."""
_UNUSED = 0.05
"""A step that leaves this share of its budget unused may be compiled again with fewer rebuilds."""
_PLANS = 20
"""Maximum number of plans of the eager code that are compared: the options of the regions are chosen anew for each."""


class Eager(NamedTuple):
    """A plan of the eager code around the regions, beside keeping everything.

    saved_nbytes: bytes by which it lowers the peak of the step.
    extra_seconds: the time that it adds to the step.
    """

    saved_nbytes: int
    extra_seconds: float


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
class Stage:
    """A region with its options.

    region: the region.
    seconds: the time to solve for its options.
    calls: how often it is called in a forward: layers may share one.
    option: the option that it is compiled with; None: as torch splits it.
    chosen: its index, where this rank chose it.
    recalled: whether the option is that of an earlier run.
    wanted: for each signature whose step it is part of, the option that this step needs.
    """

    region: Region
    seconds: float
    calls: float = 1
    option: Option | None = None
    chosen: int | None = None
    recalled: bool = False
    wanted: dict[object, int] = field(default_factory=dict)

    @cached_property
    def options(self) -> list[Option]:
        """From the one with most bytes and fewest FLOPs to the smallest."""
        graph = self.region.graph
        frontier = planner.solve(
            graph,
            objective="flops",
            limit_seconds=self.seconds,
            dense=True,
            beside=lambda lives: int((self.calls - 1) * _saved_nbytes(graph, lives)),
        )
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

    def taken_by(self, option: Option | None) -> Halves:
        """The bytes of all its calls with an option."""
        halves = self.region.unplanned if option is None else option.halves
        assert halves is not None
        others_nbytes = int((self.calls - 1) * halves.saved_nbytes)
        return Halves(halves.saved_nbytes + others_nbytes, halves.peak_nbytes + others_nbytes)

    @property
    def halves(self) -> Halves:
        """The bytes of all its calls as it is compiled now."""
        return self.taken_by(self.option)

    def choose(self, chosen: int | None, signature: object) -> Option | None:
        """Its option of this index, for the step of this signature."""
        self.chosen = chosen
        if chosen is None:
            return None
        if self.region.dynamic:
            self.wanted[signature] = chosen
        return self.options[chosen]

    def compile_with(self, option: Option | None) -> None:
        """It is to be compiled with this option."""
        self.option, self.region.lives = option, None if option is None else option.lives
        self.recalled = False


def _saved_nbytes(graph: Graph, lives: tuple[Life, ...]) -> int:
    begins = graph.backward_begins
    return sum(graph.tensors[life.tensor].nbytes for life in lives if life.how == "original" and life.freed_at >= begins)


def modelled(halves: Sequence[Halves]) -> int:
    """Bytes of all regions at the peak of a step: what they save, and what one of them takes beyond that while it runs."""
    return sum(h.saved_nbytes for h in halves) + max(h.peak_nbytes - h.saved_nbytes for h in halves)


class Measured(NamedTuple):
    """An observed step.

    modelled_nbytes: what its regions are modelled to take.
    peak_nbytes: its peak.
    chosen: for each region, as `Stage.chosen`.
    fits: whether it is within the limit, or can be by a plan of the eager code. (Before the first try the regions help.)
    eager: plans of the eager code; empty where it keeps everything.
    flop_seconds: the time that a FLOP of the regions takes.
    """

    modelled_nbytes: int
    peak_nbytes: int
    chosen: list[int | None]
    fits: bool
    eager: tuple[Eager, ...] = ()
    flop_seconds: float = 0.0


@dataclass(eq=False)
class Choice:
    """The choice of options for the step of one input signature.

    signature: that of the step.
    measured: the observed step of each way in which it was compiled.
    tries: how often it was compiled again.
    """

    signature: object = None
    measured: list[Measured] = field(default_factory=list)
    tries: int = 0

    def was_measured(
        self,
        stages: Sequence[Stage],
        peak_nbytes: int,
        least_nbytes: int,
        limit_nbytes: int | None,
        eager: tuple[Eager, ...] = (),
        flop_seconds: float = 0.0,
    ) -> None:
        """A step with these regions was observed.

        peak_nbytes: its peak.
        least_nbytes: its peak with the smallest plan of the eager code around the regions.
        limit_nbytes: the most that it may take; None: no limit.
        eager, flop_seconds: see `Measured`.
        """
        now = [s.chosen for s in stages]
        if self.measured and len(self.measured[-1].chosen) != len(now):
            self.measured.clear()  # it has other regions now
        fits = limit_nbytes is None or peak_nbytes <= limit_nbytes or (self.tries > 0 and least_nbytes <= limit_nbytes)
        taken = modelled([s.halves for s in stages])
        self.measured.append(Measured(taken, peak_nbytes, now, fits, eager, flop_seconds))

    def expected(self, modelled_nbytes: int) -> float:
        """The expected peak of the step, if the model of its regions says `modelled_nbytes`: the peak of the nearest measured
        step, plus the difference, weighted as it was between measured steps. A little more before any step was measured
        with regions that were split here.
        """
        first = self.measured[0]
        if not self.tries:
            return (1 + _UNSURE) * (first.peak_nbytes + modelled_nbytes - first.modelled_nbytes)
        near = min(self.measured, key=lambda m: abs(m.modelled_nbytes - modelled_nbytes))
        others = [m for m in self.measured if m.modelled_nbytes != near.modelled_nbytes]
        slope = 1.0
        if others:
            other = min(others, key=lambda m: abs(m.modelled_nbytes - modelled_nbytes))
            rise = other.peak_nbytes - near.peak_nbytes
            slope = max(_LEAST_SLOPE, rise / (other.modelled_nbytes - near.modelled_nbytes))
        return near.peak_nbytes + slope * (modelled_nbytes - near.modelled_nbytes)

    def savable_nbytes(self, stages: Sequence[Stage], surely: bool) -> int:
        """Bytes by which another way to compile the regions could lower the peak: as modelled (`surely`), or at most."""
        if not stages or self.tries >= _TRIES:
            return 0
        now, least = modelled([s.halves for s in stages]), modelled([s.taken_by(s.options[-1]) for s in stages])
        return max(0, now - least + (0 if surely or self.tries else int(_OFF * least)))

    def options(self, stages: Sequence[Stage], limit_nbytes: int | None) -> list[Option | None] | None:
        """The options that the regions are to be compiled with; None where those that were measured last are to stay."""
        chosen = self.better(stages, limit_nbytes)
        return None if chosen is None else [s.choose(i, self.signature) for s, i in zip(stages, chosen, strict=True)]

    def better(self, stages: Sequence[Stage], limit_nbytes: int | None) -> Sequence[int | None] | None:
        """A better choice of options than the one that was measured last; None where that one is to stay."""
        if limit_nbytes is None:
            smallest = cheapest(self, stages, None)
            if self.tries < _TRIES and all(m.chosen != smallest for m in self.measured):
                return smallest
            return self._not_above(stages, min(self.measured, key=lambda m: m.peak_nbytes).chosen)
        last, kept = self.measured[-1], [m for m in self.measured if m.fits]
        overshot = [] if not kept else [m.chosen for m in self.measured[self.measured.index(kept[0]) :] if not m.fits]
        tries_left = self.tries < _TRIES and len(overshot) < _OVERSHOOTS
        if kept and not last.fits:  # with more bytes it was too much: between the two, or back
            chosen = self.with_eager(stages, limit_nbytes) if tries_left else []
            best = self._not_above(stages, max(kept, key=lambda m: m.peak_nbytes).chosen)
            return best if not chosen or any(m.chosen == chosen for m in self.measured) else chosen
        if not tries_left or (kept and not _wasteful(stages, last.peak_nbytes, limit_nbytes)):
            return None
        chosen = self.with_eager(stages, limit_nbytes)
        return None if chosen in overshot else chosen

    def with_eager(self, stages: Sequence[Stage], limit_nbytes: int) -> list[int]:
        """Indices of the options that, with a plan of the eager code beside them, keep the limit and add the fewest seconds.
        Where nothing keeps it, those that come nearest.
        """
        last = self.measured[-1]
        ways = []
        for eager in (Eager(0, 0.0), *last.eager):
            target = limit_nbytes + eager.saved_nbytes
            indices = cheapest(self, stages, target)
            chosen = [(s, s.options[i]) for s, i in zip(stages, indices, strict=True)]
            over = max(0.0, self.expected(modelled([s.taken_by(option) for s, option in chosen])) - target)
            again = sum(s.calls * option.extra_flops for s, option in chosen)
            ways.append((over, eager.extra_seconds + last.flop_seconds * again, indices))
        return min(ways)[2]

    def _not_above(self, stages: Sequence[Stage], chosen: Sequence[int | None]) -> list[int | None]:
        """These options, or those with fewer bytes that other signatures need."""
        needed = [s.wanted_by_others(self.signature) for s in stages]
        return [i if i is None and not n else max(i or 0, n) for i, n in zip(chosen, needed, strict=True)]


def plans_of_eager_code(frontier: Frontier, peak_nbytes: int) -> tuple[Eager, ...]:
    """The plans of a frontier for the step around the regions, whose peak is `peak_nbytes`: at most `_PLANS` of them."""
    plans = [Eager(peak_nbytes - c.least_budget_nbytes, c.predicted.seconds) for c in frontier.candidates]
    plans = [plan for plan in plans if plan.saved_nbytes > 0]
    step = -(-len(plans) // _PLANS)
    return tuple(plans[::step]) if plans else ()


def _wasteful(stages: Sequence[Stage], peak_nbytes: int, limit_nbytes: int) -> bool:
    """Whether the regions run ops again although much of the budget is unused."""
    runs_again = any(s.region.checkpointed if s.option is None else s.option.extra_flops for s in stages)
    return runs_again and limit_nbytes - peak_nbytes > _UNUSED * limit_nbytes


def cheapest(choice: Choice, stages: Sequence[Stage], target: int | None) -> list[int]:
    """Indices of options with few FLOPs whose step is expected within the target (None: the smallest ones).

    Begins with the most bytes. As long as it is too much, the region moves to its next option that gives most bytes for a FLOP.
    """
    if target is None:
        return [len(s.options) - 1 for s in stages]
    indices = [s.wanted_by_others(choice.signature) for s in stages]

    def nbytes(indices: list[int]) -> int:
        return modelled([s.taken_by(s.options[i]) for s, i in zip(stages, indices, strict=True)])

    while choice.expected(nbytes(indices)) > target:
        now = nbytes(indices)
        moves = []
        for k, stage in enumerate(stages):
            for i in range(indices[k] + 1, len(stage.options)):
                saved = now - nbytes([*indices[:k], i, *indices[k + 1 :]])
                flops = stage.options[i].extra_flops - stage.options[indices[k]].extra_flops
                if saved > 0:
                    moves.append(((flops + 1) / saved, i - indices[k], k, i))
                    break
        if not moves:
            return [len(s.options) - 1 for s in stages]
        _, _, k, i = min(moves)
        indices[k] = i
    return indices
