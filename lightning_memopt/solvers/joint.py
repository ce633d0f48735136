"""Recomputation, offload and compression decided together, for one budget.

Relaxed, the three are one minimum cut: at the moment at which most is held, a tensor that backward needs is on the device, or
there in encoded form, or in a tier, or made again later (`joint_bound`, which also proves what no plan is below).

From the cuts, and from the plans that only recompute, come starts; what goes away so that a start fits the budget is chosen
by CP-SAT against the link's capacity (`joint_choice`), and each result is priced by the simulator. Starts that fit as they are
take part, and so do the heuristics of `transfer_baselines`: the result is never worse than recomputation alone, nor than any of
them. What is compressed *and* offloaded comes last: with it, a plan is never worse than without, where there is time for both.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, Prediction, Run, Timeline, lower, simulate
from lightning_memopt.plan.clocks import Rates
from lightning_memopt.plan.forms import EXACT, codec_of, tier_of
from lightning_memopt.solvers.joint_bound import Forms, Point, Prices, bound
from lightning_memopt.solvers.joint_choice import chosen
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.solvers.transfer_baselines import POLICIES
from lightning_memopt.solvers.trips import Form, Planner, Trip, send_away

_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Prices of a byte, in seconds of the whole step per byte of what is held in it."""
_LINK = (0.0, 0.25, 0.5, 1.0)
_STARTS = 24
_SHARES = (1.0, 0.85, 0.7, 0.55)
_CHOICE_SECONDS = 1.0
_BOUND_SHARE = 0.15
"""Of the time limit, for the bound."""
Lives = tuple[Life, ...]
_Plans = Sequence[tuple[str, Lives]]
_Start = tuple[str, Lives, Mapping[int, Form] | None, float]
"""Who made it, its lives, the forms of what of it is away (None: to be chosen), the share of the budget to choose for."""


@dataclass(frozen=True)
class Joint:
    """A plan, its price, and what no plan is below. `solver`: where it came from."""

    lives: Lives
    predicted: Prediction
    solver: str
    bound_seconds: float
    seconds: float

    @property
    def gap(self) -> float:
        """How far above the bound it may be, as a share of its own extra seconds."""
        found = self.predicted.seconds
        return max(0.0, 1.0 - self.bound_seconds / found) if found > 0 else 0.0


def _allowed(graph: Graph, lives: Iterable[Life], forms: Forms) -> dict[int, Sequence[Form]]:
    """Without those forms that do not give back the bits that a rebuild starts from."""
    read = {
        t
        for steps in lower(graph, lives).segments.values()
        for step in steps
        if isinstance(step, Run)
        for t in graph.ops[step.op].inputs
    }
    return {t: [f for f in found if t not in read or codec_of(f[0]) in EXACT] for t, found in forms.items()}


def _accepted(trips: Iterable[Trip], forms: Forms) -> Iterator[Trip]:
    """Trips in forms that are allowed: their own, or one of the same kind; what may not be away stays."""
    for trip in trips:
        mine = forms.get(trip.gap.tensor, ())
        kind = bool(codec_of(trip.form)), bool(tier_of(trip.form))
        same = [f for f in mine if (bool(codec_of(f[0])), bool(tier_of(f[0]))) == kind]
        if (trip.form, trip.away_nbytes) in same:
            yield trip
        elif same:
            yield replace(trip, form=same[0][0], away_nbytes=same[0][1])


class _Instant:
    """Links and codecs that take no time: what is away is away for as long as it can be."""

    def out_seconds(self, tier: str, nbytes: int) -> float:
        return 0.0

    in_seconds = encode_seconds = decode_seconds = out_seconds


def least_bytes(graph: Graph, plans: Iterable[tuple[Life, ...]], forms: Forms) -> int:
    """The smallest peak of these plans with everything away, in its smallest form, for as long as it can be."""
    found = []
    for lives in (keep_all(graph), *plans):
        planner, allowed = Planner(graph, lives, _Instant()), _allowed(graph, lives, forms)
        chosen = {t: min(allowed[t], key=_device_nbytes) for t in planner.gaps if allowed.get(t)}
        found.append(simulate(graph, send_away(lives, planner.plan(chosen))).predicted.peak_bytes)
    return min(found)


