"""Find the tensors that every plan holds because the weights that rebuild them are away.

A weight that is sharded over several processes is in memory only while its unit of layers runs: in windows. A rebuild at a
request of backward may run only ops whose weights are in memory there. So the requests fall into *places*, in each of which
the same weights are away. The tensors that a place takes from ops which cannot run there cross its *boundary*. They are a cut
of the graph, and the cut of fewest bytes is a minimum cut (`mincut.py`). A tensor at the boundary of several places is held
once. What is made at a boundary without weights that are away may be on either side: the cut decides.

`fenced` marks the ops that make the boundary as not recomputable. All solvers then hold these tensors, and whatever else they
choose is legal: every rebuild at a request stops at the boundary of its place. Checkpointing of each unit holds the units'
inputs, which are such cuts, too; so it never holds fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_memopt.graph import Graph
from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild


def places(graph: Graph) -> dict[frozenset[int], list[int]]:
    """The windowed tensors that are away -> the tensors that autograd asks for while they are, in the order of requests."""
    requests = sorted((p, s.tensor) for s in graph.saves if s.tensor in graph.producers for p in s.unpacked_at)
    windowed = sorted(graph.windowed)
    by_windows: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for t in windowed:
        by_windows.setdefault(graph.tensors[t].windows, []).append(t)
    asked_while: dict[frozenset[int], list[int]] = {}
    for point, tensor in requests:
        away = (ts for windows, ts in by_windows.items() if not any(first <= point <= last for first, last in windows))
        asked_while.setdefault(frozenset(t for ts in away for t in ts), []).append(tensor)
    return asked_while


def unit_calls(graph: Graph) -> list[list[int]]:
    """The forward ops of every call of a unit whose weights go after it: those within a window of its weights. Where windows
    overlap, an op belongs to the one that ends first: to the innermost unit, or to the one before a prefetched one.
    """
    windows = {w for t in graph.windowed for w in graph.tensors[t].windows if w[1] < graph.backward_begins}
    calls: dict[tuple[int, int], list[int]] = {}
    for op in graph.forward:
        around = [w for w in windows if w[0] <= op.at <= w[1]]
        if around:
            calls.setdefault(min(around, key=lambda w: (w[1], -w[0])), []).append(op.id)
    return list(calls.values())


def without(graph: Graph, away: frozenset[int]) -> Graph:
    """The graph in which no op runs again that reads one of these tensors."""
    ops = (replace(op, recomputable=op.recomputable and away.isdisjoint(op.inputs)) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def fenced(graph: Graph) -> Graph:
    """The graph in which the ops that make the boundaries of places do not run again; the graph itself without windows."""
    if not graph.windowed:
        return graph
    held: set[int] = set()
    stuck: set[int] = set()
    for away, wanted in places(graph).items():
        problem = HoldOrRebuild(without(graph, away), wanted, held)
        try:
            held |= problem.minimum_cut(1e3 * max(problem.total_seconds, 1e-9)).held
        except ValueError:  # a tensor that was overwritten is rebuilt from weights that are away: hold what its rebuild makes
            stuck.update(o for o in problem.ops if not away.isdisjoint(graph.ops[o].inputs))
    stuck.update(graph.rebuilders[t].id for t in held if t in graph.rebuilders)
    return replace(graph, ops=tuple(replace(op, recomputable=op.recomputable and op.id not in stuck) for op in graph.ops))
