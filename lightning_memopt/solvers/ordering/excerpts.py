"""The best order of an excerpt of a sequence, while the ops before and after it stay where they are. Exact, by CP-SAT.

Positions in the excerpt are variables, between the first and the last that each op can have (ASAP and ALAP in OLLA, section
4.1); buffers are intervals between them, and a cumulative constraint bounds the bytes of intervals that share a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from lightning_memopt.solvers.ordering.problem import BEFORE, Problem


@dataclass(frozen=True)
class Solved:
    """sequence: with the best excerpt that was reached. proven: no order of the excerpt has a lower peak."""

    sequence: list[int]
    proven: bool


def solved(
    problem: Problem, sequence: Sequence[int], low: int, high: int, enough_nbytes: int, seconds: float, workers: int
) -> Solved:
    """The sequence with the ops at positions `low .. high - 1` in their best order.

    enough_nbytes: the search ends when it reaches this peak.
    """
    inside = {op: k for k, op in enumerate(sequence[low:high])}
    count = len(inside)
    preceding = {op: {o for o in problem.before[op] if o in inside} for op in inside}
    above: dict[int, set[int]] = {}
    for op in inside:
        above[op] = set().union(*(above[o] | {o} for o in preceding[op]))
    below = dict.fromkeys(inside, 0)
    for ops in above.values():
        for o in ops:
            below[o] += 1
    model = cp_model.CpModel()
    at = {op: model.new_int_var(len(above[op]), count - 1 - below[op], "") for op in inside}
    model.add_all_different(at.values())
    for op, k in inside.items():
        model.add_hint(at[op], k)
        for o in preceding[op]:
            model.add(at[o] < at[op])
    position = {op: k for k, op in enumerate(sequence)}
    intervals, sizes, constant = [], [], problem.resident_nbytes
    for op in inside:
        if problem.workspace[op]:
            intervals.append(model.new_fixed_size_interval_var(at[op], 1, ""))
            sizes.append(problem.workspace[op])
    touched = {b for op in inside for b in (*problem.uses[op], *problem.makes[op])}
    for buffer, nbytes in enumerate(problem.nbytes):
        maker = problem.makers[buffer]
        users = problem.users[buffer]
        begins = 0 if maker == BEFORE else position[maker]
        ends = len(sequence) if buffer in problem.stays else max((position[u] for u in users), default=begins)
        if begins >= high or ends < low or not nbytes:
            continue
        if begins < low and ends >= high:
            constant += nbytes
            continue
        if buffer not in touched:
            continue  # it is in memory only at the first position, and no op uses it
        start = at[maker] if begins >= low and maker != BEFORE else 0
        if ends >= high:
            end: cp_model.LinearExprT = count
        else:
            last = [at[u] for u in {*users, maker} if u in inside]
            if len(last) == 1:
                end = last[0] + 1
            else:
                end = model.new_int_var(1, count, "")
                for variable in last:
                    model.add(end >= variable + 1)
        intervals.append(model.new_interval_var(start, model.new_int_var(1, count, ""), end, ""))
        sizes.append(nbytes)
    peak = model.new_int_var(max(0, enough_nbytes - constant), sum(sizes), "")
    model.add_cumulative(intervals, sizes, peak)
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.catch_sigint_signal = False  # catching it leaves a handler that ends the process at once
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved(list(sequence), False)
    excerpt = sorted(inside, key=lambda op: solver.value(at[op]))
    return Solved([*sequence[:low], *excerpt, *sequence[high:]], status == cp_model.OPTIMAL)
