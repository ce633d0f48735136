"""The buffers of a recorded step: what it requests from the allocator. The number of a request is its time."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.allocator import requests
from lightning_memopt.solvers.placement.buffers import Buffer


def buffers_of(graph: Graph, lives: Iterable[Life] | None = None) -> list[Buffer]:
    """One buffer for each allocation of the step that has bytes, in their order; times are numbers of requests.

    lives: of a plan; None for the unmodified step. Tensors from before the step that stay are not among the buffers.
    """
    actions = requests(graph, lives)
    began: dict[object, tuple[int, int]] = {}
    buffers = []
    for moment, (name, nbytes) in enumerate(actions):
        if nbytes >= 0:
            began[name] = (moment, nbytes)
        else:
            lower, size = began.pop(name)
            buffers.append((lower, moment, size))
    buffers += [(lower, len(actions), size) for lower, size in began.values()]
    return [Buffer(str(lower), lower, upper, size) for lower, upper, size in sorted(buffers) if size]
