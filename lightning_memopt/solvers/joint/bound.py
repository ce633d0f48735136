"""Prices for bytes on the device and for seconds of a link: what every plan takes at them, recomputed, away or held.

At one point of the step, a tensor that is needed later is on the device, or there in encoded form, or in a tier, or made again
later. With a price for a byte and one for a second of each direction of the link, every tensor that is held takes the cheapest
place, and a minimum cut decides which are held at all: exact for those prices, and a Lagrangian bound for every plan. The
prices that prove the most are found by cutting planes (Kelley, 1960). The proof: docs/formulation.md, "The joint bound".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ortools.linear_solver import pywraplp

from lightning_memopt.graph import Graph, base_levels, unmodified_levels, workspaces
from lightning_memopt.plan.clocks import Rates, leaves_at
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.solvers.offload.trips import Form
from lightning_memopt.solvers.recompute.bound import requirements

Forms = Mapping[int, Sequence[Form]]
"""Tensor -> the forms in which it may be away, with its bytes there."""
_POINTS = 5
"""Of each pass, beside the first request and the peak."""
_ROUNDS = 40
_CLOSE = 1e-3
_DEAREST = 1e3
"""A byte costs at most so many times the step's seconds over the bytes that can be held."""


@dataclass(frozen=True, slots=True)
class Prices:
    """`byte`: seconds a byte that is on the device; `out`, `back`: seconds a second of copies, each at most 1."""

    byte: float
    out: float
    back: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor may be meanwhile: seconds of its codec and of its copies, and the bytes that stay on the device."""

    form: Form
    encode: float
    decode: float
    out: float
    back: float
    stays: int

    @classmethod
    def of(cls, form: Form, nbytes: int, rates: Rates) -> Place:
        codec, tier, size = codec_of(form[0]), tier_of(form[0]), form[1]
        return cls(
            form=form,
            encode=rates.encode_seconds(codec, nbytes) if codec else 0.0,
            decode=rates.decode_seconds(codec, nbytes) if codec else 0.0,
            out=rates.out_seconds(tier, size) if tier else 0.0,
            back=rates.in_seconds(tier, size) if tier else 0.0,
            stays=0 if tier else size,
        )

    def seconds(self, at: Prices) -> float:
        """While the device encodes and decodes, links carry copies: that much of its time is paid for."""
        codec = (1 - at.out) * self.encode + (1 - at.back) * self.decode
        return codec + at.out * self.out + at.back * self.back + at.byte * self.stays


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The cheapest way at some prices: what is held and what of it is away in which form. `value_seconds`: what it costs. For
    other prices it costs `seconds` and `nbytes`, `out` and `back` (less what the links have time for) times the price of each.
    """

    held: frozenset[int]
    away: dict[int, Form]
    value_seconds: float
    seconds: float
    nbytes: int
    out: float
    back: float


