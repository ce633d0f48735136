"""The arena of a planned pool: addresses upwards, the requests of a step to the right."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memopt.report.page.parts import Grid, Picture, Section, count, size
from lightning_memopt.report.record import Arena, Placed, RunRecord
from lightning_memopt.runtime.pool import ALIGNMENT, PoolStatus
from lightning_memopt.solvers.placement import buffers_of, place
from lightning_memopt.units import format_nbytes

MOST = 1500
"""Maximum number of buffers that are drawn: the largest ones by bytes times lifetime."""
_SECONDS = 2.0
"""Maximum number of seconds for the search for addresses for a plan file."""


def would_be(record: RunRecord) -> Arena | None:
    """The arena that a planned pool would give the step of a plan; None if there is no plan, or no request."""
    if record.graph is None or record.plan is None:
        return None
    if record.plan.addresses is not None:
        return Arena.of(PoolStatus(addresses=record.plan.addresses))
    buffers = buffers_of(record.graph, record.plan.lives)
    if not buffers:
        return None
    placement = place(buffers, seconds=_SECONDS, alignment=ALIGNMENT)
    return Arena(
        period=max(b.upper for b in buffers),
        arena_nbytes=placement.height_nbytes,
        max_live_nbytes=placement.bound_nbytes,
        placed=tuple(Placed(b.lower, b.upper, b.size, o) for b, o in zip(buffers, placement.offsets, strict=True)),
    )


def section(record: RunRecord) -> Section:
    title, arena = "The arena", record.pool
    runs = record.phase != "file"
    if arena is None:
        if runs:
            why = 'The ordinary allocator served this run. The option pool="planned" asks for an arena.'
            return Section("arena", title, (why,), absent=True)
        arena = would_be(record)
    if arena is None:
        return Section("arena", title, ("There is no plan, so requests have no addresses.",), absent=True)
    if not arena.placed:
        why = f"There is no arena: {arena.reason or 'no request of a step has an address'}."
        return Section("arena", title, (why,), absent=True)
    fragmentation = arena.arena_nbytes / arena.max_live_nbytes - 1 if arena.max_live_nbytes else 0.0
    lead = [
        "Each rectangle is a buffer. Its width is its lifetime, counted in requests of the step; its height is its addresses. "
        f"The arena has {format_nbytes(arena.arena_nbytes)}. At most {format_nbytes(arena.max_live_nbytes)} are live at one "
        f"moment, so the fragmentation is {100 * fragmentation:.2f} %."
    ]
    if runs:
        lead.append(
            f"Measured: {arena.steps} steps were served from it, {arena.deviating} of them with requests that fell through. In "
            f"the last one, {arena.served} requests were served and {arena.fallen} fell through "
            f"({format_nbytes(arena.fallen_nbytes)}). The arena and all other memory together took at most "
            f"{format_nbytes(arena.reserved_nbytes)}."
        )
    else:
        lead.append('Predicted: a run with the option pool="planned" would get such an arena.')
    shown = largest(arena.placed, MOST)
    if len(shown) < len(arena.placed):
        lead.append(f"The {len(shown)} largest of {len(arena.placed)} buffers are drawn.")
    data = {"rects": [list(p) for p in shown], "period": arena.period, "arena": arena.arena_nbytes}
    label = f"{len(arena.placed)} buffers in {format_nbytes(arena.arena_nbytes)} over {arena.period} requests"
    rows = [[count(p.first), count(p.until), size(p.offset), size(p.nbytes)] for p in sorted(shown)]
    caption = f"{'All' if len(rows) == len(arena.placed) else 'The largest'} {len(rows)} buffers"
    table = Grid("arena-buffers", caption, ("from request", "until request", "address", "bytes"), rows)
    return Section("arena", title, tuple(lead), pictures=(Picture("rects", title, label, data),), grids=(table,))


def largest(placed: Sequence[Placed], most: int) -> list[Placed]:
    """The `most` buffers with the largest bytes times lifetime."""
    return sorted(placed, key=lambda p: -p.nbytes * (p.until - p.first))[:most]
