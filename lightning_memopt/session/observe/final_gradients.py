"""Where gradients become final in an observed step, and how early updates at these points change the graph of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightning_memopt.graph import BEFORE, EarlyUpdate, Graph, Levels

NEVER = -1
"""Stands for the id of a tensor that no op of the step read or made."""


class Final(NamedTuple):
    """A gradient was final.

    name: the name of the parameter.
    parameter: id of the parameter's tensor.
    gradient: id of the gradient's tensor.
    point: the gradient was final after this point.
    weight: id of the gathered weight of a sharded parameter.
    """

    name: str
    parameter: int
    gradient: int
    point: int
    weight: int = NEVER


def late(graph: Graph, final: Final, copies: range = range(0)) -> str | None:
    """Name of the first op between this point and the optimizer's step that reads the parameter or its gradient; else None.
    Ops at the points `copies`, which copy reduced gradients back, do not count. Gathering reads a sharded parameter.
    """
    tensors = {final.parameter, final.gradient}
    for op in graph.ops:
        after = op.at > final.point and op.at not in copies
        if after and op.phase == "backward" and not tensors.isdisjoint(op.inputs):
            return op.name
    windows = graph.tensors[final.weight].windows if final.weight != NEVER else ()
    return "all-gather" if any(first > final.point for first, _ in windows) else None


def outdating(graph: Graph, updated: Mapping[int, int]) -> frozenset[int]:
    """Ids of forward ops that a rebuild may run after their inputs were updated. `updated`: tensor -> point of its update."""
    last_need = {t: max((p for s in saves for p in s.unpacked_at), default=-1) for t, saves in graph.saves_of.items()}
    outdated = set()
    for op in reversed(graph.forward):
        last = max((last_need.get(t, -1) for t in op.outputs), default=-1)
        if any(updated.get(t, last) < last for t in op.inputs):
            outdated.add(op.id)
        elif op.recomputable:
            for t in op.inputs:
                last_need[t] = max(last_need.get(t, -1), last)
    return frozenset(outdated)


def kept(graph: Graph, finals: Iterable[Final]) -> Graph:
    """The graph of steps that update at these points: no op is recomputable that would read an updated parameter (D5)."""
    updated: dict[int, int] = {}
    for f in finals:
        updated[f.parameter] = min(f.point, updated.get(f.parameter, f.point))
    fixed = outdating(graph, updated) if updated else frozenset()
    if not fixed:
        return graph
    ops = tuple(dataclasses.replace(op, recomputable=op.recomputable and op.id not in fixed) for op in graph.ops)
    return dataclasses.replace(graph, ops=ops)


def freed_early(graph: Graph, finals: Iterable[Final]) -> Graph:
    """The graph of the same step in which each gradient is freed as soon as it is final."""
    ends = {f.gradient: f.point for f in finals}
    tensors = tuple(
        dataclasses.replace(t, freed_at=min(t.freed_at, max(ends[t.storage], t.born_at))) if t.storage in ends else t
        for t in graph.tensors
    )
    return dataclasses.replace(graph, tensors=tensors)


def settled(graph: Graph, finals: Iterable[Final]) -> Graph:
    """The graph of a step without the gradients that the step before had left, because that one updated nothing early. Loops
    such as Lightning's free them in the middle of a step. Later steps do not begin with them.
    """
    finals = list(finals)
    if not finals:
        return graph
    names, own = {f"{f.name}.grad" for f in finals}, {f.gradient for f in finals}
    tensors = tuple(
        dataclasses.replace(t, nbytes=0)
        if t.kind == "gradient" and t.born_at == BEFORE and t.name in names and t.id not in own
        else t
        for t in graph.tensors
    )
    return dataclasses.replace(graph, tensors=tensors)


def with_updates(graph: Graph, finals: Iterable[Final]) -> Graph:
    """The graph of a step that updated at these points, with what becomes of each parameter where it is not updated early."""
    begins = {t.name: t for t in graph.tensors if t.kind == "gradient" and t.born_at == BEFORE and t.nbytes}
    accumulated = {t.storage for t in begins.values()}
    freed_at: dict[int, int] = {}
    for t in graph.tensors:
        freed_at[t.storage] = max(t.freed_at, freed_at.get(t.storage, BEFORE))
    end, last = len(graph.points), max([op.at for op in graph.ops if op.phase == "backward"], default=BEFORE)
    updates = []
    for f in finals:
        gradient = graph.tensors[f.gradient] if f.gradient != NEVER else None
        before = begins.get(f"{f.name}.grad")
        since, until = end, BEFORE
        if gradient is not None:
            # the rounds before free no gradient: what this one frees is in memory until the end of backward anyhow
            since = 1 + (last if gradient.storage in accumulated else freed_at[gradient.storage])
            until = before.freed_at if before is not None and before.storage != gradient.storage else BEFORE
        updates.append(
            EarlyUpdate(
                parameter=graph.tensors[f.parameter].storage,
                at=f.point,
                nbytes=0 if gradient is None or since >= end else gradient.nbytes,
                since=max(since, f.point + 1),
                until=until,
                beside_nbytes=_beside_nbytes(graph, f.point),
            )
        )
    return dataclasses.replace(graph, updates=tuple(sorted(updates, key=lambda update: update.at)))


def _beside_nbytes(graph: Graph, point: int) -> int:
    """Largest sum of bytes of temporary tensors of the update after a point."""
    ops = graph.ops_of(point)
    if not ops:
        return 0
    first = ops[0].at
    levels = Levels(len(ops))
    for t in map(graph.tensors.__getitem__, graph.temporaries_of(point)):
        levels.add(t.born_at - first, t.freed_at - first, t.nbytes)
    return max(level + op.workspace_nbytes for level, op in zip(levels.levels(), ops, strict=True))
