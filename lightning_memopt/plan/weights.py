"""How a step changes whose frozen weights are parked in a tier, and are on the device only while their module runs.

A *unit* is a module whose frozen weights come and go together: a block of a transformer. They come when it is called, and go
when the call is over. In backward, they come before the first node of the unit, and go when those of another unit come, or when
backward is over. So in the graph such a weight is a tensor with windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.graph.model import around

Window = tuple[int, int]


@dataclass(frozen=True)
class Unit:
    """The frozen weights of a module.

    path: the module's path in the model.
    weights: ids of their tensors in the graph.
    """

    path: str
    weights: tuple[int, ...]


def movable(graph: Graph, units: Sequence[Unit]) -> tuple[list[Unit], dict[str, str]]:
    """Those of these units that run once in the forward, and once in backward or never, and whose weights nothing else reads.
    And path of each other unit -> why it is none of these.
    """
    written = {t for op in graph.ops for t, _ in op.mutates}
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for t in op.inputs:
            readers.setdefault(t, []).append(op.id)

    def obstacle(unit: Unit) -> str:
        if unit.path not in graph.unbroken:
            return "their modules do not run once in the forward"
        if not written.isdisjoint(unit.weights):
            return "the step writes weights of their modules"
        first, end = graph.unbroken[unit.path]
        ops = [o for t in unit.weights for o in readers.get(t, ())]
        elsewhere = any(graph.ops[o].phase == "update" or (o < len(graph.forward) and not first <= o < end) for o in ops)
        return "other modules read them, or an update does" if elsewhere else ""

    others = {unit.path: why for unit in units if (why := obstacle(unit))}
    while True:
        waiting = [unit for unit in units if unit.path not in others]
        runs = [unit.path for _, unit in _in_backward(graph, waiting)]
        broken = {path for path in runs if runs.count(path) > 1}
        if not broken:
            return waiting, others
        others |= dict.fromkeys(broken, "their modules do not run at one time in backward")


def windows_of(graph: Graph, units: Sequence[Unit]) -> dict[str, tuple[Window, ...]]:
    """Path of a unit -> the intervals of points in which its weights are on the device, where all of these units are parked."""
    windows: dict[str, tuple[Window, ...]] = {}
    for unit in units:
        first, end = graph.unbroken[unit.path]
        windows[unit.path] = ((graph.ops[first].at, graph.ops[end - 1].at),)
    over = max((op.at for op in graph.ops if op.phase == "backward"), default=BEFORE)
    runs = _in_backward(graph, units)
    ends = [first - 1 for first, _ in runs[1:]] + [over]
    for (first, unit), end in zip(runs, ends, strict=False):
        windows[unit.path] += ((first, end),)
    return windows


def _in_backward(graph: Graph, units: Sequence[Unit]) -> list[tuple[int, Unit]]:
    """(point, unit): the weights of the unit come before this point of backward, and those of the one before have gone."""
    unit_of_weight = {t: unit for unit in units for t in unit.weights}
    unit_of_path = {unit.path: unit for unit in units}
    forward = len(graph.forward)

    def needs() -> Iterator[tuple[int, Unit]]:
        for save in graph.saves:
            unit = next((unit_of_path[path] for path in _paths(graph, save.op) if path in unit_of_path), None)
            if unit is not None:
                yield from ((point, unit) for point in save.unpacked_at)
        for op in graph.ops[forward:]:
            yield from ((op.at, unit_of_weight[t]) for t in op.inputs if t in unit_of_weight)

    ordered = sorted(needs(), key=lambda need: need[0])
    return [next(group) for _, group in groupby(ordered, key=lambda need: need[1].path)]


def _paths(graph: Graph, op: int) -> Iterator[str]:
    """The modules that a forward op ran in, from the inside."""
    return around(graph.ops[op].scope.partition("#")[0]) if op < len(graph.forward) else iter(())


def parked_weights(graph: Graph, units: Sequence[Unit]) -> Graph:
    """The step of this graph with these units in a tier. Points and ids are those of `graph`."""
    tensors = list(graph.tensors)
    windows = windows_of(graph, units)
    for unit in units:
        for t in unit.weights:
            tensors[t] = replace(tensors[t], windows=windows[unit.path], freed_at=windows[unit.path][-1][1])
    return replace(graph, tensors=tuple(tensors))
