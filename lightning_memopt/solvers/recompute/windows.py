"""Find the tensors that every plan must hold because the weights needed to rebuild them are not in memory.

A weight that is sharded over several processes is in memory only while its unit of layers runs: in its windows. A rebuild at an
unpack may run only ops whose weights are in memory there. So the unpacks are grouped into *places*; within a place, the same
weights are away. The tensors that a place takes from ops that cannot run there form its *boundary*. A boundary is a cut of the
graph, and the one with the fewest bytes is a minimum cut (`mincut.py`). A tensor at the boundary of several places is held
once. The cut decides on which side of a boundary ops are that read no such weights.

`held_at_boundaries` marks the ops that make the tensors of boundaries as not recomputable. All solvers then hold these tensors,
and every other choice they make is legal, because each rebuild stops at the boundary of its place. Checkpointing each unit
holds the inputs of the units. They are such boundaries, too, so it never holds fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_memopt.graph import Graph
from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild


def places(graph: Graph) -> dict[frozenset[int], list[int]]:
    """The windowed tensors that are away -> the tensors that autograd asks for meanwhile, in the order of the unpacks."""
    unpacks = sorted((p, s.tensor) for s in graph.saves if s.tensor in graph.producers for p in s.unpacked_at)
    windowed = sorted(graph.windowed)
    by_windows: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for t in windowed:
        by_windows.setdefault(graph.tensors[t].windows, []).append(t)
    asked_while: dict[frozenset[int], list[int]] = {}
    for point, tensor in unpacks:
        away = (ts for windows, ts in by_windows.items() if not any(first <= point <= last for first, last in windows))
        asked_while.setdefault(frozenset(t for ts in away for t in ts), []).append(tensor)
    return asked_while


def unit_calls(graph: Graph) -> list[list[int]]:
    """For every call of a unit that frees its gathered weights afterwards: the forward ops within the window of its weights. If
    windows overlap, an op belongs to the one that ends first, which is that of the innermost unit, or of the unit before a
    prefetched one.
    """
    windows = {w for t in graph.windowed for w in graph.tensors[t].windows if w[1] < graph.backward_begins}
    calls: dict[tuple[int, int], list[int]] = {}
    for op in graph.forward:
        around = [w for w in windows if w[0] <= op.at <= w[1]]
        if around:
            calls.setdefault(min(around, key=lambda w: (w[1], -w[0])), []).append(op.id)
    return list(calls.values())


def without(graph: Graph, away: frozenset[int]) -> Graph:
    """The graph in which ops that read one of these tensors may not run again."""
    return _kept(graph, {op.id for op in graph.ops if not away.isdisjoint(op.inputs)})


def _kept(graph: Graph, stuck: set[int]) -> Graph:
    """The graph in which these ops may not run again."""
    ops = (replace(op, recomputable=False) if op.recomputable and op.id in stuck else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def held_at_boundaries(graph: Graph) -> Graph:
    """The graph in which ops that make the tensors of boundaries may not run again. Without windows, it is the graph itself."""
    if not graph.windowed:
        return graph
    held: set[int] = set()
    stuck: set[int] = set()
    for away, wanted in places(graph).items():
        problem = HoldOrRebuild(without(graph, away), wanted, held)
        try:
            held |= problem.minimum_cut(1e3 * max(problem.total_seconds, 1e-9)).held
        except ValueError:  # an overwritten tensor would be rebuilt from weights that are away: hold what the rebuild makes
            stuck.update(o for o in problem.ops if not away.isdisjoint(graph.ops[o].inputs))
    stuck.update(graph.rebuilders[t].id for t in held if t in graph.rebuilders)
    return _kept(graph, stuck)
