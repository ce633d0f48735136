"""A lower bound on the seconds of every plan that rebuilds, offloads and compresses, by a Lagrangian relaxation at one point.

At one point of the step, a tensor that is needed later is on the device, or encoded there, or in a tier, or rebuilt later.
Bytes of the device and of limited tiers, and seconds of each direction of the link, get prices. Every held tensor then takes
its cheapest form, and a minimum cut decides which tensors are held. This is exact for the given prices, and a lower bound for
every plan. The prices that prove the most are found by cutting planes (Kelley, 1960). The proof: docs/formulation.md, "The
joint bound".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ortools.linear_solver import pywraplp

from lightning_memopt.graph import Graph, base_levels, unmodified_levels, workspaces
from lightning_memopt.plan.clocks import TransferRates, leaves_at
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.tiers import Limits, taken
from lightning_memopt.solvers.offload.trips import Form
from lightning_memopt.solvers.recompute.bound import requirements

Forms = Mapping[int, Sequence[Form]]
"""Tensor -> the forms in which it may be parked, each with the bytes that the tensor takes in it."""
_POINTS = 5
"""Number of points of forward, and also of backward, that are looked at in addition to the first unpack and the peak."""
_ROUNDS = 40
_CLOSE = 1e-3
_DEAREST = 1e3
"""The highest price of a byte, as a multiple of (seconds of the step) / (bytes that can be held)."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in seconds of the step.

    byte: the price of a byte on the device.
    out: the price of a second of copies from the device, at most 1.
    back: the price of a second of copies to the device, at most 1.
    tiers: the price of a byte in each tier that has a limit.
    """

    byte: float
    out: float
    back: float
    tiers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormCost:
    """The cost of parking one tensor in one form.

    form: the form, and the bytes that the tensor takes in it.
    encode, decode: seconds of the codec.
    out, back: seconds of the copies.
    stays: bytes that stay on the device.
    """

    form: Form
    encode: float
    decode: float
    out: float
    back: float
    stays: int

    @classmethod
    def of(cls, form: Form, nbytes: int, rates: TransferRates) -> FormCost:
        codec, tier, size = codec_of(form[0]), tier_of(form[0]), form[1]
        return cls(
            form=form,
            encode=rates.encode_seconds(codec, nbytes) if codec else 0.0,
            decode=rates.decode_seconds(codec, nbytes) if codec else 0.0,
            out=rates.out_seconds(tier, size) if tier else 0.0,
            back=rates.in_seconds(tier, size) if tier else 0.0,
            stays=0 if tier else size,
        )

    def taken(self, tier: str) -> int:
        """The bytes that are taken in this tier."""
        return taken(*self.form) if tier_of(self.form[0]) == tier else 0

    def seconds(self, at: Prices) -> float:
        """The cost at these prices. Links carry copies while the device encodes and decodes, so the time of codecs counts
        less.
        """
        codec = (1 - at.out) * self.encode + (1 - at.back) * self.decode
        tiers = sum(price * self.taken(tier) for tier, price in at.tiers.items())
        return codec + at.out * self.out + at.back * self.back + at.byte * self.stays + tiers


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The solution of the relaxation at certain prices.

    held: tensors that are held, parked ones included.
    parked: the held tensors that are parked, each with its form.
    value_seconds: the cost at those prices.
    seconds: the part of the cost that does not depend on prices.
    nbytes: bytes on the device, which `Prices.byte` multiplies.
    out, back: seconds of copies beyond those that the links have time for anyway, which `Prices.out` and `.back` multiply.
    above: bytes in each limited tier beyond its limit, which `Prices.tiers` multiply.
    """

    held: frozenset[int]
    parked: dict[int, Form]
    value_seconds: float
    seconds: float
    nbytes: int
    out: float
    back: float
    above: Mapping[str, int]


