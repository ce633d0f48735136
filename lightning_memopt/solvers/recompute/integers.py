"""The fewest seconds of a cut problem within a number of bytes, in whole tensors. Unlike the hull, this has no gaps."""

from __future__ import annotations

import math

from ortools.sat.python import cp_model

from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild

_UNITS = 1 << 40
"""Number of integer units that stand for the seconds of all ops. The seconds of each op are rounded down to units."""
_FLOATS = 1 - 1e-9
"""As in `mincut`."""
_EFFORT = 0.5
"""Limit in CP-SAT's own measure of work, about seconds. It does not depend on how busy the machine is."""


def least_seconds(problem: HoldOrRebuild, nbytes: int) -> tuple[float, frozenset[int] | None]:
    """Seconds such that no choice that holds at most `nbytes` takes fewer (infinite if no choice holds so little), and what the
    best choice that was found holds.
    """
    graph = problem.graph
    if not problem.needed:
        return 0.0, None
    model = cp_model.CpModel()
    held = {t: model.new_bool_var(f"held {t}") for t in problem.tensors if t not in problem.lost}
    runs = {o: model.new_bool_var(f"runs {o}") for o in problem.ops if graph.ops[o].recomputable}

    def there(t: int) -> list[cp_model.IntVar]:
        ways = [held[t]] if t in held else []
        if t in graph.rebuilders:
            ways.append(runs[graph.rebuilders[t].id])
        return ways

    for t in problem.needed:
        model.add_bool_or(there(t))
    for o, run in runs.items():
        for t in graph.ops[o].inputs:
            if not problem.given(t):
                model.add_bool_or([run.negated(), *there(t)])
    unit = math.gcd(*(graph.tensors[t].nbytes for t in held)) or 1
    model.add(sum(graph.tensors[t].nbytes // unit * held[t] for t in held) <= nbytes // unit)
    scale = _UNITS / (problem.total_seconds + 1e-12)
    model.minimize(sum(int(graph.ops[o].seconds * scale) * run for o, run in runs.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _EFFORT
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return math.inf, None
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    holds = frozenset(t for t, choice in held.items() if solver.boolean_value(choice)) if found else None
    return max(0.0, solver.best_objective_bound / scale * _FLOATS), holds
