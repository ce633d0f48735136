"""Random steps whose ops read weights that come and go: each of a few units of consecutive ops has a weight of its own."""

from __future__ import annotations

import random
from dataclasses import replace

from lightning_memopt.graph import BEFORE, Graph, Tensor


def windowed(graph: Graph, rng: random.Random, units: int = 3) -> Graph:
    """The step with the weights. A unit's weight is there around its forward, and while autograd asks for what the unit saved;
    its windows may be wider, as those of a unit that keeps its weights are.
    """
    n = len(graph.forward)
    edges = sorted(rng.sample(range(1, n), min(rng.randint(1, units) - 1, n - 1))) if n > 1 else []
    tensors, ops = list(graph.tensors), list(graph.ops)
    for first, end in zip([0, *edges], [*edges, n], strict=True):
        asked = [p for s in graph.saves if first <= min(s.op, n - 1) < end for p in s.unpacked_at]
        windows = [(graph.ops[first].at, graph.ops[end - 1].at)]
        if asked:
            windows.append((min(asked), max(asked) + rng.randint(0, 1)))
        if asked and rng.random() < 0.15:
            windows = [(windows[0][0], windows[1][1])]
        last = len(graph.points) - 1
        spans = tuple((a, min(b, last)) for a, b in windows)
        weight = len(tensors)
        tensors.append(
            Tensor(
                id=weight,
                name=f"weight {weight}",
                nbytes=rng.randint(0, 4),
                kind="parameter",
                storage=weight,
                born_at=BEFORE,
                freed_at=spans[-1][1],
                windows=spans,
            )
        )
        for o in range(first, end):
            if rng.random() < 0.7:
                ops[o] = replace(ops[o], inputs=(*ops[o].inputs, weight))
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops))
