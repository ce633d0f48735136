"""How a step changes whose optimizer state is parked in a tier between updates, and whose gradients are from backward on.

Such state is not in memory when the step begins. That of a parameter which is updated early is there during this update. The
update after backward has state and gradients a chunk of parameters at a time, and takes what it takes for each chunk alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_memopt.graph import BEFORE, Graph, Op, Tensor
from lightning_memopt.plan.model import StateParking

PARKED_STATE = "parked state"
"""The name of tensors that stand for what an update has on the device of all that is parked."""


@dataclass(frozen=True)
class StateOf:
    """The optimizer state of one parameter, or its gradient.

    parking: what is parked of it, and what that costs.
    sizes: bytes of each tensor that is parked, as the device's allocator gives them.
    back_seconds: how long the copies back take.
    """

    parking: StateParking
    sizes: tuple[int, ...]
    back_seconds: float = 0.0

    def and_of(self, other: StateOf) -> StateOf:
        """This state and that which another optimizer has of the same parameter."""
        one, two = self.parking, other.parking
        copy_seconds = one.copy_seconds + two.copy_seconds
        nbytes, tier_nbytes = one.nbytes + two.nbytes, one.tier_nbytes + two.tier_nbytes
        seconds = one.seconds + two.seconds
        parking = replace(one, nbytes=nbytes, tier_nbytes=tier_nbytes, copy_seconds=copy_seconds, seconds=seconds)
        return StateOf(parking, self.sizes + other.sizes, self.back_seconds + other.back_seconds)


@dataclass(frozen=True)
class Chunk:
    """Parameters that the update after backward updates together.

    parameters: the names of those whose state or gradient is parked.
    beside_nbytes: bytes that their update takes in addition to weights, gradients and state.
    comes_ahead: their state is copied back while the chunk before is updated.
    """

    parameters: tuple[str, ...]
    beside_nbytes: int
    comes_ahead: bool


Chunks = Sequence[Sequence[Chunk]]
"""The chunks of each optimizer, in the order of its step."""


def may_be_parked(graph: Graph, states: Sequence[StateOf]) -> list[StateOf]:
    """Those of these that this step may park: no gradient of a parameter that it may update early, or whose gradient has no
    memory of its own.
    """
    early = {graph.tensors[update.parameter].name for update in graph.updates}
    gradients = graph.gradients.keys() - early
    return [state for state in states if state.parking.what == "state" or state.parking.parameter in gradients]


def priced(graph: Graph, states: Sequence[StateOf], chunks: Chunks) -> list[StateOf]:
    """These states, with the seconds for which a step waits for them: what comes ahead comes while the chunk before it goes. An
    early update waits for all of its copies, and so does a step for those of gradients.
    """
    of_name = {state.parking.parameter: state for state in states if state.parking.what == "state"}
    early = {graph.tensors[update.parameter].name for update in graph.updates}
    hidden = dict.fromkeys(of_name, 0.0)
    for own in chunks:
        going = 0.0
        for chunk in own:
            usual = [of_name[name] for name in chunk.parameters if name in of_name and name not in early]
            coming = sum(state.back_seconds for state in usual)
            share = min(1.0, going / coming) if chunk.comes_ahead and coming else 0.0
            for state in usual:
                hidden[state.parking.parameter] += share * state.back_seconds
            going = sum(state.parking.copy_seconds - state.back_seconds for state in usual)

    def waiting(state: StateOf) -> StateOf:
        if state.parking.what != "state":
            return state
        seconds = state.parking.copy_seconds - min(state.back_seconds, hidden[state.parking.parameter])
        return replace(state, parking=replace(state.parking, seconds=seconds))

    return [waiting(state) for state in states]


def parked(graph: Graph, states: Sequence[StateOf], chunks: Chunks) -> Graph:
    """The step of this graph with these states and gradients in a tier. `chunks`: those of the update after backward. Points
    and ids are those of `graph`.
    """
    tensors = list(graph.tensors)
    ops = list(graph.ops)
    last = len(graph.points) - 1
    between = [state for state in states if state.parking.what == "state"]
    for id, nbytes in _taken(graph, Counter(size for state in between for size in state.sizes)).items():
        tensors[id] = replace(tensors[id], nbytes=tensors[id].nbytes - nbytes)
    _part_with_gradients(tensors, graph, {s.parking.parameter for s in states if s.parking.what == "gradient"})
    nbytes_of = Counter[str]()
    for state in states:
        nbytes_of[state.parking.parameter] += sum(state.sizes)

    state_nbytes_of = {state.parking.parameter: sum(state.sizes) for state in between}

    def ahead_nbytes(chunk: Chunk | None) -> int:
        return 0 if chunk is None or not chunk.comes_ahead else sum(state_nbytes_of.get(name, 0) for name in chunk.parameters)

    at_end = max(
        (
            sum(nbytes_of[name] for name in chunk.parameters) + chunk.beside_nbytes + ahead_nbytes(then)
            for own in chunks
            for chunk, then in zip(own, [*own[1:], None], strict=True)
        ),
        default=0,
    )

    def add(nbytes: int, freed_at: int, op: Op | None = None) -> None:
        """State is on the device from this op of an update on; from the beginning of the step without one."""
        id, born_at = len(tensors), BEFORE if op is None else op.at
        tensors.append(
            Tensor(id=id, name=PARKED_STATE, nbytes=nbytes, kind="temporary", storage=id, born_at=born_at, freed_at=freed_at)
        )
        if op is not None:
            ops[op.id] = replace(ops[op.id], outputs=(*ops[op.id].outputs, id))

    updates = []
    for update in graph.updates:
        nbytes, update_ops = nbytes_of.get(graph.tensors[update.parameter].name, 0), graph.ops_of(update.at)
        if nbytes and update_ops:
            add(nbytes, update_ops[-1].at, update_ops[0])
        updates.append(replace(update, beside_nbytes=update.beside_nbytes + nbytes))
    early = {op.id for update in graph.updates for op in graph.ops_of(update.at)}
    usual = [run for run in graph.runs_of_updates if run[-1].id not in early]
    for run in usual:  # any of them may update the largest chunk
        for op in run:
            for t in op.outputs:
                if graph.tensors[t].kind == "temporary":
                    tensors[t] = replace(tensors[t], nbytes=0)
            ops[op.id] = replace(op, workspace_nbytes=0)
        add(at_end, run[-1].at, run[0])
    if not usual and not graph.updates:  # it is not known yet where they are
        add(at_end, last)
    return replace(
        graph, tensors=tuple(tensors), ops=tuple(ops), updates=tuple(updates), usual_nbytes=at_end if graph.updates else 0
    )


def _part_with_gradients(tensors: list[Tensor], graph: Graph, names: set[str]) -> None:
    """The gradients of these parameters leave as soon as autograd has accumulated them for the first time. Those which the step
    before has left are not there either.
    """
    until = {graph.tensors[t].storage: point for name, (t, point) in graph.gradients.items() if name in names}
    left = {f"{name}.grad" for name in names}
    for t in graph.tensors:
        if t.born_at == BEFORE and (t.storage in until or (t.kind == "gradient" and t.name in left)):
            tensors[t.id] = replace(t, nbytes=0)
        elif t.storage in until:
            tensors[t.id] = replace(t, freed_at=min(t.freed_at, max(until[t.storage], t.born_at)))


def _taken(graph: Graph, sizes: Counter[int]) -> dict[int, int]:
    """Tensor of optimizer state -> the bytes of it that tensors of these sizes are. Where the graph has them in blocks of other
    sizes, they are taken from the largest blocks.
    """
    taken: dict[int, int] = {}
    there = [t for t in graph.tensors if t.kind == "optimizer_state" and t.born_at == BEFORE and t.nbytes]
    for t in there:
        if sizes[t.nbytes] > 0:
            sizes[t.nbytes] -= 1
            taken[t.id] = t.nbytes
    left = sum(size * n for size, n in sizes.items())
    for t in sorted(there, key=lambda t: -t.nbytes):
        nbytes = min(left, t.nbytes - taken.get(t.id, 0))
        if nbytes:
            taken[t.id] = taken.get(t.id, 0) + nbytes
            left -= nbytes
    return taken
