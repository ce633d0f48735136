"""Addresses for steps that follow one another: a buffer may live from one step into the next and keeps its address.

It does not matter for the addresses where a step begins. So the step is cut where the fewest bytes are live. A buffer that is
live there has two pieces within a step: its *tail*, which lasts until the step ends, and its *head*, which begins with the next
step. All tails are live at the last moment of the step, and all heads at the first. So if best-fit first places a tail, its
head, the next tail, its head and so on, it stacks tails and heads from address 0 without gaps, and the two pieces of a buffer
get the same offset. This holds for any order of the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.errors import PlacementError
from lightning_memopt.solvers.placement import best_fit, promotion, search
from lightning_memopt.solvers.placement.buffers import Buffer, Ints, Problem
from lightning_memopt.solvers.placement.solve import Placement, place


def place_cyclic(buffers: Sequence[Buffer], period: int, seconds: float = 60.0, alignment: int = 1) -> Placement:
    """Place the buffers of one step as low as possible, if each step has the same buffers `period` later than the step before.

    buffers: lifetimes begin in [0, period). A buffer that ends after `period` lives into the next step; its lifetime must be
        shorter than a period.

    Raises PlacementError as `place` does, and if a lifetime begins outside of the period or is not shorter than it.
    """
    for buffer in buffers:
        if not 0 <= buffer.lower < period or buffer.upper - buffer.lower > period:
            raise PlacementError(
                f"buffer {buffer.id}: its lifetime from {buffer.lower} to {buffer.upper} is not one of a step of {period}; "
                "give one that begins within the step and is no longer"
            )
    began = clocks.monotonic()
    cut = _cut(buffers, period)
    moved = [buffer._replace(lower=(buffer.lower - cut) % period) for buffer in buffers]
    buffers = [after._replace(upper=after.lower + b.upper - b.lower) for after, b in zip(moved, buffers, strict=True)]
    if all(buffer.upper <= period for buffer in buffers):
        return place(buffers, seconds=seconds, alignment=alignment)
    crossing = [i for i, buffer in enumerate(buffers) if buffer.upper > period]
    pieces = [buffer._replace(upper=min(buffer.upper, period)) for buffer in buffers]
    pieces += [buffers[i]._replace(lower=0, upper=buffers[i].upper - period) for i in crossing]
    problem = Problem.of(pieces, alignment)
    offsets = _offsets(problem, crossing, len(buffers), began + seconds)
    assert (offsets[crossing] == offsets[len(buffers) :]).all(), "best-fit stacks the pieces that it places first"
    return Placement(
        offsets=tuple(offsets[: len(buffers)].tolist()),
        height_nbytes=problem.height_nbytes(offsets),
        bound_nbytes=problem.bound_nbytes,
        fits=True,
        seconds=clocks.monotonic() - began,
    )


def _cut(buffers: Sequence[Buffer], period: int) -> int:
    """The time in [0, period) across which the fewest bytes live; the first one if several are equal."""
    change = np.zeros(2 * period + 2, dtype=np.int64)  # a buffer lives across the times between its lower and its upper
    for buffer in buffers:
        change[buffer.lower + 1] += buffer.size
        change[buffer.upper] -= buffer.size
    across = np.cumsum(change)
    return int(np.argmin(across[:period] + across[period : 2 * period]))


def _offsets(problem: Problem, crossing: list[int], count: int, until: float) -> Ints:
    """The lowest offsets of all pieces: `count` buffers and tails, then the heads of the buffers `crossing`, in this order."""
    best_fitted = search.best_fit if search.available() else best_fit.best_fit
    tails, heads = np.array(crossing, dtype=np.int64), np.arange(count, len(problem), dtype=np.int64)
    head_of = np.full(len(problem), -1, dtype=np.int64)
    head_of[tails] = heads
    is_head = np.zeros(len(problem), dtype=bool)
    is_head[heads] = True

    def stacked(problem: Problem, order: Ints) -> Ints:
        """Best-fit in this order, except that tails come before all other buffers, and each head right after its tail."""
        stack = order[head_of[order] >= 0]
        rest = order[(head_of[order] < 0) & ~is_head[order]]
        return best_fitted(problem, np.concatenate([np.stack([stack, head_of[stack]], axis=1).ravel(), rest]))

    size = problem.size[tails]
    stacks = [
        np.lexsort((-size, -problem.upper[heads], problem.lower[tails])),  # those allocated first are at the bottom
        np.lexsort((-size, problem.lower[tails], -problem.upper[heads])),  # those freed last are at the bottom
        np.lexsort((problem.lower[tails], -size)),
    ]
    orders = best_fit.orders(problem).values()
    starts = [np.concatenate([tails[stack], order[head_of[order] < 0]]) for stack in stacks for order in orders]
    return promotion.repeated(problem, starts, problem.bound_nbytes, until, place=stacked)
