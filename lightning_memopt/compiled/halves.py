"""The memory that a region takes after it was split into a compiled forward and a compiled backward, read from both FX
graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from lightning_memopt.compiled.sizes import nbytes_of, tensors_of


@dataclass(frozen=True)
class Halves:
    """Bytes of a region, without those that exist before it runs (its weights and inputs).

    saved_nbytes: what the forward keeps for the backward.
    peak_nbytes: the most bytes at one moment, in forward or backward.
    """

    saved_nbytes: int
    peak_nbytes: int


def halves_of(forward: fx.GraphModule, backward: fx.GraphModule) -> Halves:
    """The bytes of a region if each op had memory of its own. Code that fuses ops or reuses memory takes fewer bytes."""
    saved = {
        node.name
        for node in backward.graph.nodes
        if node.op == "placeholder" and not node.name.startswith(("primals", "tangents")) and _storages(node)
    }
    kept = [node for node in forward.graph.nodes if node.name in saved]
    saved_nbytes = sum({key: nbytes for node in kept for key, nbytes in _storages(node)}.values())
    levels = [*_levels(forward, ()), *_levels(backward, saved)]
    return Halves(saved_nbytes, max(levels, default=0))


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """(identity, bytes) of the memory behind the results of a node."""
    return [(t.untyped_storage()._cdata, nbytes_of(t)) for t in tensors_of(node.meta.get("val"))]


def _levels(module: fx.GraphModule, counted: Iterable[str]) -> list[int]:
    """Bytes in memory after each op. `counted`: names of inputs that are counted until their last reader has run."""
    nodes = list(module.graph.nodes)
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for read in (node, *node.all_input_nodes):
            for key, _ in _storages(read):
                last[key] = i
    free = {key for n in nodes if n.op == "placeholder" and n.name not in counted for key, _ in _storages(n)}
    alive: dict[int, int] = {}
    levels = []
    for i, node in enumerate(nodes):
        for key, nbytes in _storages(node):
            if key not in free and node.target is not operator.getitem:
                alive.setdefault(key, nbytes)
        levels.append(sum(alive.values()))
        for read in (node, *node.all_input_nodes):
            for key, _ in _storages(read):
                if last[key] == i:
                    alive.pop(key, None)
    return levels