class Point:
    """One point of the step, for all prices."""

    def __init__(self, graph: Graph, point: int, forms: Forms, rates: Rates) -> None:
        self.graph = graph
        self.problem = requirements(graph, point)
        self.natural_nbytes = base_levels(graph)[point] + workspaces(graph)[point]
        requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
        asked = {t: p for p, t in reversed(requests) if p >= point}
        last = requests[-1][0]
        self.places = {
            t: [Place.of(form, graph.tensors[t].nbytes, rates) for form in forms[t]]
            for t in self.problem.tensors
            if t in forms and t not in graph.overwritten
        }
        begins = min((leaves_at(graph, t) for t in self.places), default=point)
        ends = max((asked.get(t, last) for t in self.places), default=point)
        back = max(point + 1, requests[0][0])
        self.before = sum(op.seconds for op in graph.ops if begins < op.at < point)
        """What copies out have time for by themselves: from when the first may leave."""
        self.after = sum(op.seconds for op in graph.ops if back <= op.at < ends)
        """And copies in, until the last is needed."""

    def cheapest(self, at: Prices) -> Relaxed:
        """Raises ValueError where something is needed that was overwritten and that no op makes."""
        graph, costs, away = self.graph, dict[int, float](), dict[int, Place]()
        for t in self.problem.tensors:
            costs[t] = at.byte * graph.tensors[t].nbytes
            for place in self.places.get(t, ()):
                found = place.seconds(at)
                if found < costs[t]:
                    costs[t], away[t] = found, place
        choice = self.problem.solve(at.byte, costs.__getitem__, 1.0 - at.back)
        gone = {t: away[t] for t in choice.held if t in away}
        here = sum(graph.tensors[t].nbytes for t in choice.held if t not in gone)
        encode, decode = (sum(getattr(p, way) for p in gone.values()) for way in ("encode", "decode"))
        return Relaxed(
            held=choice.held,
            away={t: place.form for t, place in gone.items()},
            value_seconds=choice.value_seconds - at.out * self.before - at.back * self.after,
            seconds=choice.seconds + encode + decode,
            nbytes=here + sum(p.stays for p in gone.values()),
            out=sum(p.out for p in gone.values()) - encode - self.before,
            back=sum(p.back for p in gone.values()) - decode - choice.seconds - self.after,
        )

    def dearest(self, budget_nbytes: int) -> tuple[float, Relaxed | None]:
        """What no plan within the budget is below, and the cheapest way at the prices that say so."""
        room = budget_nbytes - self.natural_nbytes
        total = sum(op.seconds for op in self.graph.ops)
        if not total or not self.problem.total_nbytes:
            return 0.0, None
        unit = total / self.problem.total_nbytes
        master = _Master(total, unit, room)
        at, proved, best = Prices(0.3 * unit, 0.0, 0.0), 0.0, None
        for _ in range(_ROUNDS):
            found = self.cheapest(at)
            value = found.value_seconds - at.byte * room
            if value > proved:
                proved, best = value, found
            at, most = master.add(found)
            if most - proved <= _CLOSE * proved + 1e-9 * total:
                break
        return proved, best


class _Master:
    """The prices at which the least of what was found is the most: a linear programme, in shares of the step."""

    def __init__(self, total: float, unit: float, room: int) -> None:
        self._total, self._unit, self._room = total, unit, room
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._value = self._solver.NumVar(-self._solver.infinity(), self._solver.infinity(), "value")
        self._prices = [self._solver.NumVar(0.0, most, "price") for most in (_DEAREST, 1.0, 1.0)]
        self._solver.Maximize(self._value)

    def add(self, found: Relaxed) -> tuple[Prices, float]:
        """The next prices to look at, and what no prices prove more than."""
        slopes = ((found.nbytes - self._room) * self._unit, found.out, found.back)
        row = self._solver.Constraint(-self._solver.infinity(), found.seconds / self._total)
        row.SetCoefficient(self._value, 1.0)
        for price, slope in zip(self._prices, slopes, strict=True):
            row.SetCoefficient(price, -slope / self._total)
        if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
            return Prices(0.0, 0.0, 0.0), 0.0
        byte, out, back = (max(0.0, price.solution_value()) for price in self._prices)
        return Prices(byte * self._unit, min(1.0, out), min(1.0, back)), self._value.solution_value() * self._total


def points(graph: Graph, budget_nbytes: int) -> list[int]:
    """Where plans within the budget have to give something up: the first request, the peak of the unmodified step, and some
    of the points above the budget in forward and in backward.
    """
    requests = [p for s in graph.saves for p in s.unpacked_at]
    if not requests:
        return []
    levels = unmodified_levels(graph)[: max(requests) + 1]
    first = min(requests)
    found = {first, levels.index(max(levels))}
    over = [p for p, nbytes in enumerate(levels) if nbytes > budget_nbytes]
    for some in ([p for p in over if p < first], [p for p in over if p > first]):
        found.update(some[i * len(some) // _POINTS] for i in range(1, _POINTS) if some)
    return sorted(found)


def bound(
    graph: Graph, budget_nbytes: int, forms: Forms, rates: Rates, limit_seconds: float, clock: Callable[[], float]
) -> tuple[float, list[tuple[Point, Relaxed]]]:
    """Seconds that every plan within the budget takes at least, of as many points as there is time for; and what is cheapest at
    the prices that say so, at each point that says anything.
    """
    began = clock()
    proved, found = 0.0, []
    for p in points(graph, budget_nbytes):
        try:
            point = Point(graph, p, forms, rates)
            seconds, relaxed = point.dearest(budget_nbytes)
        except ValueError:  # something is needed there that nobody can make
            continue
        proved = max(proved, seconds)
        if relaxed is not None:
            found.append((point, relaxed))
        if clock() - began > limit_seconds:
            break
    return proved, found
