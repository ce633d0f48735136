"""Recomputation, offload and compression decided together, for one budget.

A relaxation of the three decisions is a single minimum cut: at the point of the peak, a tensor that backward needs is on the
device, or encoded there, or in a tier, or rebuilt later. `bound` solves this, and proves a lower bound on the seconds of every
plan.

The search starts from the cuts and from the plans that only recompute. For each start, CP-SAT chooses the tensors to park so
that the plan fits the budget, against the link's capacity (`choice`); the simulator prices each result. Also considered are
starts that fit without parking, the policies of `offload.policies`, and the best plans that only move or only encode. So the
result is never worse than any of these. Forms that encode *and* move come last, because the other starts do not depend on them.
The best plan is polished (`polish`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_memopt.clocks import process_time
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, LoweringError, Prediction, Timeline, simulate
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.forms import TIERS, codec_of, tier_of
from lightning_memopt.plan.model import saved_in_tiers
from lightning_memopt.plan.tiers import Limits, within
from lightning_memopt.solvers.joint.bound import Forms, Prices, Relaxation, Relaxed, bound
from lightning_memopt.solvers.joint.choice import chosen
from lightning_memopt.solvers.joint.least import allowed, fewest_in_tier
from lightning_memopt.solvers.joint.polish import polished
from lightning_memopt.solvers.offload.policies import POLICIES
from lightning_memopt.solvers.offload.trips import Form, Trip, TripPlanner, brought_home, send_away
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.units import ceil_div

_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Prices of a byte, as multiples of (seconds of the step) / (bytes held in it)."""
_LINK = (0.0, 0.25, 0.5, 1.0)
_STARTS, _NEXT = 24, 8
_SHARES = (1.0, 0.85, 0.7, 0.55)
_CHOICE_SECONDS = 0.4
ALONE_SHARE, _BOUND_SHARE, _POLISH_SHARE = 0.4, 0.15, 0.2
"""Maximum shares of the time limit: for plans that only move or only encode; for the bound; for polishing the best plan."""
_CLOSE = 1e-3
"""A plan this close to the bound is good enough."""
Lives = tuple[Life, ...]
_Plans = Sequence[tuple[str, Lives]]
_Start = tuple[str, Lives, Mapping[int, Form] | None, float]
"""(name of the solver, lives, forms of the tensors to park or None to let `choice` decide, share of the budget to choose
for).
"""


@dataclass(frozen=True)
class Joint:
    """A plan of the joint search.

    lives: the lives of the plan.
    predicted: its predicted cost.
    solver: the start that the plan came from.
    bound_seconds: every plan within the budget takes at least these extra seconds.
    seconds: how long the search took.
    """

    lives: Lives
    predicted: Prediction
    solver: str
    bound_seconds: float
    seconds: float

    @property
    def gap(self) -> float:
        """How far the plan may be above the best one, as a share of its extra seconds: its distance from the bound."""
        seconds = self.predicted.seconds
        return max(0.0, 1.0 - self.bound_seconds / seconds) if seconds > 0 else 0.0


def _accepted(trips: Iterable[Trip], forms: Forms) -> Iterator[Trip]:
    """Trips in allowed forms: in their own form, or else in the first allowed one of the same kind. Other trips are left
    out.
    """
    for trip in trips:
        kind = _kind(trip.form)
        of_kind = [form for form in forms.get(trip.gap.tensor, ()) if _kind(form[0]) == kind]
        if (trip.form, trip.parked_nbytes) in of_kind:
            yield trip
        elif of_kind:
            form, nbytes = of_kind[0]
            yield replace(trip, form=form, parked_nbytes=nbytes)


def _kind(form: str) -> tuple[bool, bool]:
    """(encoded, in a tier)"""
    return bool(codec_of(form)), bool(tier_of(form))


