"""An independent check of a placement: a sweep over time, with code of its own and integers of any size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from lightning_memopt.solvers.placement.buffers import Buffer


def faults(buffers: Sequence[Buffer], offsets: Sequence[int], capacity: int | None = None, alignment: int = 1) -> list[str]:
    """One line for every rule that a placement breaks; none if it is right.

    The rules: each buffer has an offset, at least 0 and a multiple of `alignment`; no buffer ends above `capacity`; two buffers
    that are live at the same time do not share a byte.
    """
    if len(buffers) != len(offsets):
        return [f"{len(offsets)} offsets for {len(buffers)} buffers"]
    lines = []
    for buffer, offset in zip(buffers, offsets, strict=True):
        if offset < 0 or offset % alignment:
            lines.append(f"{buffer.id}: offset {offset} is negative, or not a multiple of {alignment}")
        if capacity is not None and offset + buffer.size > capacity:
            lines.append(f"{buffer.id}: ends at {offset + buffer.size}, above {capacity}")
    events = []
    for index, buffer in enumerate(buffers):
        events += [(buffer.lower, 1, index), (buffer.upper, 0, index)]
    alive: list[tuple[int, int, int]] = []  # (offset, end, index), ascending: no two of them overlap unless a line says so
    for _, comes, index in sorted(events):  # at the same time, buffers are freed before others are allocated
        span = (int(offsets[index]), int(offsets[index]) + buffers[index].size, index)
        if not comes:
            alive.pop(bisect_left(alive, span))
            continue
        lines += [
            f"{buffers[index].id} and {buffers[k].id} overlap" for low, high, k in alive if low < span[1] and span[0] < high
        ]
        insort(alive, span)
    return lines
