"""Dymem's memory manager (Yang and Cheng, HPDC 2020; section 3.3, Algorithm 3) as a policy and a baseline.

Dymem groups tensors by mobility. *Movable* ones, with one reader, are placed from the low end of a pool, *temporary* ones, with
several or a late reader, from its high end, both at the moment when they come, by best-fit. *Reclaimed* ones, those of layers
that are not offloaded (fully connected, softmax, dropout), are in an incremental space beside the pool. A first step runs in a
pool that is large enough; then the smallest gap between both ends is squeezed out: pool = init - squeeze gap + beta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_memopt.solvers.placement.buffers import Ints, Problem

Mobility = Literal["movable", "temporary", "reclaimed"]


@dataclass(frozen=True)
class Pool:
    """What a policy that places buffers as they come makes of a step.

    offsets: of every buffer; those of the incremental space are above the main space.
    main_nbytes: the main space, both ends and the least gap between them, which is 0 after squeezing, plus beta.
    incremental_nbytes: the space of reclaimed buffers.
    """

    offsets: Ints
    main_nbytes: int
    incremental_nbytes: int

    @property
    def pool_nbytes(self) -> int:
        """All bytes of the device."""
        return self.main_nbytes + self.incremental_nbytes


def mobility(kind: str, readers: int, next_reads: bool) -> Mobility:
    """Algorithm 3: the group of the output of a layer.

    kind: "linear", "softmax", "dropout", or another layer.
    readers: how many layers read the output.
    next_reads: whether the layer that runs next is (the only) one of them.
    """
    if kind in ("linear", "softmax", "dropout"):
        return "reclaimed"
    return "movable" if readers == 1 and next_reads else "temporary"


def two_ended(problem: Problem, groups: Sequence[Mobility], beta_nbytes: int = 0) -> Pool:
    """Place every buffer when it comes: movable ones low, temporary ones high, reclaimed ones beside them.

    beta_nbytes: what the pool keeps in reserve between both ends.
    """
    names = np.array(groups)
    init = int(problem.size.sum())
    low = _as_they_come(problem, np.flatnonzero(names == "movable"))
    high = _as_they_come(problem, np.flatnonzero(names == "temporary"))
    incremental = _as_they_come(problem, np.flatnonzero(names == "reclaimed"))
    tops = [_tops(problem, offsets) for offsets in (low, high)]
    squeeze_gap = init - int((tops[0] + tops[1]).max(initial=0))
    main = init - squeeze_gap + beta_nbytes
    offsets = np.zeros(len(problem), dtype=np.int64)
    placed: list[tuple[dict[int, int], Callable[[int, int], int]]] = [
        (low, lambda offset, size: offset),
        (high, lambda offset, size: main - offset - size),
        (incremental, lambda offset, size: main + offset),
    ]
    for own, address in placed:
        for index, offset in own.items():
            offsets[index] = address(offset, int(problem.size[index]))
    return Pool(offsets, main, int(_tops(problem, incremental).max(initial=0)))


def one_ended(problem: Problem) -> Pool:
    """The baseline: all buffers by best-fit from the low end, when they come."""
    return two_ended(problem, ["movable"] * len(problem))


def _as_they_come(problem: Problem, indices: Ints) -> dict[int, int]:
    """Offsets from one end of a pool. At each moment buffers go before others come; the largest of those comes first."""
    offsets: dict[int, int] = {}
    alive: list[int] = []
    for index in indices[np.lexsort((-problem.size[indices], problem.lower[indices]))].tolist():
        alive = [other for other in alive if problem.upper[other] > problem.lower[index]]
        need, floor, best = int(problem.size[index]), 0, (1 << 62, -1)
        for other in sorted(alive, key=offsets.__getitem__):
            gap = offsets[other] - floor
            if gap >= need:
                best = min(best, (gap, floor))
            floor = offsets[other] + int(problem.size[other])
        offsets[index] = best[1] if best[1] >= 0 else floor
        alive.append(index)
    return offsets


def _tops(problem: Problem, offsets: dict[int, int]) -> Ints:
    """The highest end at every moment: shape (moments - 1,)."""
    tops = np.zeros(max(len(problem.times) - 1, 0), dtype=np.int64)
    for index, offset in offsets.items():
        span = slice(int(problem.first[index]), int(problem.last[index]))
        tops[span] = np.maximum(tops[span], offset + problem.size[index])
    return tops
