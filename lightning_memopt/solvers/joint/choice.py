"""Choose the tensors to park so that a plan fits a budget: by CP-SAT, against the link's capacity and the time of codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from lightning_memopt.graph import Graph
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.solvers.joint.bound import FormCost, Forms
from lightning_memopt.solvers.offload.trips import Form, Gap, TripPlanner
from lightning_memopt.units import ceil_div

_UNITS = 1 << 20
"""CP-SAT counts in integers: bytes and seconds are multiples of this fraction of the largest amount."""
_FOREVER = 1000 * _UNITS
"""Stalls, copies and codecs that take longer are cut to this, because CP-SAT counts in 64 bits."""
_HIGH = 48
"""Maximum number of points above the budget that the model looks at, in addition to the first and the last."""
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
    """

    gap: Gap
    cost: FormCost
    after: int
    nbytes: int
    name: str

    def saves_at(self, p: int) -> bool:
        return self.after < p < self.gap.needed


def _worth(costs: Sequence[FormCost]) -> Iterator[FormCost]:
    """The forms that are not dominated by another form that is at least as good in everything. Of equal forms, the first
    stays.
    """

    def amounts(cost: FormCost) -> tuple[float, ...]:
        return cost.encode + cost.decode, cost.out, cost.back, cost.stays

    def dominates(i: int, j: int) -> bool:
        """Whether form `i` dominates form `j`."""
        a, b = amounts(costs[i]), amounts(costs[j])
        return all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < j)

    for j, cost in enumerate(costs):
        if not any(dominates(i, j) for i in range(len(costs)) if i != j):
            yield cost


def _picks(
    graph: Graph, planner: TripPlanner, high: Sequence[int], forms: Forms, rates: TransferRates
) -> Iterator[list[_Pick]]:
    """The picks of each tensor that lowers a high point when it is parked."""
    for t, gap in planner.gaps.items():
        after, nbytes = max(gap.leaves, graph.tensors[t].freed_at), graph.tensors[t].nbytes
        if any(after < p < gap.needed for p in high):
            costs = [FormCost.of(form, nbytes, rates) for form in forms.get(t, ())]
            picks = [_Pick(gap, cost, after, nbytes - cost.stays, f"{t} {cost.form[0]}") for cost in _worth(costs)]
            if picks:
                yield picks


def chosen(
    graph: Graph,
    planner: TripPlanner,
    levels: Sequence[int],
    budget: int,
    forms: Forms,
    rates: TransferRates,
    limit_seconds: float,
    below_seconds: float | None = None,
) -> dict[int, Form] | None:
    """The tensors to park, each with its form, so that a plan with `levels` bytes at every point fits the budget.

    The bytes at every high point come down to the budget, with the fewest seconds of codecs and of copies that the link has no
    time for. None if no choice fits, or if every choice is estimated to take at least `below_seconds`.
    """
    model = cp_model.CpModel()
    high = _high_points(levels, budget)
    byte = max(1, max(levels) // _UNITS)
    second = max(planner.ends[-1], 1e-9) / _UNITS

    def units(seconds: float) -> int:
        return round(min(seconds / second, _FOREVER))

    picks: list[tuple[_Pick, cp_model.IntVar]] = []
    for of_tensor in _picks(graph, planner, high, forms, rates):
        variables = [model.new_bool_var(pick.name) for pick in of_tensor]
        picks += zip(of_tensor, variables, strict=True)
        if len(variables) > 1:
            model.add_at_most_one(variables)
    if not picks:
        return None
    weighted = cp_model.LinearExpr.weighted_sum
    wanted: dict[tuple[int, ...], int] = {}
    for p in high:
        there = tuple(i for i, (pick, _) in enumerate(picks) if pick.saves_at(p))
        wanted[there] = max(wanted.get(there, 0), ceil_div(levels[p] - budget, byte))
    for there, nbytes in wanted.items():
        model.add(weighted([picks[i][1] for i in there], [picks[i][0].nbytes // byte for i in there]) >= nbytes)
    costs: list[tuple[cp_model.IntVar, int]] = []
    for pick, x in picks:
        codec = units(pick.cost.encode + pick.cost.decode)
        copied = pick.cost.out > 0 or pick.cost.back > 0
        costs.append((x, codec + 1 if copied else codec))  # among choices that cost nothing, prefer fewer copies
    moved = [(pick, x) for pick, x in picks if pick.cost.out or pick.cost.back]
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
                taken = weighted([x for _, x in begun], [c for c, _ in begun])
                model.add(stall >= taken - units(max(0.0, time_there)))
    objective = weighted([x for x, _ in costs], [c for _, c in costs])
    if below_seconds is not None:
        model.add(objective <= len(moved) + units(_SLACK * below_seconds))
    model.minimize(objective)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit_seconds  # about seconds, however busy the machine is
    solver.parameters.relative_gap_limit = _CLOSE
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # catching it leaves a handler that ends the process at once
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {pick.gap.tensor: pick.cost.form for pick, x in picks if solver.value(x)}


def _high_points(levels: Sequence[int], budget: int) -> list[int]:
    """Points above the budget: the first, the last, and the local maxima (only the highest if there are many)."""
    over = [p for p, n in enumerate(levels) if n > budget]
    if not over:
        return []
    tops = [p for p in over if (p == 0 or levels[p - 1] <= levels[p]) and (p + 1 == len(levels) or levels[p + 1] < levels[p])]
    tops = sorted(tops, key=lambda p: -levels[p])[:_HIGH]
    return sorted({*tops, over[0], over[-1]})
