"""The door of the room: buffers in, the lowest placement that the given seconds allow out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memopt import clocks
from lightning_memopt.errors import PlacementError
from lightning_memopt.solvers.placement.buffers import Buffer, Ints, Problem
from lightning_memopt.solvers.placement.portfolio import Portfolio


@dataclass(frozen=True)
class Placement:
    """Addresses for buffers.

    offsets: bytes from the beginning of the arena, for every buffer in the order in which they were given.
    height_nbytes: bytes of the arena that the offsets need.
    bound_nbytes: no placement needs fewer bytes than this.
    fits: whether the height is within the capacity that was asked for; True where none was.
    seconds: what the solve took.
    """

    offsets: tuple[int, ...]
    height_nbytes: int
    bound_nbytes: int
    fits: bool
    seconds: float

    @property
    def fragmentation(self) -> float:
        """The share by which the height is above the bound; 0 if the placement is known to be optimal."""
        return self.height_nbytes / self.bound_nbytes - 1 if self.bound_nbytes else 0.0


def place(buffers: Sequence[Buffer], capacity: int | None = None, seconds: float = 60.0, alignment: int = 1) -> Placement:
    """Place the buffers within `capacity` bytes, or as low as possible.

    capacity: bytes. The search ends where a placement fits. If the seconds are over before, the result is the lowest placement
        that was reached, and its `fits` is False.
    seconds: limit of the search. A few cheap placements are always tried, however small it is.
    alignment: all offsets are multiples of it, in bytes.

    Raises PlacementError for buffers, a capacity, seconds or an alignment that mean nothing.
    """
    began = clocks.monotonic()
    if capacity is not None and capacity < 1:
        raise PlacementError(f"the capacity {capacity} is not positive; give bytes from 1 on, or None")
    if not (math.isfinite(seconds) and seconds > 0):
        raise PlacementError(f"{seconds} is not a positive number of seconds; give one")
    if alignment < 1:
        raise PlacementError(f"the alignment {alignment} is not positive; give bytes from 1 on")
    problem = Problem.of(buffers, alignment)
    bound = problem.bound_nbytes
    target = bound if capacity is None else max(capacity, bound)
    offsets = _offsets(problem, target, began + seconds, lowest=capacity is None)
    height = problem.height_nbytes(offsets)
    fits = capacity is None or height <= capacity
    return Placement(tuple(offsets.tolist()), height, bound, fits, clocks.monotonic() - began)


def _offsets(problem: Problem, target_nbytes: int, until: float, lowest: bool) -> Ints:
    """Offsets of all parts. Each part that needs more than best-fit gets an equal share of the time that is left.

    lowest: whether the parts are placed as low as possible above the target, where it is proven to be out of reach.
    """
    offsets = np.zeros(len(problem), dtype=np.int64)
    portfolios = [(indices, Portfolio(problem.part(indices), target_nbytes)) for indices in problem.components()]
    portfolios.sort(key=lambda entry: not entry[1].done())
    for rank, (indices, portfolio) in enumerate(portfolios):
        now = clocks.monotonic()
        share = now + (until - now) / (len(portfolios) - rank)
        portfolio.run(share)
        unit = math.gcd(*portfolio.problem.size.tolist())  # of all heights that are worth a try
        while lowest and portfolio.impossible_nbytes and clocks.monotonic() < share:
            if portfolio.impossible_nbytes + unit >= portfolio.height_nbytes:
                break
            portfolio.target_nbytes = (portfolio.impossible_nbytes + portfolio.height_nbytes) // 2 // unit * unit
            portfolio.run(share)
        offsets[indices] = portfolio.offsets
    return offsets
