"""Recomputation, offload and compression decided together, for one budget.

Relaxed, the three are one minimum cut: at the moment at which most is held, a tensor that backward needs is on the device, or
there in encoded form, or in a tier, or made again later. With a price for a byte on the device and one for a second of each
direction of the link, every tensor that is held takes the cheapest place, and the cut decides which are held at all: exact
for those prices, and a Lagrangian bound for every plan (docs/formulation.md, "Away").

From the cuts, and from the plans that only recompute, come starts; what goes away so that a start fits the budget is chosen
by CP-SAT against the link's capacity, and each result is priced by the simulator. Starts that fit as they are take part, and
so do the heuristics of `transfer_baselines`: the result is never worse than recomputation alone, nor than any of them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ortools.sat.python import cp_model

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, Prediction, Run, lower, simulate
from lightning_memopt.plan.clocks import Rates
from lightning_memopt.plan.forms import EXACT, codec_of, tier_of
from lightning_memopt.solvers.bound import Moment
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.solvers.transfer_baselines import POLICIES
from lightning_memopt.solvers.trips import Form, Planner, Trip, send_away

Forms = Mapping[int, Sequence[Form]]
"""Tensor -> the forms in which it may be away, with its bytes there."""
_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Prices of a byte, in seconds of the whole step per byte of what is held in it."""
_LINK = (0.0, 0.25, 0.5, 1.0)
_STARTS = 24
_SHARES = (1.0, 0.85, 0.7, 0.55)
_CHOICE_SECONDS = 1.0
_UNITS = 1 << 20
"""Bytes and seconds are counted in so many parts of the largest."""


@dataclass(frozen=True)
class Joint:
    """A plan, its price, and what no plan is below. `solver`: where it came from."""

    lives: tuple[Life, ...]
    predicted: Prediction
    solver: str
    bound_seconds: float
    seconds: float

    @property
    def gap(self) -> float:
        """How far above the bound it may be, as a share of its own extra seconds."""
        found = self.predicted.seconds
        return 1.0 - self.bound_seconds / found if found > 0 else 0.0


class _Relaxed:
    """The minimum cuts of one moment, and the bound that they prove."""

    def __init__(self, graph: Graph, moment: Moment, forms: Forms, rates: Rates) -> None:
        self.graph, self.moment, self.forms, self.rates = graph, moment, forms, rates
        first = min((p for s in graph.saves for p in s.unpacked_at), default=len(graph.points))
        self.before = sum(op.seconds for op in graph.ops if op.at < first)
        self.after = sum(op.seconds for op in graph.ops if op.at > first)
        self.bounds: list[tuple[float, float]] = []
        """(seconds, price of a byte): no plan takes less than the seconds less the price of the bytes there are."""

    def cost(self, t: int, price: float, out: float, back: float) -> tuple[float, Form | None]:
        """The cheapest place of a tensor that is held, and what it costs."""
        nbytes = self.graph.tensors[t].nbytes
        best: tuple[float, Form | None] = (price * nbytes, None)
        for form in self.forms.get(t, ()):
            found = self._away(nbytes, form, price, out, back)
            if found < best[0]:
                best = found, form
        return best

    def _seconds(self, t: int, price: float, out: float, back: float) -> float:
        return self.cost(t, price, out, back)[0]

    def _away(self, nbytes: int, form: Form, price: float, out: float, back: float) -> float:
        codec, tier, size = codec_of(form[0]), tier_of(form[0]), form[1]
        seconds = 0.0
        if codec:  # while the device encodes and decodes, links carry copies
            seconds += (1 - out) * self.rates.encode_seconds(codec, nbytes)
            seconds += (1 - back) * self.rates.decode_seconds(codec, nbytes)
        if tier:
            return seconds + out * self.rates.out_seconds(tier, size) + back * self.rates.in_seconds(tier, size)
        return seconds + price * size

    def cuts(self) -> Iterator[tuple[frozenset[int], dict[int, Form]]]:
        """(what is held, the forms of what of it is away), for a grid of prices."""
        problem = self.moment.problem
        unit = (self.before + self.after) / max(1, problem.total_nbytes)
        seen = set()
        for price in (unit * p for p in _PRICES):
            for out in _LINK:
                back = out  # both directions are as busy, where what goes out comes back
                choice = problem.solve(price, partial(self._seconds, price=price, out=out, back=back), 1.0 - back)
                self.bounds.append((choice.value_seconds - out * self.before - back * self.after, price))
                places = {t: self.cost(t, price, out, back)[1] for t in choice.held}
                key = (choice.held, tuple(sorted((t, f) for t, f in places.items() if f is not None)))
                if key not in seen:
                    seen.add(key)
                    yield choice.held, {t: f for t, f in places.items() if f is not None}

    def bound_seconds(self, budget_nbytes: int) -> float:
        room = budget_nbytes - self.moment.natural_nbytes
        return max((value - price * room for value, price in self.bounds), default=0.0)


