"""Instances of 100 % load with a known perfect packing: a rectangle of time x bytes, cut into buffers without a rest.

Three families: guillotine cuts (each cut goes through a whole rectangle), cuts that no guillotine makes (pinwheels of five
rectangles, at several depths), and either of them with holes: some buffers are left out, so that only part of the time has
full load. Lifetimes are mixed: some rectangles are only cut into layers, so that they last long, others into short ones.
"""

from __future__ import annotations

import random

from lightning_memopt.solvers.placement import Buffer

Rectangle = tuple[int, int, int, int]
"""(lower, upper, bottom, top)"""


def perfect(
    n: int,
    seed: int,
    *,
    pinwheels: bool = False,
    capacity: int = 1 << 20,
    length: int = 1000,
    unit: int = 1,
    holes: float = 0.0,
) -> tuple[list[Buffer], list[int], int]:
    """About `n` buffers, the offsets of their perfect packing, and the capacity that they fill.

    pinwheels: whether rectangles are cut into pinwheels, where they are large enough.
    unit: sizes are multiples of it.
    holes: share of the buffers that is left out; the moment of full load that is nearest to the middle keeps all of its own.
    """
    rng = random.Random(seed)
    pieces: list[Rectangle] = [(0, length, 0, capacity // unit)]
    style: dict[Rectangle, float] = {pieces[0]: 0.5}  # share of the cuts that are layers
    while len(pieces) < n:
        largest = sorted(pieces, key=lambda r: -(r[1] - r[0]) * (r[3] - r[2]))[: max(3, len(pieces) // 3)]
        rectangle = rng.choice(largest)
        share = min(0.95, max(0.05, style[rectangle] + rng.uniform(-0.25, 0.25)))
        parts = (_pinwheel(rectangle, rng) if pinwheels and rng.random() < 0.5 else None) or _cut(rectangle, rng, share)
        if parts is None:
            style[rectangle] = 1 - style[rectangle]
            if all(r[1] - r[0] < 2 and r[3] - r[2] < 2 for r in largest):
                break
            continue
        pieces.remove(rectangle)
        pieces += parts
        style |= dict.fromkeys(parts, share)
    if holes:
        middle = length // 2
        pieces = [r for r in pieces if r[0] <= middle < r[1] or rng.random() >= holes]
    rng.shuffle(pieces)
    buffers = [Buffer(str(i), r[0], r[1], (r[3] - r[2]) * unit) for i, r in enumerate(pieces)]
    return buffers, [r[2] * unit for r in pieces], capacity // unit * unit


def _cut(r: Rectangle, rng: random.Random, layers: float) -> list[Rectangle] | None:
    """Two parts, one above the other with the given probability, else one after the other; None if it is too thin."""
    lower, upper, bottom, top = r
    if rng.random() < layers:
        if top - bottom < 2:
            return None
        at = bottom + min(max(1, round((top - bottom) * rng.uniform(0.15, 0.85))), top - bottom - 1)
        return [(lower, upper, bottom, at), (lower, upper, at, top)]
    if upper - lower < 2:
        return None
    at = lower + min(max(1, round((upper - lower) * rng.uniform(0.15, 0.85))), upper - lower - 1)
    return [(lower, at, bottom, top), (at, upper, bottom, top)]


def _pinwheel(r: Rectangle, rng: random.Random) -> list[Rectangle] | None:
    """Five parts, of which the one in the middle is touched by the four others in turn; None if it is too small."""
    lower, upper, bottom, top = r
    if upper - lower < 6 or top - bottom < 6:
        return None
    left, right = sorted(rng.sample(range(lower + 1, upper), 2))
    low, high = sorted(rng.sample(range(bottom + 1, top), 2))
    wheel = [
        (lower, right, bottom, low),
        (right, upper, bottom, high),
        (left, upper, high, top),
        (lower, left, low, top),
        (left, right, low, high),
    ]
    return wheel if rng.random() < 0.5 else [(a, b, bottom + top - d, bottom + top - c) for a, b, c, d in wheel]
