"""List scheduling: of the ops that may run now, the one with the smallest key always runs next.

The keys are those of the literature: the smallest growth (bytes made less bytes freed); or first the ops that free more than
they make, and then those that continue what was begun last. The place in a given sequence breaks ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from lightning_memopt.solvers.ordering.problem import BEFORE, Problem

Key = Callable[[int, int, int, int], tuple[int, ...]]
"""(bytes that the op makes, bytes that it frees, its place in the given sequence, the last place of an op before it) -> the
key. Ops with smaller keys run sooner.
"""

KEYS: dict[str, Key] = {
    "growth": lambda made, freed, place, last: (made - freed, place),
    "shrinking first": lambda made, freed, place, last: (0, made - freed, place) if made <= freed else (1, 0, place),
    "shrinking, then depth first": lambda made, freed, place, last: (0, made, place) if made <= freed else (1, -last, place),
}


def scheduled(problem: Problem, sequence: Sequence[int], key: Key) -> list[int]:
    """A sequence by list scheduling. `sequence`: a valid one, which decides between equal keys."""
    n = len(problem)
    place = [0] * n
    for position, op in enumerate(sequence):
        place[op] = position
    last = [max((place[o] for o in ops), default=-1) for ops in problem.before]
    waiting = [len(ops) for ops in problem.before]
    made = [sum(problem.nbytes[b] for b in buffers) for buffers in problem.makes]
    freed = [0] * n  # bytes that are freed when the op has run, if it runs now
    left = [{*users, maker} - {BEFORE} for maker, users in zip(problem.makers, problem.users, strict=True)]
    heap: list[tuple[tuple[int, ...], int]] = []  # has an op once for each key that the op has had since it was ready

    def push(op: int) -> None:
        heappush(heap, (key(made[op], freed[op], place[op], last[op]), op))

    def used_by_one(buffer: int) -> int | None:
        """Note who frees the buffer, once one op is left that uses it."""
        if len(left[buffer]) != 1 or buffer in problem.stays:
            return None
        (op,) = left[buffer]
        freed[op] += problem.nbytes[buffer]
        return op

    for buffer in range(len(left)):
        used_by_one(buffer)
    for op in range(n):
        if not waiting[op]:
            push(op)
    result: list[int] = []
    ran = [False] * n
    while heap:
        was, op = heappop(heap)
        if ran[op] or was != key(made[op], freed[op], place[op], last[op]):
            continue
        ran[op] = True
        result.append(op)
        for buffer in {*problem.uses[op], *problem.makes[op]}:
            left[buffer].discard(op)
            other = used_by_one(buffer)
            if other is not None and not waiting[other]:
                push(other)
        for other in problem.after[op]:
            waiting[other] -= 1
            if not waiting[other]:
                push(other)
    return result