def _chosen(
    graph: Graph, planner: Planner, levels: Sequence[int], budget: int, forms: Forms, rates: Rates, limit_seconds: float
) -> dict[int, Form] | None:
    """What goes away so that a plan fits: against the bytes at every high point, what it costs in codecs and in copies that
    the link has no time for. None where nothing fits.
    """
    model = cp_model.CpModel()
    high = _high_points(levels, budget)
    byte = max(1, max(levels) // _UNITS)
    picks: dict[tuple[int, int], cp_model.IntVar] = {}
    for t in planner.gaps:
        mine = [model.new_bool_var(f"away {t} {i}") for i, _ in enumerate(forms.get(t, ()))]
        picks |= {(t, i): x for i, x in enumerate(mine)}
        if len(mine) > 1:
            model.add_at_most_one(mine)
    if not picks:
        return None
    for p in high:
        saved, nbytes_saved = [], []
        for (t, i), x in picks.items():
            gap = planner.gaps[t]
            if max(gap.leaves, graph.tensors[t].freed_at) < p < gap.needed:
                name, size = forms[t][i]
                stays = size if codec_of(name) and not tier_of(name) else 0
                saved.append(x)
                nbytes_saved.append((graph.tensors[t].nbytes - stays) // byte)
        model.add(cp_model.LinearExpr.weighted_sum(saved, nbytes_saved) >= -(-(levels[p] - budget) // byte))
    step = planner.ends[-1]
    second = max(step, 1e-9) / _UNITS
    costs = []
    out, back = [], []
    for (t, i), x in picks.items():
        name, size = forms[t][i]
        nbytes, codec, tier = graph.tensors[t].nbytes, codec_of(name), tier_of(name)
        if codec:
            costs.append(round((rates.encode_seconds(codec, nbytes) + rates.decode_seconds(codec, nbytes)) / second) * x)
        if tier:
            gap = planner.gaps[t]
            out.append((gap.leaves, round(rates.out_seconds(tier, size) / second), x))
            back.append((gap.needed, round(rates.in_seconds(tier, size) / second), x))
            costs.append(x)  # of two that cost nothing, the fewer copies
    for copies, forward in ((out, True), (back, False)):
        stall = model.new_int_var(0, _UNITS * 1000, "stall")
        costs.append(stall)
        first = planner.ends[min((at for at, _, _ in copies), default=0)]
        last = planner.ends[max((at for at, _, _ in copies), default=0)]
        for p in high:
            # what is gone at p was copied between the first that leaves and p; what comes back after p before it is needed
            if forward and p <= graph.backward_begins:
                begun = [(c, x) for at, c, x in copies if at < p]
                time_there = planner.ends[p] - first
            elif not forward and p >= graph.backward_begins:
                begun = [(c, x) for at, c, x in copies if at > p]
                time_there = last - planner.ends[p]
            else:
                continue
            taken = cp_model.LinearExpr.weighted_sum([x for _, x in begun], [c for c, _ in begun])
            model.add(stall >= taken - round(max(0.0, time_there) / second))
    model.minimize(cp_model.LinearExpr.sum(costs))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {t: forms[t][i] for (t, i), x in picks.items() if solver.value(x)}


def _high_points(levels: Sequence[int], budget: int, most: int = 48) -> list[int]:
    """Points above the budget: the local maxima, the highest of them where they are many, and the first and last one."""
    over = [p for p, n in enumerate(levels) if n > budget]
    if not over:
        return []
    tops = [p for p in over if (p == 0 or levels[p - 1] <= levels[p]) and (p + 1 == len(levels) or levels[p + 1] < levels[p])]
    tops = sorted(tops, key=lambda p: -levels[p])[:most]
    return sorted({*tops, over[0], over[-1]})


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


def solve(
    graph: Graph,
    budget_nbytes: int,
    *,
    rates: Rates,
    forms: Forms,
    plans: Iterable[tuple[str, tuple[Life, ...]]],
    moment: Moment | None,
    limit_seconds: float = 30.0,
    overhead: Callable[[tuple[Life, ...]], float] = lambda _: 0.0,
) -> Joint | None:
    """The fastest plan found within the budget; None where none fits. `plans`: those that only recompute, by peaks rising."""
    began = time.perf_counter()
    best: Joint | None = None
    relaxed = _Relaxed(graph, moment, forms, rates) if moment is not None else None

    def consider(solver: str, lives: tuple[Life, ...]) -> None:
        nonlocal best
        line = simulate(graph, lives, rates=rates)
        if line.predicted.peak_bytes > budget_nbytes:
            return
        if best is not None and line.predicted.seconds >= best.predicted.seconds:
            return
        predicted = replace(line.predicted, overhead_seconds=overhead(lives))
        if best is None or predicted.seconds < best.predicted.seconds:
            best = Joint(lives, predicted, solver, 0.0, 0.0)

    def extend(solver: str, lives: tuple[Life, ...], first: Mapping[int, Form] | None = None, share: float = 1.0) -> None:
        """The plan with these tensors away, or as many as the budget asks for, or a `share` of it: copies lag behind."""
        consider(solver, lives)
        line = simulate(graph, lives)
        levels = line.nbytes
        if max(levels) <= budget_nbytes or (best is not None and line.predicted.seconds >= best.predicted.seconds):
            return  # it fits as it is, or what runs again takes too long already
        target = int(share * budget_nbytes)
        planner = Planner(graph, lives, rates)
        allowed = _allowed(graph, lives, forms)
        left = max(0.5, min(_CHOICE_SECONDS, limit_seconds - (time.perf_counter() - began)))
        for chosen in [first] if first is not None else [_chosen(graph, planner, levels, target, allowed, rates, left)]:
            if chosen:
                chosen = {t: f for t, f in chosen.items() if t in planner.gaps and f in allowed.get(t, ())}
                trips = planner.within(chosen, budget_nbytes)
                if trips is not None:
                    consider(f"{solver}, {len(trips)} away", send_away(lives, trips))

    def policies() -> None:
        """What those who decide by dependencies alone would do (`transfer_baselines`), with the forms that are allowed here."""
        tiers = sorted({f for found in forms.values() for f, _ in found if not codec_of(f)})
        for name, policy in POLICIES.items():
            for tier in tiers:
                try:
                    lives, trips = policy(graph, rates, tier)
                    if not trips:
                        consider(name, lives)
                        continue
                    trips = list(_accepted(trips, _allowed(graph, lives, forms)))
                    away = {trip.gap.tensor: (trip.form, trip.away_nbytes) for trip in trips}
                    fits = Planner(graph, lives, rates).within(away, budget_nbytes, planned=trips)
                    if fits is not None:
                        consider(name, send_away(lives, fits))
                except ValueError:  # its lives ask for what cannot be made in this graph
                    continue
            if time.perf_counter() - began > limit_seconds and best is not None:
                return

    def starts() -> Iterator[tuple[str, tuple[Life, ...], Mapping[int, Form] | None, float]]:
        for share in _SHARES:
            yield "keep all", keep_all(graph), None, share
        if relaxed is not None:
            requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
            problem = relaxed.moment.problem
            spare = {t for _, t in requests}.difference(problem.needed).union(filter(problem.given, graph.producers))
            lost = {old for op in graph.ops if op.at <= graph.last_release for old, _ in op.mutates}
            cuts = []
            for held, places in relaxed.cuts():
                roll = Rollout(graph)
                roll.serve(requests, (spare | held) - lost | unrepeatable(graph))
                cuts.append(roll.lives())
                yield "joint cut", cuts[-1], places, 1.0
            for lives in cuts:
                yield "joint cut", lives, None, 1.0
        stride = max(1, -(-len(recomputed) // _STARTS))
        for solver, lives in [*recomputed[::-stride], *recomputed[:1]]:
            yield solver, lives, None, 1.0

    recomputed = list(plans)
    fitting = bisect_right(recomputed, budget_nbytes, key=lambda plan: simulate(graph, plan[1]).predicted.peak_bytes)
    if fitting:
        consider(*recomputed[fitting - 1])
    policies()
    for solver, lives, places, share in starts():
        try:
            extend(solver, lives, places, share)
        except LoweringError:
            continue
        if time.perf_counter() - began > limit_seconds and best is not None:
            break
    if best is None:
        return None
    bound = relaxed.bound_seconds(budget_nbytes) if relaxed is not None else 0.0
    return replace(best, bound_seconds=max(0.0, bound), seconds=time.perf_counter() - began)