class _Search:
    """The best plan so far."""

    def __init__(
        self,
        graph: Graph,
        budget_nbytes: int,
        rates: TransferRates,
        limit_seconds: float,
        clock: Callable[[], float],
        overhead: Callable[[Lives], float],
        limits: Limits,
    ) -> None:
        self.graph, self.budget_nbytes, self.rates, self.overhead = graph, budget_nbytes, rates, overhead
        self.limits = limits
        self.limit_seconds = limit_seconds
        self.best: Joint | None = None
        self.origin: tuple[Lives, Sequence[Trip]] = (), ()
        self.clock = clock
        self._began = clock()
        self._seen: dict[tuple[Lives, float, int], Forms] = {}

    @property
    def seconds(self) -> float:
        return self.clock() - self._began

    @property
    def over(self) -> bool:
        """Whether there is a plan and no time for another."""
        return self.best is not None and self.seconds > (1 - _POLISH_SHARE) * self.limit_seconds

    def _loses(self, seconds: float) -> bool:
        return self.best is not None and seconds >= self.best.predicted.seconds

    def consider(self, solver: str, lives: Lives, trips: Sequence[Trip] = ()) -> Timeline:
        """Price the lives with these trips, and keep the plan if it fits and is the best so far. Returns its timeline."""
        with_trips = send_away(lives, trips)
        line = simulate(self.graph, with_trips, rates=self.rates)
        fits = line.predicted.peak_nbytes <= self.budget_nbytes and within(saved_in_tiers(with_trips), self.limits)
        if fits and not self._loses(line.predicted.seconds):
            predicted = replace(line.predicted, overhead_seconds=self.overhead(with_trips))
            if not self._loses(predicted.seconds):
                self.best = Joint(with_trips, predicted, solver, 0.0, 0.0)
                self.origin = lives, trips
        return line

    def extend(self, start: _Start, forms: Forms) -> None:
        """Consider a start as it is, and with tensors parked: those that it names, or else those that `choice` finds for a
        share of the budget. (The share is below 1 because copies end later than the choice assumes.)
        """
        solver, lives, first, share = start
        line = self.consider(solver, lives)
        if max(line.nbytes) <= self.budget_nbytes or self._loses(line.predicted.seconds):
            return  # it fits as it is, or its rebuilds alone already take too long
        planner, may = TripPlanner(self.graph, lives, self.rates), allowed(self.graph, lives, forms)
        parked = first
        if parked is None:
            key = lives, share, id(forms)
            if key in self._seen:
                return
            self._seen[key] = forms
            again = line.predicted.seconds
            below = self.best.predicted.seconds - again if self.best is not None and again else None
            target = int(share * self.budget_nbytes)
            args = self.graph, planner, line.nbytes, target, may, self.rates, _CHOICE_SECONDS, below, self.limits
            parked = chosen(*args)
        parked = {t: form for t, form in (parked or {}).items() if t in planner.gaps and form in may.get(t, ())}
        trips = planner.within(parked, self.budget_nbytes) if parked else None
        if trips is not None:
            self.consider(f"{solver}, {len(trips)} parked", lives, trips)

    def consider_fewest(self, forms: Forms, plans: Sequence[Lives]) -> None:
        """Consider the plans that take the fewest bytes of a tier, and improve the best of them."""
        for tier in self.limits:
            lives = fewest_in_tier(self.graph, plans, forms, self.budget_nbytes, tier)
            if lives is not None:
                self.consider("fewest parked", *brought_home(self.graph, lives))
        self.polish(forms)

    def polish(self, forms: Forms) -> None:
        """Improve the best plan by changing single trips, as long as that helps."""
        lives, trips = self.origin
        if self.best is not None and trips:
            left = max(0.0, min(_POLISH_SHARE * self.limit_seconds, self.limit_seconds - self.seconds))
            may = allowed(self.graph, lives, forms)
            args = self.graph, lives, trips, self.budget_nbytes, may, self.rates, left, self.clock, self.limits
            better = polished(*args)
            self.consider(self.best.solver, lives, better)

    def policies(self, forms: Forms, recompute: bool) -> None:
        """Consider the plans of `offload.policies`, in the forms that are allowed."""
        tiers = sorted({form for offered in forms.values() for form, _ in offered if not codec_of(form)}) or [TIERS[0]]
        for name, policy in POLICIES.items():
            for tier in tiers:
                try:
                    lives, trips = policy(self.graph, self.rates, tier)
                    if not recompute and any(life.how == "rebuild" for life in lives):
                        continue
                    if not trips:
                        self.consider(name, lives)
                        continue
                    trips = list(_accepted(trips, allowed(self.graph, lives, forms)))
                    parked = {trip.gap.tensor: (trip.form, trip.parked_nbytes) for trip in trips}
                    fits = TripPlanner(self.graph, lives, self.rates).within(parked, self.budget_nbytes, planned=trips)
                    if fits is not None:
                        self.consider(name, lives, fits)
                except ValueError:  # lives of the policy cannot begin in this graph, or the rates lack a link that it needs
                    continue
            if self.over:
                return


class _Cuts:
    """Starts from minimum cuts: a grid of prices at the peak, and lives for a cut at any point."""

    def __init__(self, graph: Graph, forms: Forms, rates: TransferRates) -> None:
        self.graph, self.forms, self.rates = graph, forms, rates
        self._requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
        self._lost = {old for op in graph.ops if op.at <= graph.last_release for old, _ in op.mutates}

    def rolled(self, relaxation: Relaxation, held: Iterable[int]) -> Lives:
        """The lives that hold these tensors and those that cost nothing at the point, and rebuild the rest when it is asked
        for.
        """
        problem, asked = relaxation.problem, {t for _, t in self._requests}
        spare = asked.difference(problem.needed).union(filter(problem.given, self.graph.producers))
        roll = Rollout(self.graph)
        roll.serve(self._requests, spare.union(held) - self._lost | unrepeatable(self.graph))
        return roll.lives()

    def starts(self) -> Iterator[_Start]:
        """Starts from cuts for a grid of prices, with the tensors that the cuts park."""
        if not self._requests:
            return
        levels = unmodified_levels(self.graph)[: self._requests[-1][0] + 1]
        relaxation = Relaxation(self.graph, min(self._requests[0][0], levels.index(max(levels))), self.forms, self.rates)
        unit = sum(op.seconds for op in self.graph.ops) / max(1, relaxation.problem.total_nbytes)
        seen = set()
        for price in (unit * p for p in _PRICES):
            for link in _LINK:  # both directions are equally busy, because what goes out comes back
                try:
                    relaxed = relaxation.cheapest(Prices(price, link, link))
                except ValueError:  # a tensor is needed there that no op can make
                    return
                key = relaxed.held, tuple(sorted(relaxed.parked.items()))
                if key not in seen:
                    seen.add(key)
                    yield "joint cut", self.rolled(relaxation, relaxed.held), relaxed.parked, 1.0


