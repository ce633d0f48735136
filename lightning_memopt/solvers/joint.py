"""Recomputation, offload and compression decided together, for one budget.

Relaxed, the three are one minimum cut: at the moment at which most is held, a tensor that backward needs is on the device, or
there in encoded form, or in a tier, or made again later. With a price for a byte on the device and one for a second of each
direction of the link, every tensor that is held takes the cheapest place, and the cut decides which are held at all: exact
for those prices, and a Lagrangian bound for every plan (docs/formulation.md, "Away").

From the cuts, and from the plans that only recompute, come starts; what goes away so that a start fits the budget is chosen
by CP-SAT against the link's capacity, and each result is priced by the simulator. Starts that fit as they are take part, so
the result is never worse than recomputation alone, nor, by the starts that hold everything, than transfers alone.
"""

from __future__ import annotations

import time
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
from lightning_memopt.solvers.trips import Form, Planner, send_away

Forms = Mapping[int, Sequence[Form]]
"""Tensor -> the forms in which it may be away, with its bytes there."""
_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Prices of a byte, in seconds of the whole step per byte of what is held in it."""
_LINK = (0.0, 0.25, 0.5, 1.0)
_STARTS = 24
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
        begins = graph.backward_begins
        self.before = sum(op.seconds for op in graph.ops if op.at < begins)
        self.after = sum(op.seconds for op in graph.ops if op.at >= begins)
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
        if codec:
            seconds += self.rates.encode_seconds(codec, nbytes) + self.rates.decode_seconds(codec, nbytes)
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
    for t, gap in planner.gaps.items():
        for i, _ in enumerate(forms.get(t, ())):
            picks[t, i] = model.new_bool_var(f"away {t} {i}")
        mine = [x for (u, _), x in picks.items() if u == t] if forms.get(t) else []
        if len(mine) > 1:
            model.add_at_most_one(mine)
        del gap
    if not picks:
        return None
    for p in high:
        saved = []
        for (t, i), x in picks.items():
            gap = planner.gaps[t]
            if max(gap.leaves, graph.tensors[t].freed_at) < p < gap.needed:
                name, size = forms[t][i]
                stays = size if codec_of(name) and not tier_of(name) else 0
                saved.append((graph.tensors[t].nbytes - stays) // byte * x)
        model.add(sum(saved) >= -(-(levels[p] - budget) // byte))
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
        for p in high:
            # what is gone at p was copied between the first that leaves and p; what comes back after p before it is needed
            if forward and p <= graph.backward_begins:
                begun = [(c, x) for at, c, x in copies if at < p]
                time_there = planner.ends[p] - planner.ends[min((at for at, _, _ in copies), default=0)]
            elif not forward and p >= graph.backward_begins:
                begun = [(c, x) for at, c, x in copies if at > p]
                time_there = planner.ends[max((at for at, _, _ in copies), default=p)] - planner.ends[p]
            else:
                continue
            model.add(stall >= sum(c * x for c, x in begun) - round(max(0.0, time_there) / second))
    model.minimize(sum(costs))
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

    def extend(solver: str, lives: tuple[Life, ...], first: Mapping[int, Form] | None = None) -> None:
        """The plan with as much away as the budget asks for."""
        consider(solver, lives)
        levels = simulate(graph, lives).nbytes
        if max(levels) <= budget_nbytes:
            return
        planner = Planner(graph, lives, rates)
        allowed = _allowed(graph, lives, forms)
        left = max(0.5, min(4.0, limit_seconds - (time.perf_counter() - began)))
        for chosen in (first, _chosen(graph, planner, levels, budget_nbytes, allowed, rates, left)):
            if chosen:
                chosen = {t: f for t, f in chosen.items() if t in planner.gaps and f in allowed.get(t, ())}
                trips = planner.within(chosen, budget_nbytes)
                if trips is not None:
                    consider(f"{solver}, {len(trips)} away", send_away(lives, trips))

    def starts() -> Iterator[tuple[str, tuple[Life, ...], Mapping[int, Form] | None]]:
        yield "keep all", keep_all(graph), None
        if relaxed is not None:
            requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
            problem = relaxed.moment.problem
            spare = {t for _, t in requests}.difference(problem.needed).union(filter(problem.given, graph.producers))
            lost = {old for op in graph.ops if op.at <= graph.last_release for old, _ in op.mutates}
            for held, places in relaxed.cuts():
                roll = Rollout(graph)
                roll.serve(requests, (spare | held) - lost | unrepeatable(graph))
                yield "joint cut", roll.lives(), places
        found = list(plans)
        stride = max(1, -(-len(found) // _STARTS))
        for solver, lives in [*found[::-stride], *found[:1]]:
            yield solver, lives, None

    for solver, lives, places in starts():
        try:
            extend(solver, lives, places)
        except LoweringError:
            continue
        if time.perf_counter() - began > limit_seconds and best is not None:
            break
    if best is None:
        return None
    bound = relaxed.bound_seconds(budget_nbytes) if relaxed is not None else 0.0
    return replace(best, bound_seconds=max(0.0, bound), seconds=time.perf_counter() - began)
