"""Random plans of a graph: legal, and like none that a solver would choose."""

from __future__ import annotations

import random
from itertools import pairwise

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.solvers.rollout import Rollout, unrepeatable


def requests(graph: Graph) -> list[tuple[int, int]]:
    """(point, tensor) of what autograd asks for, in order."""
    return sorted((p, save.tensor) for save in graph.saves for p in save.unpacked_at)


def random_lives(graph: Graph, rng: random.Random, held: float = 0.4) -> tuple[Life, ...]:
    """Lives of a random choice of what is held, this share of all, and of what is forgotten after which request."""
    anchors = unrepeatable(graph)
    makes = {t for op in graph.forward for t in op.outputs} - graph.overwritten
    have = {t for t in sorted(makes) if rng.random() < held} | anchors
    forget = rng.choice((0.0, 0.3))
    roll = Rollout(graph)
    for p, tensor in requests(graph):
        roll.serve([(p, tensor)], have)
        used = {save.tensor for save in graph.saves if save.unpacked_at and save.unpacked_at[0] <= p < save.released_at}
        have -= {t for t in sorted(have - anchors - used) if rng.random() < forget}
    return roll.lives()


def disjoint(lives: tuple[Life, ...]) -> bool:
    """Whether no two lives of a tensor overlap."""
    return all(a.tensor != b.tensor or a.freed_at < b.born_at for a, b in pairwise(lives))