def _kept(graph: Graph) -> Iterator[_Start]:
    for share in _SHARES:
        yield "keep all", keep_all(graph), None, share


def _spread(plans: _Plans, fitting: int) -> list[_Start]:
    """Starts from plans that only recompute: the `_NEXT` plans just above the budget, which need to park little, and about
    `_STARTS` plans spread over the whole frontier.
    """
    stride = max(1, ceil_div(len(plans), _STARTS))
    chosen = dict.fromkeys((*range(fitting, min(len(plans), fitting + _NEXT)), *range(len(plans) - 1, -1, -stride), 0))
    return [(*plans[i], None, 1.0) for i in chosen if i < len(plans)]


def _of(forms: Forms, kinds: Iterable[tuple[bool, bool]]) -> Forms:
    """The forms of these kinds; a kind is (with a codec, in a tier)."""
    return {t: [form for form in offered if _kind(form[0]) in kinds] for t, offered in forms.items()}


_TIER, _CODEC, _BOTH = (False, True), (True, False), (True, True)


def _search(search: _Search, forms: Forms, plans: Iterable[tuple[str, Lives]], recompute: bool) -> float:
    """Run the search. `search` then has the best plan. Returns a lower bound on the seconds of every plan."""
    graph, budget_nbytes, rates = search.graph, search.budget_nbytes, search.rates
    recomputed = list(plans)
    fitting = bisect_right(recomputed, budget_nbytes, key=lambda plan: simulate(graph, plan[1]).predicted.peak_nbytes)
    if fitting:
        search.consider(*recomputed[fitting - 1])
    plain, both = _of(forms, (_TIER, _CODEC)), _of(forms, (_TIER, _CODEC, _BOTH))
    search.policies(plain, recompute)
    for alone in (_of(forms, (kind,)) for kind in (_TIER, _CODEC)) if recompute else ():
        seconds = ALONE_SHARE * search.limit_seconds
        only = _Search(graph, budget_nbytes, rates, seconds, search.clock, search.overhead, search.limits)
        _search(only, alone, (), recompute=False)
        if only.best is not None:
            search.consider(only.best.solver, *only.origin)
    proved, priced = 0.0, list[tuple[Relaxation, Relaxed]]()
    if recompute:
        seconds = _BOUND_SHARE * search.limit_seconds
        proved, priced = bound(graph, budget_nbytes, forms, rates, seconds, search.clock, search.limits)

    def starts() -> Iterator[tuple[_Start, Forms]]:
        """Starts with their forms. Starts for which nothing must be chosen come first."""
        later: list[tuple[_Start, Forms]] = []
        for offered in (plain, both) if both != plain else (plain,):
            if recompute:
                cuts = _Cuts(graph, offered, rates)
                for start in (*cuts.starts(), *(("priced cut", cuts.rolled(p, r.held), r.parked, 1.0) for p, r in priced)):
                    yield start, offered
                    later.append(((start[0], start[1], None, 1.0), offered))
                yield from ((start, offered) for start in _spread(recomputed, fitting))
            yield from ((start, offered) for start in _kept(graph))
        yield from later

    for start, offered in starts():
        try:
            search.extend(start, offered)
        except LoweringError:
            continue
        if search.over or (search.best is not None and search.best.predicted.seconds <= (1 + _CLOSE) * proved):
            break
    search.polish(forms)
    return proved


def solve_joint(
    graph: Graph,
    budget_nbytes: int,
    *,
    rates: TransferRates,
    forms: Forms,
    plans: Iterable[tuple[str, Lives]] = (),
    recompute: bool = True,
    limit_seconds: float = 30.0,
    clock: Callable[[], float] = process_time,
    overhead: Callable[[Lives], float] = lambda _: 0.0,
    known: Iterable[tuple[str, Lives]] = (),
    limits: Limits = MappingProxyType({}),
) -> Joint | None:
    """The fastest plan found within the budget and the limits of tiers; None if none fits. `plans`: plans that only recompute,
    with rising peaks. `recompute`: if False, no op runs again, and no bound is proven. `clock`: measures the time limit, which
    holds once a plan was found. `known`: plans that may also park.
    """
    search = _Search(graph, budget_nbytes, rates, limit_seconds, clock, overhead, limits)
    recomputing = list(plans)
    for solver, lives in known:
        search.consider(solver, *brought_home(graph, lives))
    proved = _search(search, forms, recomputing, recompute)
    if search.best is None:
        search.consider_fewest(forms, [lives for _, lives in recomputing] if recompute else [])
    if search.best is None:
        return None
    return replace(search.best, bound_seconds=proved, seconds=search.seconds)
