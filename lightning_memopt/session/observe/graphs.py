"""Make the graph that is planned for from the graphs of the observed steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import BEFORE, Graph, Tensor, fingerprint, first_difference
from lightning_memopt.session import times

MADE = "made by update"
"""The name of the optimizer's state that the update of a step makes, where it is counted from the begin of the step."""


def pieces(nbytes: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """`nbytes` in blocks of these sizes, as far as they go; the rest is one block."""
    found = []
    for size in sizes:
        found.append(min(size, nbytes))
        nbytes -= found[-1]
    return tuple(n for n in (*found, nbytes) if n)


def requests_for(device: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The requests that stand for tensors of these sizes in a graph: one for all where only their sum counts. An allocator
    with segments serves many small requests from memory that one large request cannot use.
    """
    return pieces(sum(sizes), sizes if kind_of(device).has_segments else ())


def with_state(graph: Graph, sizes: Sequence[int], away: Sequence[int] = ()) -> Graph:
    """The graph of the steps that come: they begin with optimizer state of these sizes, which the updates of this step make.
    `away`: of state that has left for a tier after it was made, and that the graph has on the device nevertheless.
    """
    if not sum(sizes) and not sum(away):
        return graph
    updates, last = graph.runs_of_updates, len(graph.points) - 1
    remaining = Counter(sizes)
    made: set[int] = set()  # storages
    for t in graph.tensors:
        is_left = t.freed_at == last and any(ops[0].at <= t.born_at <= ops[-1].at for ops in updates)
        if is_left and remaining[t.nbytes] > 0:
            remaining[t.nbytes] -= 1
            made.add(t.storage)
    tensors = [dataclasses.replace(t, nbytes=0) if t.storage in made else t for t in graph.tensors]
    # what they make in pieces of other sizes is counted until then
    rest, until = tuple((+remaining).elements()), updates[-1][0].at - 1 if updates else last
    for parts, freed_at in ((Counter(sizes) - Counter(rest)).elements(), last), (rest, until), (away, last):
        for nbytes in requests_for(graph.device, tuple(parts)):
            id = len(tensors)
            tensors.append(
                Tensor(id=id, name=MADE, nbytes=nbytes, kind="optimizer_state", storage=id, born_at=BEFORE, freed_at=freed_at)
            )
    return dataclasses.replace(graph, tensors=tuple(tensors))


def common(graphs: list[Graph]) -> list[Graph]:
    """The graphs of the forward that a plan is made for: the forward with the most saves, and of several the shortest. Empty
    where the forward of another graph is neither a part of it nor contains it.

    Steps may differ by layers that are left out at random. The plan is made for all layers, because a planned step passes over
    ops that do not run. Steps may also differ by ops that save nothing (a metric every few steps). The plan is made without
    them, because a planned step passes over unknown ops, too. Tensors beyond the plan are kept. Steps that differ only by sizes
    have the same forward: sizes may depend on data.
    """
    chosen = _chosen(graphs)
    if not all(_within(g, chosen) or _within(chosen, g) for g in graphs):
        return []
    same = fingerprint(chosen, range(len(chosen.tensors)))
    return [g for g in graphs if fingerprint(g, range(len(g.tensors))) == same]


def difference(graphs: list[Graph]) -> str:
    """Why these graphs are not steps of one forward (see `common`): the first op in which two of them differ."""
    chosen = _chosen(graphs)
    other = next(g for g in graphs if not _within(g, chosen) and not _within(chosen, g))
    return str(first_difference(chosen, other))


def _chosen(graphs: list[Graph]) -> Graph:
    return max(graphs, key=lambda g: (len(g.saves), -len(g.forward)))


def _within(part: Graph, whole: Graph) -> bool:
    """Whether the ops of one forward are those of the other, with some left out."""
    names = iter(op.name for op in whole.forward)
    return all(op.name in names for op in part.forward)


def repeatable(graphs: list[Graph]) -> Graph:
    """The last graph. A forward op is recomputable in it only if it was so in all observed steps."""
    graph = graphs[-1]
    recomputable = [all(ops) for ops in zip(*([op.recomputable for op in g.forward] for g in graphs), strict=True)]
    ops = [dataclasses.replace(op, recomputable=in_all) for op, in_all in zip(graph.forward, recomputable, strict=True)]
    return dataclasses.replace(graph, ops=(*ops, *graph.ops[len(ops) :]))


def roomy(graphs: list[Graph]) -> Graph:
    """The last graph with room for sizes that depend on data. A result gets its largest size over the observed steps or, if
    that is more, its smallest size plus the largest change of a similar result: experts take turns, so any of them may grow
    by as much as another did.

    Similar: made by an op of the same name and phase, of the same dtype, and of the same size in the dimensions that stay.
    """
    graph = repeatable(graphs)
    steps = [[op for op in g.ops if op.phase != "update"] for g in graphs]
    shapes = [[(op.name, len(op.outputs)) for op in ops] for ops in steps]
    same = [(g, ops) for g, ops, shape in zip(graphs, steps, shapes, strict=True) if shape == shapes[-1]]
    varying: dict[int, tuple[int, int, tuple[Any, ...]]] = {}
    change: dict[tuple[Any, ...], int] = {}
    workspaces: dict[int, int] = {}
    for alike in zip(*(ops for _, ops in same), strict=True):
        last_op = alike[-1]
        workspaces[last_op.id] = max(op.workspace_nbytes for op in alike)
        for outputs in zip(*(op.outputs for op in alike), strict=True):
            seen = [g.tensors[t] for (g, _), t in zip(same, outputs, strict=True)]
            least, most = min(t.nbytes for t in seen), max(t.nbytes for t in seen)
            if least == most:
                continue
            key = (last_op.name, last_op.phase, seen[-1].dtype, *_constant([t.size for t in seen]))
            varying[outputs[-1]] = least, most, key
            change[key] = max(change.get(key, 0), most - least)
    nbytes = {t: max(most, least + change[key]) for t, (least, most, key) in varying.items()}
    tensors = tuple(dataclasses.replace(t, nbytes=nbytes.get(t.id, t.nbytes)) for t in graph.tensors)
    ops = [dataclasses.replace(op, workspace_nbytes=workspaces.get(op.id, op.workspace_nbytes)) for op in graph.ops]
    return dataclasses.replace(graph, tensors=tensors, ops=tuple(ops))


def _constant(sizes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The size, with -1 for each dimension that changes or that not all of the sizes have."""
    return tuple(ns[0] if len(set(ns)) == 1 else -1 for ns in zip_longest(*sizes, fillvalue=-1))


def smoothed(graphs: list[Graph]) -> Graph:
    """The last graph, with room for all observed steps (`roomy`) and with the seconds that plans are chosen by (times.py)."""
    graph = roomy(graphs)
    seconds = times.current.of_ops(graph, graphs)
    ops = tuple(dataclasses.replace(op, seconds=took) for op, took in zip(graph.ops, seconds, strict=True))
    return dataclasses.replace(graph, ops=ops, step_seconds=sum(seconds))
