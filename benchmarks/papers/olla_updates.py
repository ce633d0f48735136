"""Updates as early as possible (OLLA, section 4.3): an update frees its gradient, so waiting gains nothing.

`early` moves each update right behind the last op that it must wait for. `control_edges` implements OLLA's Functions 3 and 4:
for each update it finds, near the update's inputs, an *anchor* that runs soon after. An edge without bytes from the update to
the anchor narrows the span in which the update may run. `ordered` solves a step from orders in which updates run early.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from lightning_memopt.solvers.ordering import Order, Problem, order
from lightning_memopt.solvers.ordering.problem import BEFORE


def early(problem: Problem, updates: AbstractSet[int], sequence: Sequence[int]) -> list[int]:
    """The sequence with every update right behind the last op that it must wait for."""
    place = {op: position for position, op in enumerate(sequence)}
    at: dict[int, tuple[int, int]] = {}
    for op in sequence:  # an update may have to wait for another update, which has moved
        if op in updates:
            at[op] = max((at[o] for o in problem.before[op]), default=(-1, 0))[0], place[op]
        else:
            at[op] = place[op], -1
    return sorted(sequence, key=at.__getitem__)


def control_edges(problem: Problem, updates: AbstractSet[int]) -> list[tuple[int, int]]:
    """(update, anchor) for each update that has an anchor: Functions 3 and 4 of the paper."""
    n = len(problem)
    forward, backward = [0] * n, [0] * n
    for op in range(n):
        forward[op] = max((forward[o] + 1 for o in problem.before[op]), default=0)
    for op in range(n - 1, -1, -1):
        backward[op] = max((backward[o] + 1 for o in problem.after[op]), default=0)
    return [(op, anchor) for op in sorted(updates) if (anchor := _anchor(problem, updates, op, forward, backward)) is not None]


def _anchor(problem: Problem, updates: AbstractSet[int], update: int, forward: list[int], backward: list[int]) -> int | None:
    """Function 3, for one update: the search begins at the ops right before it, and widens until there is a candidate."""
    seen: dict[int, tuple[int | None, int]] = {}
    starts, visited = {update}, {update}
    while starts:
        starts = {other for op in starts for other in problem.before[op]} - visited
        visited |= starts
        best: tuple[int, int] | None = None
        for op in sorted(starts):
            anchor, level = _candidate(problem, updates, op, forward, backward, forward[update], seen)
            if anchor is not None and anchor != update and (best is None or level > best[0]):
                best = level, anchor
        if best is not None:
            return best[1]
    return None


def _candidate(
    problem: Problem,
    updates: AbstractSet[int],
    start: int,
    forward: list[int],
    backward: list[int],
    least_level: int,
    seen: dict[int, tuple[int | None, int]],
) -> tuple[int | None, int]:
    """Function 4: below `start`, the op above the level of the update from which the way to the end is longest.

    Updates cannot be anchors, because they may run at any time. The paper's recursion is written as a loop with a stack.
    """
    stack = [start]
    while stack:
        op = stack[-1]
        if op in seen:
            stack.pop()
            continue
        low = [o for o in problem.after[op] if forward[o] <= least_level and o not in updates]
        waiting = [o for o in low if o not in seen]
        if waiting:
            stack += waiting
            continue
        candidates = [seen[o] for o in low]
        candidates += [(o, backward[o]) for o in problem.after[op] if forward[o] > least_level and o not in updates]
        seen[op] = max(candidates, key=lambda c: c[1], default=(None, -1))
        stack.pop()
    return seen[start]


def with_control_edges(problem: Problem, updates: AbstractSet[int]) -> Problem:
    """The problem with its control edges, in which updates cannot run late. Its sequences are valid for the problem, too.

    Ops are numbered as before, so an edge to an op with a smaller number, which the given order does not allow, is left out.
    """
    before = [set(ops) for ops in problem.before]
    for update, anchor in control_edges(problem, updates):
        if update < anchor:
            before[anchor].add(update)
    return replace(problem, before=tuple(tuple(sorted(ops)) for ops in before))


def renumbered(problem: Problem, sequence: Sequence[int]) -> Problem:
    """The problem with its ops given in the order of a sequence."""
    place = {op: at for at, op in enumerate(sequence)}
    return replace(
        problem,
        before=tuple(tuple(sorted(place[o] for o in problem.before[op])) for op in sequence),
        makers=tuple(place.get(maker, BEFORE) for maker in problem.makers),
        users=tuple(tuple(sorted(place[user] for user in users)) for users in problem.users),
        workspace=tuple(problem.workspace[op] for op in sequence),
    )


def ordered(problem: Problem, updates: AbstractSet[int], seconds: float) -> tuple[Order, int]:
    """The best order that was found, and the peak of the given order with updates as early as possible.

    The solver begins with the latter. If it does not prove that its result is the best, it begins again with control edges, so
    that updates cannot run late. `seconds`: limit of each.
    """
    began = time.monotonic()
    first = early(problem, updates, range(len(problem)))
    found = order(renumbered(problem, first), seconds)
    early_nbytes = found.given_nbytes
    sequence = tuple(first[op] for op in found.sequence)
    peak_nbytes = found.peak_nbytes
    by = "updates as early as possible" if found.by == "the given order" else found.by
    if peak_nbytes > found.bound_nbytes:
        edged = order(with_control_edges(problem, updates), seconds)
        if edged.peak_nbytes < peak_nbytes:
            sequence = edged.sequence
            peak_nbytes = edged.peak_nbytes
            by = f"{edged.by}, control edges"
    given_nbytes = problem.peak_nbytes(range(len(problem)))
    return Order(sequence, peak_nbytes, found.bound_nbytes, given_nbytes, by, time.monotonic() - began), early_nbytes
