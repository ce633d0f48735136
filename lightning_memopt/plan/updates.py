"""Which parameters a planned step updates in backward: what that means for the bytes of the step, and the fewest for a budget.

The graph is that of the step in which all parameters are updated early that may be (`Graph.updates`). A plan names those that
are (`Plan.updates`). The gradients of the others stay until the update after backward, which also needs bytes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush

from lightning_memopt.graph import BEFORE, EarlyUpdate, Graph, Tensor
from lightning_memopt.graph.model import Kind
from lightning_memopt.plan.model import Plan


def early(graph: Graph) -> tuple[int, ...]:
    """All parameters that may be updated early."""
    return tuple(update.parameter for update in graph.updates)


def names_of(graph: Graph, updates: Iterable[int]) -> frozenset[str]:
    """The names of these parameters."""
    return frozenset(graph.tensors[parameter].name for parameter in updates)


def step_of(graph: Graph, plan: Plan) -> Graph:
    """The step that a plan of this graph leads to, for its lives."""
    return updated(graph, plan.updates)


@lru_cache(maxsize=8)
def updated(graph: Graph, updates: tuple[int, ...]) -> Graph:
    """The step in which only these parameters are updated early. Points and ids are those of `graph`."""
    usual = [update for update in graph.updates if update.parameter not in set(updates)]
    if not usual:
        return graph
    tensors, ops, last = list(graph.tensors), list(graph.ops), len(graph.points) - 1
    for update in usual:  # what its early update would take
        for t in graph.temporaries_of(update.at):
            tensors[t] = replace(tensors[t], nbytes=0)
        for op in graph.ops_of(update.at):
            ops[op.id] = replace(op, workspace_nbytes=0)

    def add(name: str, kind: Kind, nbytes: int, born_at: int, freed_at: int) -> None:
        id = len(tensors)
        if nbytes and freed_at >= max(born_at, 0):
            tensors.append(Tensor(id=id, name=name, nbytes=nbytes, kind=kind, storage=id, born_at=born_at, freed_at=freed_at))

    for update in usual:
        name = f"{graph.tensors[update.parameter].name}.grad"
        add(name, "gradient", update.nbytes, update.since, last)
        add(name, "gradient", update.nbytes, BEFORE, update.until)
    add("in update", "temporary", beside_nbytes(graph, usual), last, last)
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors), updates=(), usual_nbytes=0)


def beside_nbytes(graph: Graph, usual: Iterable[EarlyUpdate]) -> int:
    """Bytes that the update after backward takes beside these parameters, their gradients and state, at most: an optimizer
    updates one after the other, or all at once.
    """
    return min(graph.usual_nbytes, sum(update.beside_nbytes for update in usual))


def fewest(graph: Graph, levels: Sequence[int], limit_nbytes: int) -> tuple[int, ...]:
    """The fewest early updates for which a step fits into `limit_nbytes`. `levels`: its bytes at every point if all are.

    It is the fewest where what an update takes beside its gradient is in proportion to it, as in all optimizers of torch that
    may update early; else at most so many.
    """
    at_end = limit_nbytes - levels[-1]
    beside = max((update.beside_nbytes / update.nbytes for update in graph.updates if update.nbytes), default=0.0)
    # an update that frees nothing is never early where others may be late
    always = sum(update.beside_nbytes for update in graph.updates if not update.nbytes)
    usual = _fitting(graph, levels, limit_nbytes, max(at_end - graph.usual_nbytes, int((at_end - always) / (1 + beside))))
    return tuple(update.parameter for update in graph.updates if update.parameter not in usual)


def at_least(graph: Graph, levels: Sequence[int], limit_nbytes: int) -> int:
    """A lower bound of the number of early updates of all plans within `limit_nbytes`. `levels`: bytes that no plan changes."""
    return len(graph.updates) - len(_fitting(graph, levels, limit_nbytes, limit_nbytes - levels[-1]))


def _fitting(graph: Graph, levels: Sequence[int], limit_nbytes: int, most_nbytes: int) -> set[int]:
    """As many parameters as possible whose gradients, `most_nbytes` at most in all, may stay to the end.

    At each point, the gradients that are final before it must fit into what is left there and at all later points. These are
    jobs with deadlines, of which as few as possible are to be late: they are taken in their order, and whenever they do not
    fit, the largest one taken so far is left out (Moore 1968).
    """
    room = [limit_nbytes - level for level in levels]
    until = max((update.until for update in graph.updates), default=BEFORE)
    most_nbytes = min([most_nbytes, *room[: until + 1]])
    for i in range(len(room) - 2, -1, -1):
        room[i] = min(room[i], room[i + 1])
    stays: list[tuple[int, int]] = []
    total = 0
    for update in sorted(graph.updates, key=lambda update: update.since):
        heappush(stays, (-update.nbytes, update.parameter))
        total += update.nbytes
        fitting = min([most_nbytes, *room[update.since : update.since + 1]])
        while stays and total > fitting:
            total += heappop(stays)[0]
    return {parameter for _, parameter in stays}
