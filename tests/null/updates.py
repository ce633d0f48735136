"""Steps whose parameters may be updated in backward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from lightning_memopt.graph import BEFORE, EarlyUpdate, Graph, Tensor


def with_updates(graph: Graph, rng: random.Random, count: int = 5, beside: int | None = None) -> Graph:
    """The graph with parameters whose gradients are final somewhere in backward. `beside`: what an update takes, in
    gradients; None: another one each."""
    begins = min((p for s in graph.saves for p in s.unpacked_at), default=len(graph.points) - 1)
    last, tensors, updates = len(graph.points) - 1, list(graph.tensors), list[EarlyUpdate]()
    until = rng.choice((BEFORE, BEFORE, begins - 1))
    for at in sorted(rng.randint(begins, last) for _ in range(count)):
        id, nbytes = len(tensors), rng.randint(0, 9)
        tensors.append(Tensor(id=id, name=f"p{id}", nbytes=4, kind="parameter", storage=id, born_at=BEFORE, freed_at=last))
        since = at + 1 if rng.random() < 0.8 else rng.randint(at + 1, last + 1)
        nbytes = nbytes if since <= last else 0
        takes = nbytes * beside if beside is not None else rng.randint(0, 6)
        held = until if nbytes else BEFORE
        updates.append(EarlyUpdate(parameter=id, at=at, nbytes=nbytes, since=since, until=held, beside_nbytes=takes))
    sizes = [update.beside_nbytes for update in updates]
    usual = rng.choice((sum(sizes), max(sizes)))
    return replace(graph, tensors=tuple(tensors), updates=tuple(updates), usual_nbytes=usual)


def choices(graph: Graph) -> Iterator[tuple[int, ...]]:
    """All choices of early updates, the smallest first."""
    parameters = [update.parameter for update in graph.updates]
    for count in range(len(parameters) + 1):
        yield from combinations(parameters, count)
