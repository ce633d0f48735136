"""How a step changes whose optimizer state is parked in a tier between updates, and whose gradients are from backward on.

Such state is not in memory when the step begins. That of a parameter which is updated early is there during this update. The
update after backward has state and gradients a chunk of parameters at a time, and takes what it takes for each chunk alone.

Copies may also run *beside backward*. Then a gradient leaves while the next one is computed. The state of an early update comes
while its gradient is computed, and leaves while the next one is. So two gradients, or the state of two parameters, are on the
device at once, and the step waits only for what takes longer than this computing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from lightning_memopt.graph import BEFORE, UNRECORDED, Copy, Graph, Op, Tensor
from lightning_memopt.plan.model import Read, StateParking

PARKED_STATE = "parked state"
"""The name of tensors that stand for what an update has on the device of all that is parked."""
_SMALL = 32
"""What has less than this part of the average size does not run beside backward: its copies take no time."""


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

    @property
    def out_seconds(self) -> float:
        """How long the copies out take."""
        return self.parking.copy_seconds - self.back_seconds

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

    def without(self, parameters: Container[str]) -> Chunk:
        """Without these parameters, which are updated early."""
        left = tuple(name for name in self.parameters if name not in parameters)
        return replace(self, parameters=left, beside_nbytes=self.beside_nbytes if left else 0)


Chunks = Sequence[Sequence[Chunk]]
"""The chunks of each optimizer, in the order of its step."""


def may_be_parked(graph: Graph, states: Sequence[StateOf]) -> list[StateOf]:
    """Those of these that this step may park: no gradient of a parameter that it may update early, or whose gradient has no
    memory of its own.
    """
    early = {graph.tensors[update.parameter].name for update in graph.updates}
    gradients = graph.gradients.keys() - early
    return [state for state in states if state.parking.what == "state" or state.parking.parameter in gradients]


def priced(graph: Graph, states: Sequence[StateOf], chunks: Chunks, beside_backward: bool = False) -> list[StateOf]:
    """These states, with the seconds for which a step waits for them if it waits for all of each copy in backward. In the
    update after backward, what comes ahead comes while the chunk before it goes. `beside_backward`: copies run beside backward;
    how much of them that hides is in `plan.resting`.
    """
    late = {state.parking.parameter: state for state in states if state.parking.what == "state"}
    for update in graph.updates:
        late.pop(graph.tensors[update.parameter].name, None)
    hidden = dict.fromkeys(late, 0.0)
    for own in chunks:
        going = 0.0
        for chunk in own:
            usual = [late[name] for name in chunk.parameters if name in late]
            coming = sum(state.back_seconds for state in usual)
            share = min(1.0, going / coming) if chunk.comes_ahead and coming else 0.0
            for state in usual:
                hidden[state.parking.parameter] += share * state.back_seconds
            going = sum(state.out_seconds for state in usual)
    neighbours = _neighbours(_moments(graph, states), chunks) if beside_backward else {}

    def waiting(state: StateOf) -> StateOf:
        parking = state.parking
        comes_ahead = hidden.get(parking.parameter, 0.0) if parking.what == "state" else 0.0
        seconds = parking.copy_seconds - min(comes_ahead, state.back_seconds)
        before, after = neighbours.get((parking.parameter, parking.what), ("", ""))
        return replace(state, parking=replace(parking, seconds=seconds, comes_after=before, leaves_before=after))

    return [waiting(state) for state in states]


Key = tuple[str, Read]
"""A parameter, and what is parked of it."""


def _moments(graph: Graph, states: Sequence[StateOf]) -> dict[Key, int]:
    """For what moves in backward, the point at which it does, points rising: that of an early update for state, that at which
    autograd has accumulated it for a gradient. The smallest ones, biases and norms, are left out: between them and the others
    nothing is computed.
    """
    early = {graph.tensors[update.parameter].name: update for update in graph.updates}
    moments: dict[Key, int] = {}
    small = sum(state.parking.nbytes for state in states) / max(1, len(states)) / _SMALL
    for state in states:
        name = state.parking.parameter
        if state.parking.nbytes < small:
            continue
        if state.parking.what == "gradient":
            moments[name, "gradient"] = graph.gradients[name][1]
        elif name in early and (ops := graph.ops_of(early[name].at)):
            moments[name, "state"] = ops[0].at
    return dict(sorted(moments.items(), key=lambda moment: moment[1]))


def _neighbours(moments: Mapping[Key, int], chunks: Chunks) -> dict[Key, tuple[str, str]]:
    """The parameters before and after each of these whose copies take turns with its own, of the same optimizer; "" where there
    is none. A gradient comes back in the update, so nothing is before it.
    """
    optimizer_of = {name: i for i, own in enumerate(chunks) for chunk in own for name in chunk.parameters}
    chains = defaultdict[tuple[Read, int | None], list[str]](list)
    for name, what in moments:
        chains[what, optimizer_of.get(name)].append(name)
    neighbours: dict[Key, tuple[str, str]] = {}
    for (what, _), names in chains.items():
        before = ["", *names] if what == "state" else [""] * len(names)
        for name, previous, following in zip(names, before, [*names[1:], ""], strict=False):
            neighbours[name, what] = previous, following
    return neighbours


def in_plan(states: Sequence[StateParking], early: Collection[str]) -> tuple[StateParking, ...]:
    """These states in a plan that updates only some parameters early, of these names: the copies of state run beside backward
    only where its neighbour is updated early, too.
    """

    def with_neighbours(state: StateParking) -> StateParking:
        if state.what != "state":
            return state
        has = state.parameter in early
        before = state.comes_after if has and state.comes_after in early else ""
        after = state.leaves_before if has and state.leaves_before in early else ""
        return replace(state, comes_after=before, leaves_before=after)

    return tuple(map(with_neighbours, states))


def copies_of(graph: Graph, states: Sequence[StateOf]) -> Iterator[Copy]:
    """The copies of these states in backward."""
    updates = {graph.tensors[update.parameter].name: update for update in graph.updates}
    ops_of = {name: graph.ops_of(update.at) for name, update in updates.items()}
    for state in states:
        name = state.parking.parameter
        before = state.parking.comes_after
        after = state.parking.leaves_before
        if state.parking.what == "gradient":
            gradient, point = graph.gradients[name]
            until = graph.gradients[after][1] if after else point + 1
            yield Copy(what="gradient", tensor=gradient, lane="out", after=point, before=until, seconds=state.out_seconds)
        elif ops := ops_of.get(name):
            first, last, parameter = ops[0].at, ops[-1].at, updates[name].parameter
            since = ops_of[before][0].at if before else first
            neighbour = updates[before].parameter if before else -1
            back, out = state.back_seconds, state.out_seconds
            own = partial(Copy, what="state", tensor=parameter)
            yield own(lane="in", after=since - 1, before=first, seconds=back, neighbour=neighbour)
            until = ops_of[after][0].at if after else last + 1
            neighbour = updates[after].parameter if after else -1
            yield own(lane="out", after=last, before=until, seconds=out, neighbour=neighbour)


def parked(graph: Graph, states: Sequence[StateOf], chunks: Chunks, trained: Mapping[str, int] = MappingProxyType({})) -> Graph:
    """The step of this graph with these states and gradients in a tier. `chunks`: those of the update after backward.
    `trained`: parameters that are parked themselves -> their bytes. Points and ids are those of `graph`.
    """
    tensors = list(graph.tensors)
    ops = list(graph.ops)
    last = len(graph.points) - 1
    between = [state for state in states if state.parking.what == "state"]
    for id, nbytes in _taken(graph, Counter(size for state in between for size in state.sizes)).items():
        tensors[id] = replace(tensors[id], nbytes=tensors[id].nbytes - nbytes)
    _part_with_gradients(tensors, graph, [state.parking for state in states if state.parking.what == "gradient"])
    sizes_of, coming_of = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for state in states:
        sizes_of[state.parking.parameter] += state.sizes
        if state.parking.what == "state":
            coming_of[state.parking.parameter] += state.sizes

    def at_once(chunk: Chunk, following: Chunk | None, there: Container[str]) -> list[int]:
        """Sizes of what comes to the device while a chunk is updated. `there`: parameters that are on it anyway."""
        coming = following.parameters if following is not None and following.comes_ahead else ()
        here = [size for name in chunk.parameters for size in sizes_of[name]]
        here += [trained[name] for name in chunk.parameters if name in trained and name not in there]
        return [
            *here,
            *(size for name in coming for size in coming_of[name]),
            *[chunk.beside_nbytes] * bool(chunk.beside_nbytes),
        ]

    pairs = [pair for own in chunks for pair in zip(own, [*own[1:], None], strict=True)]

    def largest(there: Container[str] = ()) -> list[int]:
        return max((at_once(*pair, there) for pair in pairs), key=sum, default=[])

    at_end = largest()

    def add(nbytes: int, freed_at: int, born_at: int = BEFORE, op: Op | None = None) -> None:
        """State is on the device from this point on. `op`: the first one of the update without which it is not."""
        id = len(tensors)
        tensors.append(
            Tensor(id=id, name=PARKED_STATE, nbytes=nbytes, kind="temporary", storage=id, born_at=born_at, freed_at=freed_at)
        )
        if op is not None:
            ops[op.id] = replace(ops[op.id], outputs=(*ops[op.id].outputs, id))

    ops_of_update = {graph.tensors[update.parameter].name: graph.ops_of(update.at) for update in graph.updates}
    parking_of = {state.parking.parameter: state.parking for state in between}
    updates = []
    for update in graph.updates:
        name = graph.tensors[update.parameter].name
        sizes, update_ops = sizes_of[name], ops_of_update[name]
        if sizes and update_ops:
            before, after = parking_of[name].comes_after, parking_of[name].leaves_before
            born_at = ops_of_update[before][0].at if before else update_ops[0].at
            freed_at = ops_of_update[after][0].at - 1 if after else update_ops[-1].at
            # also in a plan that does not update its neighbours early: then it takes less than this
            for nbytes in sizes:
                add(nbytes, freed_at, born_at, None if before or after else update_ops[0])
        late_nbytes = sum(sizes) + trained.get(name, 0)  # what a chunk has if it is updated late
        updates.append(replace(update, beside_nbytes=update.beside_nbytes + late_nbytes))
    early = {op.id for update in graph.updates for op in graph.ops_of(update.at)}
    usual = [run for run in graph.runs_of_updates if run[-1].id not in early]
    unrecorded = [t for t in graph.tensors if t.name == UNRECORDED]
    for run in usual:  # any of them may update the largest chunk
        # where one writes a weight, what a loss head in tiles made of it gets its bytes: that is not work of the update
        others = {t.born_at for t in unrecorded if t.freed_at > run[-1].at}
        for op in run:
            for t in op.outputs:
                if graph.tensors[t].kind == "temporary":
                    tensors[t] = replace(tensors[t], nbytes=0)
            if op.at not in others:
                ops[op.id] = replace(op, workspace_nbytes=0)
        for nbytes in largest(_there(graph, trained, run)):
            add(nbytes, run[-1].at, run[0].at, run[0])
    if not usual and not graph.updates:  # no early update has run yet: each will run where its gradient is accumulated
        for name, sizes in coming_of.items():
            if name in graph.gradients:
                _, point = graph.gradients[name]
                for nbytes in sizes:
                    add(nbytes, point, point)
        for nbytes in at_end:  # and others after backward
            add(nbytes, last, last)
    usual_nbytes = sum(at_end) if graph.updates else 0
    return replace(
        graph,
        tensors=tuple(tensors),
        ops=tuple(ops),
        updates=tuple(updates),
        usual_nbytes=usual_nbytes,
        copies=(*graph.copies, *copies_of(graph, states)),
    )


def _there(graph: Graph, names: Container[str], run: Sequence[Op]) -> set[str]:
    """Parameters of these names that are on the device from the first of these ops to the last, as in a hook of backward."""
    own = [t for t in graph.tensors if t.kind == "parameter" and t.name in names and t.nbytes]
    first, last = ({t.name for t in own if t.there(op.at)} for op in (run[0], run[-1]))
    return first & last


def _part_with_gradients(tensors: list[Tensor], graph: Graph, gradients: Sequence[StateParking]) -> None:
    """These gradients leave as soon as autograd has accumulated them for the first time, or the next one. Those which the step
    before has left are not there either.
    """
    until: dict[int, int] = {}
    for gradient in gradients:
        made, _ = graph.gradients[gradient.parameter]
        until[graph.tensors[made].storage] = graph.gradients[gradient.leaves_before or gradient.parameter][1]
    left = {f"{gradient.parameter}.grad" for gradient in gradients}
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