def _device_nbytes(form: Form) -> int:
    return 0 if tier_of(form[0]) else form[1]


class _Search:
    """The best plan so far."""

    def __init__(
        self, graph: Graph, budget_nbytes: int, rates: Rates, limit_seconds: float, overhead: Callable[[Lives], float]
    ) -> None:
        self.graph, self.budget_nbytes, self.rates, self.overhead = graph, budget_nbytes, rates, overhead
        self.limit_seconds = limit_seconds
        self.best: Joint | None = None
        self._began = time.perf_counter()
        self._seen: dict[tuple[Lives, float, int], Forms] = {}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        """Whether there is a plan and no time for another."""
        return self.best is not None and self.seconds > self.limit_seconds

    def _loses(self, seconds: float) -> bool:
        return self.best is not None and seconds >= self.best.predicted.seconds

    def consider(self, solver: str, lives: Lives) -> Timeline:
        line = simulate(self.graph, lives, rates=self.rates)
        if line.predicted.peak_bytes <= self.budget_nbytes and not self._loses(line.predicted.seconds):
            predicted = replace(line.predicted, overhead_seconds=self.overhead(lives))
            if not self._loses(predicted.seconds):
                self.best = Joint(lives, predicted, solver, 0.0, 0.0)
        return line

    def extend(self, start: _Start, forms: Forms) -> None:
        """The plan with these tensors away, or as many as the budget asks for, or a `share` of it: copies lag behind."""
        solver, lives, first, share = start
        line = self.consider(solver, lives)
        if max(line.nbytes) <= self.budget_nbytes or self._loses(line.predicted.seconds):
            return  # it fits as it is, or what runs again takes too long already
        planner, allowed = Planner(self.graph, lives, self.rates), _allowed(self.graph, lives, forms)
        away = first
        if away is None:
            key = lives, share, id(forms)
            if key in self._seen:
                return
            self._seen[key] = forms
            left = max(0.5, min(_CHOICE_SECONDS, self.limit_seconds - self.seconds))
            away = chosen(self.graph, planner, line.nbytes, int(share * self.budget_nbytes), allowed, self.rates, left)
        away = {t: f for t, f in (away or {}).items() if t in planner.gaps and f in allowed.get(t, ())}
        trips = planner.within(away, self.budget_nbytes) if away else None
        if trips is not None:
            self.consider(f"{solver}, {len(trips)} away", send_away(lives, trips))

    def policies(self, forms: Forms, recompute: bool) -> None:
        """What those who decide by dependencies alone would do (`transfer_baselines`), with the forms that are allowed here."""
        tiers = sorted({f for found in forms.values() for f, _ in found if not codec_of(f)})
        for name, policy in POLICIES.items():
            for tier in tiers:
                try:
                    lives, trips = policy(self.graph, self.rates, tier)
                    if not recompute and any(life.how == "replay" for life in lives):
                        continue
                    if not trips:
                        self.consider(name, lives)
                        continue
                    trips = list(_accepted(trips, _allowed(self.graph, lives, forms)))
                    away = {trip.gap.tensor: (trip.form, trip.away_nbytes) for trip in trips}
                    fits = Planner(self.graph, lives, self.rates).within(away, self.budget_nbytes, planned=trips)
                    if fits is not None:
                        self.consider(name, send_away(lives, fits))
                except ValueError:  # its lives ask for what cannot be made in this graph
                    continue
            if self.over:
                return


