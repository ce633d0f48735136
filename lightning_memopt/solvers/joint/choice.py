"""Choose the tensors to park so that a plan fits a budget and the limits of tiers: by CP-SAT, against the link's capacity and
the time of codecs.

`chosen` is for the fewest seconds. `smallest` and `fewest` know no seconds: they are for the fewest bytes on the device, and in
a tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ortools.sat.python import cp_model

from lightning_memopt.graph import Graph
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.plan.tiers import ALIGN_NBYTES, Limits
from lightning_memopt.solvers.joint.bound import FormCost, Forms
from lightning_memopt.solvers.offload.trips import Form, Gap, TripPlanner
from lightning_memopt.units import ceil_div

_UNITS = 1 << 20
"""CP-SAT counts in integers: bytes and seconds are multiples of this fraction of the largest amount."""
_FOREVER = 1000 * _UNITS
"""Stalls, copies and codecs that take longer are cut to this, because CP-SAT counts in 64 bits."""
_HIGH = 48
"""Maximum number of points above the budget that the model looks at, in addition to the first and the last."""
_CLOSELY = 256
"""If there are at most this many points at which a plan may be above the budget, a search for few bytes looks at all."""
_CLOSE = 5e-3
"""The solver stops when no other choice can be better by more than this share."""
_SLACK = 1.1
"""The estimate of a choice's seconds may be too high by this factor."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """A tensor in one form.

    gap: where the tensor is not needed.
    cost: the form, and its cost.
    after: the bytes are off the device from the point after this one until before `gap.needed`.
    nbytes: how many bytes are off the device there.
    name: for the solver's log.
    both: intervals of points at which the tensor is on the device and encoded there as well, if it is away for as long as
        possible.
    """

    gap: Gap
    cost: FormCost
    after: int
    nbytes: int
    name: str
    both: tuple[tuple[int, int], ...]

    def saves_at(self, p: int) -> bool:
        return self.after < p < self.gap.needed

    def adds_at(self, p: int) -> bool:
        return any(first <= p <= last for first, last in self.both)


def _worth(costs: Sequence[FormCost], limited: Sequence[str]) -> Iterator[FormCost]:
    """The forms that are not dominated by another form that is at least as good in everything. Of equal forms, the first
    stays. `limited`: the tiers whose bytes count.
    """

    def amounts(cost: FormCost) -> tuple[float, ...]:
        in_tiers = (cost.taken(tier) for tier in limited)
        beside = cost.form[1] if limited and codec_of(cost.form[0]) else 0  # on its way, while the original is there
        return cost.encode + cost.decode, cost.out, cost.back, cost.stays, beside, *in_tiers

    def dominates(i: int, j: int) -> bool:
        """Whether form `i` dominates form `j`."""
        a, b = amounts(costs[i]), amounts(costs[j])
        return all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < j)

    for j, cost in enumerate(costs):
        if not any(dominates(i, j) for i in range(len(costs)) if i != j):
            yield cost


def _picks(
    graph: Graph, planner: TripPlanner, high: Sequence[int], forms: Forms, rates: TransferRates, limited: Sequence[str]
) -> Iterator[list[_Pick]]:
    """The picks of each tensor that lowers a high point when it is parked."""
    for t, gap in planner.gaps.items():
        after, nbytes = max(gap.leaves, graph.tensors[t].freed_at), graph.tensors[t].nbytes
        if any(after < p < gap.needed for p in high):
            costs = [FormCost.of(form, nbytes, rates) for form in forms.get(t, ())]
            read = next((at for at, _ in graph.reads(t) if at >= gap.needed), gap.needed)
            picks = []
            for cost in _worth(costs, limited):
                encoded = (gap.leaves, after if cost.stays else gap.leaves), (gap.needed, read)
                both = encoded if codec_of(cost.form[0]) else ()
                picks.append(_Pick(gap, cost, after, nbytes - cost.stays, f"{t} {cost.form[0]}", both))
            if picks:
                yield picks


def _weighted(variables: Sequence[cp_model.IntVar], weights: Sequence[int]) -> cp_model.LinearExpr:
    """The sum of the variables, each times its weight."""
    return cp_model.LinearExpr.weighted_sum(variables, weights)


class _Choice:
    """The model of a choice: for each tensor a form in which it is parked, or none.

    model: the model for CP-SAT.
    high: the points that must come down.
    byte: bytes on the device are counted in multiples of this.
    picks: what may be parked, each with the variable that says whether it is.
    """

    def __init__(
        self,
        graph: Graph,
        planner: TripPlanner,
        levels: Sequence[int],
        high: Sequence[int],
        forms: Forms,
        rates: TransferRates,
        limited: Sequence[str] = (),
    ) -> None:
        self.model = cp_model.CpModel()
        self.levels, self.high = levels, high
        self.byte = max(1, max(levels) // _UNITS)
        self.picks: list[tuple[_Pick, cp_model.IntVar]] = []
        for of_tensor in _picks(graph, planner, high, forms, rates, limited):
            variables = [self.model.new_bool_var(pick.name) for pick in of_tensor]
            self.picks += zip(of_tensor, variables, strict=True)
            if len(variables) > 1:
                self.model.add_at_most_one(variables)

    def look_closely(self, budget: int) -> None:
        """Look at all points that may be above the budget if something is encoded, as far as there are few of them."""
        over = [p for p, n in enumerate(self.levels) if n > budget]
        where = {p for pick, _ in self.picks for first, last in pick.both for p in range(first, last + 1)}
        larger = {pick.gap.tensor: pick.cost.form[1] for pick, _ in self.picks if pick.both}
        near = [p for p in where if self.levels[p] + sum(larger.values()) > budget]
        self.high = sorted({*self.high, *(over if len(over) <= _CLOSELY else ()), *(near if len(near) <= _CLOSELY else ())})

    def saved_there(self, closely: bool) -> dict[tuple[int, ...], tuple[cp_model.LinearExpr, int]]:
        """Numbers of picks -> the bytes that they save where all of them do, and the highest level there. `closely`: what is
        encoded beside the original counts.
        """
        found: dict[tuple[int, ...], tuple[cp_model.LinearExpr, int]] = {}
        for p in self.high:
            there = tuple(i for i, (pick, _) in enumerate(self.picks) if pick.saves_at(p))
            more = tuple(-i for i, (pick, _) in enumerate(self.picks, 1) if closely and pick.adds_at(p))
            if (key := there + more) not in found or found[key][1] < self.levels[p]:
                nbytes = [self.picks[i][0].nbytes // self.byte for i in there]
                nbytes += [-ceil_div(self.picks[-i - 1][0].cost.form[1], self.byte) for i in more]
                variables = [self.picks[i][1] for i in (*there, *(-i - 1 for i in more))]
                found[key] = _weighted(variables, nbytes), self.levels[p]
        return found

    def come_down(self, budget: int, closely: bool = False) -> None:
        """The bytes at every high point come down to the budget."""
        for saved, level in self.saved_there(closely).values():
            self.model.add(saved >= ceil_div(level - budget, self.byte))

    def in_tier(self, tier: str) -> cp_model.LinearExpr:
        """The bytes of a tier that are taken, in multiples of `ALIGN_NBYTES`."""
        there = [(x, pick.cost.taken(tier) // ALIGN_NBYTES) for pick, x in self.picks if pick.cost.taken(tier)]
        return _weighted([x for x, _ in there], [n for _, n in there])

    def keep(self, limits: Limits) -> None:
        """What is taken in each tier keeps its limit."""
        for tier, most in limits.items():
            self.model.add(self.in_tier(tier) <= most // ALIGN_NBYTES)

    def solve(self, objective: cp_model.LinearExpr, limit_seconds: float, gap: float) -> dict[int, Form] | None:
        """The choice for which the objective is smallest, or at most this share above that; None if none was found."""
        self.model.minimize(objective)
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = limit_seconds  # about seconds, however busy the machine is
        solver.parameters.relative_gap_limit = gap
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.catch_sigint_signal = False  # catching it leaves a handler that ends the process at once
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return {pick.gap.tensor: pick.cost.form for pick, x in self.picks if solver.value(x)}


def chosen(
    graph: Graph,
    planner: TripPlanner,
    levels: Sequence[int],
    budget: int,
    forms: Forms,
    rates: TransferRates,
    limit_seconds: float,
    below_seconds: float | None = None,
    limits: Limits = MappingProxyType({}),
) -> dict[int, Form] | None:
    """The tensors to park, each with its form, so that a plan with `levels` bytes at every point fits the budget.

    The bytes at every high point come down to the budget, with the fewest seconds of codecs and of copies that the link has no
    time for. None if no choice fits, or if every choice is estimated to take at least `below_seconds`.
    """
    high = _high_points(levels, budget)
    choice = _Choice(graph, planner, levels, high, forms, rates, tuple(limits))
    second = max(planner.ends[-1], 1e-9) / _UNITS

    def units(seconds: float) -> int:
        return round(min(seconds / second, _FOREVER))

    if not choice.picks:
        return None
    choice.come_down(budget)
    choice.keep(limits)
    model = choice.model
    costs: list[tuple[cp_model.IntVar, int]] = []
    for pick, x in choice.picks:
        codec = units(pick.cost.encode + pick.cost.decode)
        copied = pick.cost.out > 0 or pick.cost.back > 0
        costs.append((x, codec + 1 if copied else codec))  # among choices that cost nothing, prefer fewer copies
    moved = [(pick, x) for pick, x in choice.picks if pick.cost.out or pick.cost.back]
    for forward in (True, False):
        copies = [
            (pick.gap.leaves, units(pick.cost.out), x) if forward else (pick.gap.needed, units(pick.cost.back), x)
            for pick, x in moved
        ]
        stall = model.new_int_var(0, _FOREVER, "stall")
        costs.append((stall, 1))
        first = planner.ends[min((at for at, _, _ in copies), default=0)]
        last = planner.ends[max((at for at, _, _ in copies), default=0)]
        for p in high:
            # tensors that are gone at p were copied out before p; tensors that come back after p are copied in before `last`
            if forward and p <= graph.backward_begins:
                begun = [(c, x) for at, c, x in copies if at < p]
                time_there = planner.ends[p] - first
            elif not forward and p >= graph.backward_begins:
                begun = [(c, x) for at, c, x in copies if at > p]
                time_there = last - planner.ends[p]
            else:
                continue
            if begun:
                taken = _weighted([x for _, x in begun], [c for c, _ in begun])
                model.add(stall >= taken - units(max(0.0, time_there)))
    objective = _weighted([x for x, _ in costs], [c for _, c in costs])
    if below_seconds is not None:
        model.add(objective <= len(moved) + units(_SLACK * below_seconds))
    return choice.solve(objective, limit_seconds, _CLOSE)


def smallest(
    graph: Graph,
    planner: TripPlanner,
    levels: Sequence[int],
    floor: int,
    forms: Forms,
    rates: TransferRates,
    limit_seconds: float,
    limits: Limits,
) -> dict[int, Form]:
    """The tensors to park, so that a plan with `levels` bytes at every point needs the fewest bytes. `floor`: no choice needs
    fewer.
    """
    choice = _Choice(graph, planner, levels, _high_points(levels, floor), forms, rates, tuple(limits))
    if not choice.picks:
        return {}
    choice.look_closely(floor)
    choice.keep(limits)
    peak = choice.model.new_int_var(0, ceil_div(max(levels), choice.byte) + 1, "peak")
    for saved, level in choice.saved_there(closely=True).values():
        choice.model.add(peak + saved >= ceil_div(level, choice.byte))
    parked = [(x, pick.cost.taken(tier) // ALIGN_NBYTES) for pick, x in choice.picks for tier in limits]
    more = 1 + sum(n for _, n in parked)  # of those that need as few bytes, the one that takes least of the tiers
    return choice.solve(_weighted([peak, *(x for x, _ in parked)], [more, *(n for _, n in parked)]), limit_seconds, 0.0) or {}


def fewest(
    graph: Graph,
    planner: TripPlanner,
    levels: Sequence[int],
    budget: int,
    forms: Forms,
    rates: TransferRates,
    limit_seconds: float,
    tier: str,
) -> dict[int, Form] | None:
    """The tensors to park, so that a plan with `levels` bytes at every point fits the budget and takes the fewest bytes in a
    tier; None if no choice fits.
    """
    choice = _Choice(graph, planner, levels, _high_points(levels, budget), forms, rates, (tier,))
    choice.look_closely(budget)
    choice.come_down(budget, closely=True)
    return choice.solve(choice.in_tier(tier), limit_seconds, 0.0)


def _high_points(levels: Sequence[int], budget: int) -> list[int]:
    """Points above the budget: the first, the last, and the local maxima (only the highest if there are many)."""
    over = [p for p, n in enumerate(levels) if n > budget]
    if not over:
        return []
    tops = [p for p in over if (p == 0 or levels[p - 1] <= levels[p]) and (p + 1 == len(levels) or levels[p + 1] < levels[p])]
    tops = sorted(tops, key=lambda p: -levels[p])[:_HIGH]
    return sorted({*tops, over[0], over[-1]})
