"""Improve plans that only rebuild, one tensor at a time: drop one at the peak, or keep one where there is room.

Minimum cuts look at only one or two points of the step, and a chain only at its stages. So their plans may have a peak at some
other point, or leave memory unused. A walk *down* looks at the largest tensors at the peak of a plan and drops the one whose
rebuild takes the least time per byte; then it goes on with the new peak. A walk *up* keeps tensors that are rebuilt although
there is room to keep them.

Rebuilding a dropped tensor may need many other tensors again. A *wide* walk down also tries to hold the tensors that the
rebuild starts from, and looks at more tensors. It finds more plans, and takes several times as long.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from lightning_memopt.graph import Graph, Op
from lightning_memopt.plan import Life, LoweringError, simulate
from lightning_memopt.solvers.recompute.draft import Change, Draft, Lives
from lightning_memopt.solvers.rollout import rebuilt_by

_FEW, _MANY = 12, 40
"""How many of the largest tensors at a peak a walk tries to drop, and how many a wide walk tries."""
_STARTS, _STRIDE = 12, 3
"""Number of plans above the limit at which a search begins. Every third one is tried first."""
_LOOSER = 1.05, 1.1, 1.2, 1.4
"""From the best plan, walks go up to these multiples of the limit and down again, as long as one of them helps."""
_STEPS = 60
"""Maximum number of steps of a walk down. A walk that has not reached the limit by then is given up."""
_WORK, _LEAST = 250_000, 20
"""The work of a search: the number of plans times the points of the step, and the minimum number of plans. Both are counts, so
that the result does not depend on how busy the machine is.
"""
_WIDER = 30
"""Wide walks may make this many times as many plans."""
_POINTS_PER_SECOND = 60_000
"""Work that a search does in about one second, in points."""
_WATCHED = 5_000
"""A search checks the time after this much work, in points: about every 50 ms."""
_WORTH_STEPS, _WORTH_SECONDS = 50, 0.5
"""The search for the smallest plan may take about as long as this many steps, or these seconds if that is more. Both are
counted in seconds of the graph, which do not depend on the machine. The minimum is for steps of a thousand tiny ops, which take
less time than making one plan.
"""


def within(
    graph: Graph,
    plans: Sequence[Lives],
    fitting: int,
    limit_nbytes: int,
    over: Callable[[], bool] = lambda: False,
    thorough: bool = False,
) -> Iterator[Lives]:
    """Plans within a limit, each faster than the one before, to which walks from the plans of a frontier lead. `plans` have
    rising peaks and falling seconds; the first `fitting` of them are within the limit. No walk begins at a plan in which an op
    runs again that may not in this graph. `over`: whether time is up. `thorough`: whether to add wide walks after the others.
    """
    above = range(fitting, min(len(plans), fitting + _STARTS))
    nearest = range(max(0, fitting - 1), fitting)
    rounds = [(Walks(graph, over=over), [*nearest, *(i for first in range(_STRIDE) for i in above[first::_STRIDE])])]
    if thorough:
        left = _WIDER * max(_LEAST, _WORK // max(1, len(graph.points)))
        rounds.append((Walks(graph, left, over, wide=True), [len(plans) - 1, *above[::_STRIDE]]))
    best: Draft | None = None
    for walks, starts in rounds:
        for i in starts:
            try:
                start = Draft(graph, plans[i])
            except LoweringError:  # a plan of the step as it is, in which more ops may run again (`held_at_boundaries`)
                continue
            if walks.wide and best is not None and start.seconds > best.seconds:
                continue
            draft = walks.within(start, limit_nbytes)
            if draft is not None and (best is None or draft.seconds < best.seconds):
                best = draft
                yield draft.lives
        in_vain = 0
        for looser in itertools.cycle(_LOOSER):
            if best is None or in_vain == len(_LOOSER):
                break
            in_vain += 1
            draft = walks.within(walks.topmost(best, int(looser * limit_nbytes)), limit_nbytes)
            if draft is not None and draft.seconds < best.seconds:
                best, in_vain = draft, 0
                yield draft.lives


def smaller(graph: Graph, plans: Iterable[Lives]) -> Lives | None:
    """The last plan of a walk down from the smallest of these plans; None if there is no way down. `_WORTH_STEPS` limits the
    walk.
    """
    smallest: Lives | None = None
    least = math.inf
    for lives in plans:
        with contextlib.suppress(LoweringError):
            peak_nbytes = simulate(graph, lives).predicted.peak_nbytes
            if peak_nbytes < least:
                smallest, least = lives, peak_nbytes
    if smallest is None:
        return None
    start = Draft(graph, smallest)
    seconds = max(_WORTH_SECONDS, _WORTH_STEPS * sum(op.seconds for op in graph.ops))
    work = min(_WORK, int(_POINTS_PER_SECOND * seconds))
    walks = Walks(graph, max(1, work // max(1, len(graph.points))))
    *_, last = start, *itertools.islice(walks.down(start), _STEPS)
    return None if last is start else last.lives


class Walks:
    """Walks through the plans of a graph.

    graph: the graph. Seconds are those of its ops.
    wide: whether walks down are wide.
    left: the number of plans that may still be made. A plan that runs more ops again than the graph has points counts as
        several.

    `over`: whether time is up. It is called each time `_WATCHED` points of work are done.
    """

    def __init__(
        self, graph: Graph, left: int | None = None, over: Callable[[], bool] = lambda: False, wide: bool = False
    ) -> None:
        self.graph, self.wide = graph, wide
        self.left = max(_LEAST, _WORK // max(1, len(graph.points))) if left is None else left
        self._over, self._unwatched = over, 0
        self._passed: set[tuple[Lives, int]] = set()
        """Plans, with their limits, through which a walk has gone already. Another walk would end where that one did."""

    def down(self, draft: Draft) -> Iterator[Draft]:
        """Plans with falling peaks, until no tensor at the peak can be dropped."""
        while (after := self._down(draft)) is not None:
            draft = after
            yield draft

    def up(self, draft: Draft, limit_nbytes: int) -> Iterator[Draft]:
        """Faster and faster plans within the limit, until no tensor that is rebuilt can be kept."""
        tried: set[tuple[int, int]] = set()
        while (after := self._up(draft, limit_nbytes, tried)) is not None:
            draft = after
            yield draft

    def within(self, draft: Draft, limit_nbytes: int) -> Draft | None:
        """The plan within the limit to which a walk down, followed by a walk up, leads. None if there is none, or if another
        walk has been there before.
        """
        down = itertools.islice(self.down(draft), _STEPS)
        while (draft.lives, limit_nbytes) not in self._passed:
            self._passed.add((draft.lives, limit_nbytes))
            if draft.peak_nbytes <= limit_nbytes:
                return self.topmost(draft, limit_nbytes)
            after = next(down, None)
            if after is None:
                return None
            draft = after
        return None

    def topmost(self, draft: Draft, limit_nbytes: int) -> Draft:
        """The plan to which a walk up leads."""
        *_, last = draft, *self.up(draft, limit_nbytes)
        return last

    def _down(self, draft: Draft) -> Draft | None:
        peak_at, level = draft.peak_at, draft.peak_nbytes

        def lower(plan: Draft | Change) -> bool:
            return int(plan.nbytes[peak_at]) < level and plan.peak_nbytes <= level

        def price(change: Change) -> tuple[float, int]:
            """Seconds for a byte at the peak."""
            return max(0.0, change.extra_seconds) / (level - int(change.nbytes[peak_at])), change.peak_nbytes

        drops = sorted(filter(lower, _drops(draft, peak_at, self.wide)), key=price)
        return next(filter(lower, self._after(draft, drops)), None)

    def _up(self, draft: Draft, limit_nbytes: int, tried: set[tuple[int, int]]) -> Draft | None:
        def keeps() -> Iterator[Change]:
            for t, point, kept in _keeps(draft, limit_nbytes):
                if (t, point) not in tried:
                    tried.add((t, point))
                    change = draft.change({t: kept})
                    if change is not None and change.peak_nbytes <= limit_nbytes and change.extra_seconds < 0:
                        yield change

        afters = self._after(draft, keeps())
        return next((a for a in afters if a.peak_nbytes <= limit_nbytes and a.seconds < draft.seconds), None)

    def _after(self, draft: Draft, changes: Iterable[Change]) -> Iterator[Draft]:
        """The plans with each of these changes, while there are work and time left."""
        for change in changes:
            if self.left <= 0:
                return
            points = len(self.graph.points)
            self.left -= max(1, draft.runs // points)
            self._unwatched += max(points, draft.runs)
            if self._unwatched > _WATCHED:
                self._unwatched = 0
                if self._over():
                    self.left = 0
            with contextlib.suppress(LoweringError):
                yield draft.after(change)


def _drops(draft: Draft, at: int, wide: bool = False) -> Iterator[Change]:
    """Changes that drop one of the largest tensors at a point and rebuild it where autograd next asks for it, or where an op
    that runs again next reads it. `wide`: also try to hold until then the tensors that the rebuild starts from.
    """
    graph = draft.graph
    there = [
        life
        for life in draft.lives
        if life.born_at <= at <= life.freed_at and (life.how == "rebuild" or graph.tensors[life.tensor].freed_at < at)
    ]
    for life in sorted(there, key=lambda life: -graph.tensors[life.tensor].nbytes)[: _MANY if wide else _FEW]:
        t = life.tensor
        op = graph.rebuilders.get(t)
        reads = list(graph.reads(t))
        if op is None or any(asked <= at <= released for asked, released in reads):
            continue
        asked = sorted(p for p, _ in reads if life.born_at <= p <= life.freed_at)
        read = sorted({*asked, *(p for p in draft.segments_of(t) if life.born_at < p <= life.freed_at)})
        lives = [other for other in draft.lives_of[t] if other is not life]
        if any(p < at for p in read) or (life.how == "rebuild" and life.born_at < at):
            lives.append(replace(life, freed_at=at - 1))
        for again in {next((p for p in points if p > at), None) for points in (asked, read)}:
            rebuilt = [] if again is None else [Life(tensor=t, born_at=again, freed_at=life.freed_at, how="rebuild")]
            for held in [{}, *(_starts(draft, op, at, again) if wide and again is not None else ())]:
                change = draft.change({t: [*lives, *rebuilt], **held})
                if change is not None:
                    yield change


def _starts(draft: Draft, op: Op, at: int, again: int) -> Iterator[dict[int, list[Life]]]:
    """Tensors, with lives until the point `again`, from which a rebuild of an op's result may start there: either the op's
    inputs, or tensors upstream of it that are in memory at the point `at`, which adds no bytes there. Yields nothing if all
    inputs are held.
    """
    graph = draft.graph
    reads = [t for t in dict.fromkeys(op.inputs) if not draft.resident(t, again)]
    upstream, stack = dict.fromkeys(reads), list(reads)
    there = []
    while stack:
        t = stack.pop()
        if _in_memory(draft, t, at):
            there.append(t)
            continue
        maker = graph.rebuilders.get(t)
        if maker is None:
            there = []
            break
        new = [u for u in maker.inputs if u not in upstream and not draft.resident(u, again)]
        upstream.update(dict.fromkeys(new))
        stack += new
    for starts in dict.fromkeys((tuple(sorted(reads)), tuple(sorted(there)))):
        if starts and graph.overwritten.isdisjoint(starts):
            yield {t: _until(draft, t, again) for t in starts}


def _in_memory(draft: Draft, tensor: int, at: int) -> bool:
    return draft.graph.tensors[tensor].there(at) or any(
        life.born_at <= at <= life.freed_at for life in draft.lives_of.get(tensor, ())
    )


def _until(draft: Draft, tensor: int, point: int) -> list[Life]:
    """The lives of a tensor, one of which is extended to a point."""
    lives = draft.lives_of.get(tensor, [])
    before = [life for life in lives if life.born_at < point]
    born_at = draft.graph.tensors[tensor].born_at
    last = before[-1] if before else Life(tensor=tensor, born_at=born_at, freed_at=point, how="original")
    return [*before[:-1], replace(last, freed_at=max(last.freed_at, point)), *lives[len(before) :]]


def _keeps(draft: Draft, limit_nbytes: int) -> Iterator[tuple[int, int, list[Life]]]:
    """(tensor, point at which it is rebuilt, its lives if it were kept until then) for tensors that there is room to keep. The
    first one saves the most seconds per byte and per point for which it is kept.
    """
    graph = draft.graph
    options = []
    for point, steps in draft.segments.items():
        for op in draft.ops(steps):
            for t in rebuilt_by(op):
                tensor, lives = graph.tensors[t], draft.lives_of.get(t, [])
                before = [life for life in lives if life.born_at < point]
                if before and before[-1].freed_at >= point:
                    continue  # a second copy, which is freed at once
                since = before[-1].freed_at if before else tensor.born_at
                if not before or before[-1].how == "original":
                    if t in graph.overwritten:
                        continue
                    since = max(since, tensor.freed_at)
                if limit_nbytes - int(draft.nbytes[since + 1 : point].max(initial=0)) < tensor.nbytes:
                    continue
                after = lives[len(before) :]
                rebuilt = after[:1] if after and after[0].born_at == point else []
                until = rebuilt[0].freed_at if rebuilt else point
                original = Life(tensor=t, born_at=tensor.born_at, freed_at=until, how="original")
                kept = replace(before[-1], freed_at=until) if before else original
                value = op.seconds / max(1, tensor.nbytes * (point - since))
                options.append((value, t, point, [*before[:-1], kept, *after[len(rebuilt) :]]))
    for _, t, point, lives in sorted(options, key=itemgetter(0), reverse=True):
        yield t, point, lives