class _Cuts:
    """Starts from minimum cuts at one point, and at others."""

    def __init__(self, graph: Graph, forms: Forms, rates: Rates) -> None:
        self.graph, self.forms, self.rates = graph, forms, rates
        self._requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
        self._lost = {old for op in graph.ops if op.at <= graph.last_release for old, _ in op.mutates}

    def rolled(self, point: Point, held: Iterable[int]) -> Lives:
        """The lives that hold this and what costs nothing there, and make the rest again when it is asked for."""
        problem, asked = point.problem, {t for _, t in self._requests}
        spare = asked.difference(problem.needed).union(filter(problem.given, self.graph.producers))
        roll = Rollout(self.graph)
        roll.serve(self._requests, spare.union(held) - self._lost | unrepeatable(self.graph))
        return roll.lives()

    def starts(self) -> Iterator[_Start]:
        """Cuts for a grid of prices: with what they say is away, then with what is chosen anew."""
        if not self._requests:
            return
        levels = unmodified_levels(self.graph)[: self._requests[-1][0] + 1]
        point = Point(self.graph, min(self._requests[0][0], levels.index(max(levels))), self.forms, self.rates)
        unit = sum(op.seconds for op in self.graph.ops) / max(1, point.problem.total_nbytes)
        cuts, seen = [], set()
        for price in (unit * p for p in _PRICES):
            for link in _LINK:  # both directions are as busy, where what goes out comes back
                try:
                    found = point.cheapest(Prices(price, link, link))
                except ValueError:  # something is needed there that nobody can make
                    return
                key = found.held, tuple(sorted(found.away.items()))
                if key not in seen:
                    seen.add(key)
                    cuts.append(self.rolled(point, found.held))
                    yield "joint cut", cuts[-1], found.away, 1.0
        for lives in cuts:
            yield "joint cut", lives, None, 1.0


def _kept(graph: Graph) -> Iterator[_Start]:
    for share in _SHARES:
        yield "keep all", keep_all(graph), None, share


def _spread(plans: _Plans) -> list[_Start]:
    """Some of the plans that only recompute."""
    stride = max(1, -(-len(plans) // _STARTS))
    return [(solver, lives, None, 1.0) for solver, lives in [*plans[::-stride], *plans[:1]]]


def _of(forms: Forms, kinds: Iterable[tuple[bool, bool]]) -> Forms:
    """Those of these kinds: (with a codec, in a tier)."""
    return {t: [f for f in found if (bool(codec_of(f[0])), bool(tier_of(f[0]))) in kinds] for t, found in forms.items()}


_TIER, _CODEC, _BOTH = (False, True), (True, False), (True, True)


def solve(
    graph: Graph,
    budget_nbytes: int,
    *,
    rates: Rates,
    forms: Forms,
    plans: Iterable[tuple[str, Lives]] = (),
    recompute: bool = True,
    limit_seconds: float = 30.0,
    overhead: Callable[[Lives], float] = lambda _: 0.0,
) -> Joint | None:
    """The fastest plan found within the budget; None where none fits. `plans`: those that only recompute, by peaks rising.
    `recompute`: without it, nothing runs again.
    """
    search = _Search(graph, budget_nbytes, rates, limit_seconds, overhead)
    recomputed = list(plans)
    fitting = bisect_right(recomputed, budget_nbytes, key=lambda plan: simulate(graph, plan[1]).predicted.peak_bytes)
    if fitting:
        search.consider(*recomputed[fitting - 1])
    search.policies(forms, recompute)
    proved, priced = bound(graph, budget_nbytes, forms, rates, _BOUND_SHARE * limit_seconds)

    def starts() -> Iterator[tuple[_Start, Forms]]:
        plain = _of(forms, (_TIER, _CODEC))
        both = any(codec_of(f) and tier_of(f) for found in forms.values() for f, _ in found)
        for some in (plain, forms) if both else (plain,):
            yield from ((start, some) for start in _kept(graph))
            if recompute:
                cuts = _Cuts(graph, some, rates)
                yield from ((start, some) for start in cuts.starts())
                yield from ((start, some) for start in _spread(recomputed))
                for point, found in priced:
                    lives = cuts.rolled(point, found.held)
                    yield from ((("priced cut", lives, away, 1.0), some) for away in (found.away, None))
        for kind in (_TIER, _CODEC, _BOTH):
            only = _of(forms, (kind,))
            yield from ((start, only) for start in _kept(graph))

    for start, some in starts():
        try:
            search.extend(start, some)
        except LoweringError:
            continue
        if search.over:
            break
    if search.best is None:
        return None
    return replace(search.best, bound_seconds=proved, seconds=search.seconds)
