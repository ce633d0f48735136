"""What of a plan goes away so that it fits a budget: by CP-SAT, against the link's capacity and the time of codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from lightning_memopt.graph import Graph
from lightning_memopt.plan.clocks import Rates
from lightning_memopt.solvers.joint.bound import Forms, Place
from lightning_memopt.solvers.offload.trips import Form, Gap, Planner

_UNITS = 1 << 20
"""Bytes and seconds are counted in so many parts of the largest."""
_FOREVER = 1000 * _UNITS
"""No longer stall, copy or codec is told from this one: CP-SAT counts in 64 bits."""
_HIGH = 48
_CLOSE = 5e-3
"""A choice is good enough where no other is better by more than such a share."""
_SLACK = 1.1
"""What a choice takes may be estimated so many times too high."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """A tensor in one form: what it takes off the device at the points past `after` and before `gap.needed`."""

    gap: Gap
    place: Place
    after: int
    nbytes: int
    name: str

    def saves_at(self, p: int) -> bool:
        return self.after < p < self.gap.needed


def _worth(places: Sequence[Place]) -> Iterator[Place]:
    """Without those that another one is as good as in everything."""

    def costs(place: Place) -> tuple[float, ...]:
        return place.encode + place.decode, place.out, place.back, place.stays

    for i, place in enumerate(places):
        mine = costs(place)
        others = [(j, costs(other)) for j, other in enumerate(places) if j != i]
        if not any(all(x <= y for x, y in zip(o, mine, strict=True)) and (o != mine or j < i) for j, o in others):
            yield place


def _picks(graph: Graph, planner: Planner, high: Sequence[int], forms: Forms, rates: Rates) -> Iterator[list[_Pick]]:
    """By tensor, of those that take anything off a high point."""
    for t, gap in planner.gaps.items():
        after, nbytes = max(gap.leaves, graph.tensors[t].freed_at), graph.tensors[t].nbytes
        if any(after < p < gap.needed for p in high):
            places = [Place.of(form, nbytes, rates) for form in forms.get(t, ())]
            found = [_Pick(gap, place, after, nbytes - place.stays, f"{t} {place.form[0]}") for place in _worth(places)]
            if found:
                yield found


def chosen(
    graph: Graph,
    planner: Planner,
    levels: Sequence[int],
    budget: int,
    forms: Forms,
    rates: Rates,
    limit_seconds: float,
    below_seconds: float | None = None,
) -> dict[int, Form] | None:
    """What goes away so that a plan fits: against the bytes at every high point, what it costs in codecs and in copies that
    the link has no time for. None where nothing fits, or nothing is estimated to take less than `below_seconds`.
    """
    model = cp_model.CpModel()
    high = _high_points(levels, budget)
    byte = max(1, max(levels) // _UNITS)
    second = max(planner.ends[-1], 1e-9) / _UNITS

    def units(seconds: float) -> int:
        return round(min(seconds / second, _FOREVER))

    picks: list[tuple[_Pick, cp_model.IntVar]] = []
    for found in _picks(graph, planner, high, forms, rates):
        mine = [model.new_bool_var(pick.name) for pick in found]
        picks += zip(found, mine, strict=True)
        if len(mine) > 1:
            model.add_at_most_one(mine)
    if not picks:
        return None
    weighted = cp_model.LinearExpr.weighted_sum
    wanted: dict[tuple[int, ...], int] = {}
    for p in high:
        there = tuple(i for i, (pick, _) in enumerate(picks) if pick.saves_at(p))
        wanted[there] = max(wanted.get(there, 0), -(-(levels[p] - budget) // byte))
    for there, nbytes in wanted.items():
        model.add(weighted([picks[i][1] for i in there], [picks[i][0].nbytes // byte for i in there]) >= nbytes)
    costs: list[tuple[cp_model.IntVar, int]] = []
    for pick, x in picks:
        codec = units(pick.place.encode + pick.place.decode)
        costs.append((x, codec + bool(pick.place.out or pick.place.back)))  # of two that cost nothing, the fewer copies
    moved = [(pick, x) for pick, x in picks if pick.place.out or pick.place.back]
    for forward in (True, False):
        copies = [
            (pick.gap.leaves, units(pick.place.out), x) if forward else (pick.gap.needed, units(pick.place.back), x)
            for pick, x in moved
        ]
        stall = model.new_int_var(0, _FOREVER, "stall")
        costs.append((stall, 1))
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
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {pick.gap.tensor: pick.place.form for pick, x in picks if solver.value(x)}


def _high_points(levels: Sequence[int], budget: int) -> list[int]:
    """Points above the budget: the local maxima, the highest of them where they are many, and the first and last one."""
    over = [p for p, n in enumerate(levels) if n > budget]
    if not over:
        return []
    tops = [p for p in over if (p == 0 or levels[p - 1] <= levels[p]) and (p + 1 == len(levels) or levels[p + 1] < levels[p])]
    tops = sorted(tops, key=lambda p: -levels[p])[:_HIGH]
    return sorted({*tops, over[0], over[-1]})
