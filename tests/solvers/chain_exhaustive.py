"""The optimum over arbitrary schedules of a tiny chain, by exhaustive search: what memory-persistence gives away.

The table of `solvers.chain` is exact among memory-persistent schedules: a boundary once kept stays until its backward.
Without that rule the problem has no known polynomial algorithm; for up to five or six stages Dijkstra over every state
is possible. Only for tests and benchmarks: time and memory are exponential in the number of stages.

A state is (next backward, next stage of the user's own forward, boundaries held, option held per stage). Moves: run a
stage forward (own pass: free and in order), hold an option while doing so, drop anything at any time, run the next
backward. While a stage's set is held its output boundary stays with it, as the set may need it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import TypeAlias

from lightning_memopt.solvers.chain.model import Chain

State: TypeAlias = tuple[int, int, tuple[bool, ...], tuple[int, ...]]


def unrestricted_seconds(chain: Chain, budget_nbytes: int) -> float:
    """Least extra seconds over all schedules within the budget; infinity if none fits."""
    length = len(chain.stages)
    if chain.stages[0].input_nbytes > budget_nbytes:
        return float("inf")
    start: State = (length - 1, 0, (True,) + (False,) * (length - 1), (-1,) * length)
    best: dict[State, float] = {start: 0.0}
    order = count()
    heap: list[tuple[float, int, State]] = [(0.0, next(order), start)]
    while heap:
        seconds, _, state = heapq.heappop(heap)
        if seconds > best[state]:
            continue
        if state[0] < 0:
            return seconds
        for cost, after in _moves(chain, budget_nbytes, state):
            if seconds + cost < best.get(after, float("inf")):
                best[after] = seconds + cost
                heapq.heappush(heap, (seconds + cost, next(order), after))
    return float("inf")


def _moves(chain: Chain, budget_nbytes: int, state: State) -> Iterator[tuple[float, State]]:
    due, own_next, boundaries, held = state
    stages = chain.stages
    last = len(stages) - 1
    own_pass = due == last
    outside = sum(s.input_nbytes for s, is_held in zip(stages, boundaries, strict=True) if is_held)
    outside += sum(s.options[o].held_nbytes for s, o in zip(stages, held, strict=True) if o >= 0)

    for k in range(last + 1):  # drop one thing
        if held[k] >= 0:
            yield 0.0, (due, own_next, boundaries, _with(held, k, -1))
        if boundaries[k] and (k == 0 or held[k - 1] < 0) and held[k] < 0:
            yield 0.0, (due, own_next, _with(boundaries, k, False), held)

    for k in (own_next,) if own_pass else range(due + 1):  # run one stage forward
        if k > due or not boundaries[k] or held[k] >= 0 or (k < due and boundaries[k + 1]):
            continue
        stage = stages[k]
        base = stage.forward_base_nbytes if own_pass else stages[due].backward_base_nbytes
        produced = _with(boundaries, k + 1, True) if k < due else boundaries
        if k < due and outside + base + stage.sweep_peak_nbytes <= budget_nbytes:
            yield (0.0 if own_pass else stage.sweep_seconds), (due, own_next + own_pass, produced, held)
        for index, option in enumerate(stage.options):
            if outside + base + option.forward_peak_nbytes <= budget_nbytes:
                cost = 0.0 if own_pass else option.rerun_seconds
                yield cost, (due, own_next + own_pass, produced, _with(held, k, index))

    if boundaries[due]:  # the next backward
        stage = stages[due]
        after = boundaries if due == 0 or held[due - 1] >= 0 else _with(boundaries, due, False)
        if due < last:
            after = _with(after, due + 1, False)
        if held[due] >= 0:
            option = stage.options[held[due]]
            own_nbytes = option.held_nbytes
            if due < last and boundaries[due + 1]:
                own_nbytes += stages[due + 1].input_nbytes
            if outside - own_nbytes + option.backward_peak_nbytes <= budget_nbytes:
                yield option.rebuild_seconds, (due - 1, own_next, after, _with(held, due, -1))
        elif not own_pass and outside + stage.rebuild_peak_nbytes <= budget_nbytes:
            yield stage.rebuild_seconds, (due - 1, own_next, after, held)


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
