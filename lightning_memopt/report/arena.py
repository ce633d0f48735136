"""The arena of a planned pool as text: addresses upwards, the requests of a step to the right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.runtime.pool import ALIGNMENT
from lightning_memopt.solvers.placement import Buffer, Placement, buffers_of, place
from lightning_memopt.units import format_nbytes

_SECONDS = 2.0
"""Maximum number of seconds for the search for addresses."""
_SHADES = " ░▒▓█"
"""Characters for a share of bytes in use, from none to all."""


def picture(graph: Graph, lives: Sequence[Life], rows: int = 16, columns: int = 96) -> str:
    """The addresses that the pool would give to a step with these lives: a line of figures, then the picture."""
    buffers = buffers_of(graph, lives)
    if not buffers:
        return "The step requests no memory."
    return drawn(buffers, place(buffers, seconds=_SECONDS, alignment=ALIGNMENT), rows, columns)


def drawn(buffers: Sequence[Buffer], placement: Placement, rows: int = 16, columns: int = 96) -> str:
    """A picture in which each character is a range of addresses and of requests. The darker it is, the more is in use."""
    first, last = min(b.lower for b in buffers), max(b.upper for b in buffers)
    rows, columns = min(rows, placement.height_nbytes), min(columns, last - first)
    used = np.zeros((rows, columns))
    for buffer, offset in zip(buffers, placement.offsets, strict=True):
        addresses = _shares(offset, offset + buffer.size, placement.height_nbytes, rows)
        used += np.outer(addresses, _shares(buffer.lower - first, buffer.upper - first, last - first, columns))
    shades = np.ceil(np.clip(used, 0.0, 1.0).round(6) * (len(_SHADES) - 1)).astype(int)
    head = (
        f"Arena of a planned pool: {format_nbytes(placement.height_nbytes)}, max-live {format_nbytes(placement.bound_nbytes)}, "
        f"fragmentation {100 * placement.fragmentation:.2f} %, {len(buffers)} buffers. Addresses go up, requests go right:"
    )
    lines = ["|" + "".join(_SHADES[shade] for shade in row) + "|" for row in shades[::-1]]
    return "\n".join([head, *lines])


def _shares(begin: int, end: int, length: int, count: int) -> np.ndarray:
    """The share of each of `count` equal parts of [0, length) that is in [begin, end); shape (count,)."""
    edges = np.arange(count + 1) * (length / count)
    return np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0, None) / (length / count)
