"""Random tensors of a plan that are away for a random part of the time in which nobody reads them."""

from __future__ import annotations

import random
from collections.abc import Iterable

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.solvers.offload.trips import Trip, gaps

LEAST_NBYTES = 64


def random_trips(graph: Graph, lives: Iterable[Life], rng: random.Random) -> list[Trip]:
    """Most of what may go to a disk does."""
    lives = tuple(lives)
    trips = []
    for tensor, gap in gaps(graph, lives).items():
        asked = (save for save in graph.saves if save.tensor == tensor)
        points = {gap.needed, *(p for save in asked for p in save.unpacked_at if gap.leaves < p <= gap.needed)}
        back = rng.choice(sorted(points))
        last = min(back, graph.backward_begins) - 1
        nbytes = graph.tensors[tensor].nbytes
        if rng.random() < 0.2 or last < gap.leaves or nbytes < LEAST_NBYTES:
            continue
        trips.append(Trip(gap, rng.randint(gap.leaves, last), back, "disk", nbytes))
    return trips
