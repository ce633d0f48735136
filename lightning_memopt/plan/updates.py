"""Which parameters a planned step updates in backward, how this changes the bytes of the step, and how few early updates fit a
budget.

The graph is the one of the step in which every parameter that may be updated early is (`Graph.updates`). A plan names the ones
that it does update early (`Plan.updates`). The gradients of the others stay until the update after backward, which also needs
bytes of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush

from lightning_memopt.graph import BEFORE, Copy, EarlyUpdate, Graph, Tensor
from lightning_memopt.graph.model import Kind
from lightning_memopt.plan.model import Plan


def early(graph: Graph) -> tuple[int, ...]:
    """All parameters that may be updated early."""
    return tuple(update.parameter for update in graph.updates)


def names_of(graph: Graph, updates: Iterable[int]) -> frozenset[str]:
    """The names of these parameters."""
    return frozenset(graph.tensors[parameter].name for parameter in updates)


def step_of(graph: Graph, plan: Plan) -> Graph:
    """The step that results from a plan of this graph; its lives refer to it."""
    return updated(graph, plan.updates)


@lru_cache(maxsize=8)
def updated(graph: Graph, updates: tuple[int, ...]) -> Graph:
    """The step in which only these parameters are updated early. Points and ids are those of `graph`."""
    usual = [update for update in graph.updates if update.parameter not in set(updates)]
    if not usual:
        return graph
    tensors, ops, last = list(graph.tensors), list(graph.ops), len(graph.points) - 1
    for update in usual:  # what an early update of it would take
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
    copies = _copies(graph.copies, {update.parameter for update in usual})
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors), updates=(), usual_nbytes=0, copies=copies)


def _copies(copies: Sequence[Copy], late: Collection[int]) -> tuple[Copy, ...]:
    """These copies, without those of the state of parameters that are updated late; the step waits for a copy that would run
    until or from the early update of such a parameter.
    """

    def alone(copy: Copy) -> Copy:
        if copy.neighbour not in late:
            return copy
        return replace(copy, after=copy.before - 1) if copy.lane == "in" else replace(copy, before=copy.after + 1)

    return tuple(alone(copy) for copy in copies if copy.what != "state" or copy.tensor not in late)


def beside_nbytes(graph: Graph, usual: Iterable[EarlyUpdate]) -> int:
    """The most bytes that the update after backward takes in addition to these parameters, their gradients and state. (An
    optimizer may update one parameter after the other, or all at once.)
    """
    return min(graph.usual_nbytes, sum(update.beside_nbytes for update in usual))


def fewest(graph: Graph, levels: Sequence[int], limit_nbytes: int) -> tuple[int, ...]:
    """The fewest early updates with which a step fits into `limit_nbytes`. `levels`: its bytes at every point if all updates
    are early.

    The number is minimal if an update needs memory in proportion to its gradient, as it does in all optimizers of torch that
    may update early. With other optimizers, fewer might do.
    """
    at_end = limit_nbytes - levels[-1]
    beside = max((update.beside_nbytes / update.nbytes for update in graph.updates if update.nbytes), default=0.0)
    # if any update may be late, an update that frees nothing is
    always = sum(update.beside_nbytes for update in graph.updates if not update.nbytes)
    usual = _fitting(graph, levels, limit_nbytes, max(at_end - graph.usual_nbytes, int((at_end - always) / (1 + beside))))
    return tuple(update.parameter for update in graph.updates if update.parameter not in usual)


def at_least(graph: Graph, levels: Sequence[int], limit_nbytes: int) -> int:
    """A lower bound on the number of early updates in any plan within `limit_nbytes`. `levels`: the bytes at every point that
    no plan changes.
    """
    return len(graph.updates) - len(_fitting(graph, levels, limit_nbytes, limit_nbytes - levels[-1]))


def _fitting(graph: Graph, levels: Sequence[int], limit_nbytes: int, most_nbytes: int) -> set[int]:
    """As many parameters as possible whose gradients, together at most `most_nbytes`, may stay to the end.

    At each point, the gradients that became final before it must fit into the memory that is left at this point and at all
    later ones. This is the problem of scheduling jobs with deadlines so that as few as possible are late: take the jobs in
    order, and whenever they do not fit, leave out the largest one taken so far (Moore 1968).
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