class Relaxation:
    """The relaxation at one point of the step: `cheapest` solves it for given prices, `dearest` finds the best prices."""

    def __init__(
        self, graph: Graph, point: int, forms: Forms, rates: TransferRates, limits: Limits = MappingProxyType({})
    ) -> None:
        self.graph = graph
        self.limits = limits
        self.problem = requirements(graph, point)
        self.natural_nbytes = base_levels(graph)[point] + workspaces(graph)[point]
        unpacks = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
        asked = {t: p for p, t in reversed(unpacks) if p >= point}
        last = unpacks[-1][0]
        self.costs_of_forms = {
            t: [FormCost.of(form, graph.tensors[t].nbytes, rates) for form in forms[t]]
            for t in self.problem.tensors
            if t in forms and t not in graph.overwritten
        }
        begins = min((leaves_at(graph, t) for t in self.costs_of_forms), default=point)
        ends = max((asked.get(t, last) for t in self.costs_of_forms), default=point)
        back = max(point + 1, unpacks[0][0])
        self.before = sum(op.seconds for op in graph.ops if begins < op.at < point)
        """Seconds available for copies out before the point, counted from where the first tensor may be parked."""
        self.after = sum(op.seconds for op in graph.ops if back <= op.at < ends)
        """Seconds available for copies in after the point, until the last parked tensor is needed."""

    def cheapest(self, at: Prices) -> Relaxed:
        """The solution at these prices. Raises ValueError if an overwritten tensor is needed that no op can make."""
        graph = self.graph
        hold_seconds: dict[int, float] = {}
        cheapest_form: dict[int, FormCost] = {}
        for t in self.problem.tensors:
            hold_seconds[t] = at.byte * graph.tensors[t].nbytes
            for cost in self.costs_of_forms.get(t, ()):
                seconds = cost.seconds(at)
                if seconds < hold_seconds[t]:
                    hold_seconds[t], cheapest_form[t] = seconds, cost
        cut = self.problem.minimum_cut(at.byte, hold_seconds.__getitem__, 1.0 - at.back)
        parked = {t: cheapest_form[t] for t in cut.held if t in cheapest_form}
        tiers = sum(at.tiers.get(tier, 0.0) * most for tier, most in self.limits.items())
        kept_nbytes = sum(graph.tensors[t].nbytes for t in cut.held if t not in parked)
        encode = sum(cost.encode for cost in parked.values())
        decode = sum(cost.decode for cost in parked.values())
        return Relaxed(
            held=cut.held,
            parked={t: cost.form for t, cost in parked.items()},
            value_seconds=cut.value_seconds - at.out * self.before - at.back * self.after - tiers,
            seconds=cut.seconds + encode + decode,
            nbytes=kept_nbytes + sum(cost.stays for cost in parked.values()),
            out=sum(cost.out for cost in parked.values()) - encode - self.before,
            back=sum(cost.back for cost in parked.values()) - decode - cut.seconds - self.after,
            above={tier: sum(c.taken(tier) for c in parked.values()) - most for tier, most in self.limits.items()},
        )

    def dearest(self, budget_nbytes: int) -> tuple[float, Relaxed | None]:
        """Seconds that every plan within the budget takes at least, and the solution at the prices that prove this."""
        room = budget_nbytes - self.natural_nbytes
        total = sum(op.seconds for op in self.graph.ops)
        if not total or not self.problem.total_nbytes:
            return 0.0, None
        unit = total / self.problem.total_nbytes
        master = _Master(total, unit, room, tuple(self.limits))
        at, proved, best = Prices(0.3 * unit, 0.0, 0.0), 0.0, None
        for _ in range(_ROUNDS):
            relaxed = self.cheapest(at)
            value = relaxed.value_seconds - at.byte * room
            if value > proved:
                proved, best = value, relaxed
            at, most = master.add(relaxed)
            if most - proved <= _CLOSE * proved + 1e-9 * total:
                break
        return proved, best


class _Master:
    """The master problem of the cutting planes: prices that maximise the smallest cost of all solutions so far.

    A linear programme; its costs are shares of the step's seconds.
    """

    def __init__(self, total: float, unit: float, room: int, limited: Sequence[str]) -> None:
        self._total, self._unit, self._room, self._limited = total, unit, room, limited
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._value = self._solver.NumVar(-self._solver.infinity(), self._solver.infinity(), "value")
        highest = (_DEAREST, 1.0, 1.0, *(_DEAREST for _ in limited))
        self._prices = [self._solver.NumVar(0.0, most, "price") for most in highest]
        self._solver.Maximize(self._value)

    def add(self, relaxed: Relaxed) -> tuple[Prices, float]:
        """Add a solution as a plane. Returns the next prices to try, and an upper limit on the seconds that any prices can
        prove.
        """
        above = (relaxed.above[tier] * self._unit for tier in self._limited)
        slopes = ((relaxed.nbytes - self._room) * self._unit, relaxed.out, relaxed.back, *above)
        row = self._solver.Constraint(-self._solver.infinity(), relaxed.seconds / self._total)
        row.SetCoefficient(self._value, 1.0)
        for price, slope in zip(self._prices, slopes, strict=True):
            row.SetCoefficient(price, -slope / self._total)
        if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
            return Prices(0.0, 0.0, 0.0), 0.0
        byte, out, back, *tiers = (max(0.0, price.solution_value()) for price in self._prices)
        of_tiers = {tier: price * self._unit for tier, price in zip(self._limited, tiers, strict=True)}
        return Prices(byte * self._unit, min(1.0, out), min(1.0, back), of_tiers), self._value.solution_value() * self._total


def points(graph: Graph, budget_nbytes: int) -> list[int]:
    """Points at which plans within the budget have to give something up: the first unpack, the peak of the unmodified step,
    and up to `_POINTS - 1` points above the budget in forward and as many in backward.
    """
    unpacks = [p for s in graph.saves for p in s.unpacked_at]
    if not unpacks:
        return []
    levels = unmodified_levels(graph)[: max(unpacks) + 1]
    first = min(unpacks)
    selected = {first, levels.index(max(levels))}
    over = [p for p, nbytes in enumerate(levels) if nbytes > budget_nbytes]
    for points_of_pass in ([p for p in over if p < first], [p for p in over if p > first]):
        if points_of_pass:
            selected.update(points_of_pass[i * len(points_of_pass) // _POINTS] for i in range(1, _POINTS))
    return sorted(selected)


def bound(
    graph: Graph,
    budget_nbytes: int,
    forms: Forms,
    rates: TransferRates,
    limit_seconds: float,
    clock: Callable[[], float],
    limits: Limits = MappingProxyType({}),
) -> tuple[float, list[tuple[Relaxation, Relaxed]]]:
    """Seconds that every plan within the budget and the limits of tiers takes at least: the largest bound of as many points as
    there is time for.

    Also, for each point with a bound above 0, its relaxation and the solution at the best prices.
    """
    began = clock()
    proved, solutions = 0.0, []
    for p in points(graph, budget_nbytes):
        try:
            relaxation = Relaxation(graph, p, forms, rates, limits)
            seconds, relaxed = relaxation.dearest(budget_nbytes)
        except ValueError:  # a tensor is needed there that no op can make
            continue
        proved = max(proved, seconds)
        if relaxed is not None:
            solutions.append((relaxation, relaxed))
        if clock() - began > limit_seconds:
            break
    return proved, solutions
