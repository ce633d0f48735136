"""What a plan parks of what rests most of a step: optimizer state, gradients, weights; and for how long a step waits for
their copies. All of them, and those of saved tensors, share the link (`plan.clocks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_memopt.graph import Graph
from lightning_memopt.graph.model import Rest
from lightning_memopt.plan.clocks import stall_seconds, waits
from lightning_memopt.plan.lower import lower
from lightning_memopt.plan.model import Plan, StateParking, WeightParking
from lightning_memopt.plan.states import Chunks, StateOf, in_plan, parked, priced
from lightning_memopt.plan.updates import names_of, step_of
from lightning_memopt.plan.weights import UnitOf, in_turn, parked_weights

Key = tuple[Rest, int]
"""What is copied, and the id of its tensor (`Copy`)."""


@dataclass(frozen=True)
class Rests:
    """What is parked in a step: the optimizer state and the gradients of these parameters, and the weights of these modules.

    ahead: copies run while the step computes: those of a module's weights while the module before it does, those of gradients
        and of the state of early updates while backward goes on.
    """

    states: tuple[StateOf, ...] = ()
    units: tuple[UnitOf, ...] = ()
    ahead: bool = False

    def __len__(self) -> int:
        return len(self.states) + len(self.units)

    def only(self, each: Sequence[StateOf | UnitOf]) -> Rests:
        """Of these, what is in `each`."""
        states = tuple(e for e in each if isinstance(e, StateOf))
        return replace(self, states=states, units=tuple(e for e in each if isinstance(e, UnitOf)))

    @property
    def seconds(self) -> float:
        """For how long a step waits for the copies."""
        return sum(each.parking.seconds for each in self.by_price())

    @property
    def tier_nbytes(self) -> int:
        """Bytes that all of it takes in the tier."""
        return sum(each.parking.tier_nbytes for each in self.by_price())

    def within(self, nbytes: int | None) -> Rests:
        """Of these, the cheapest ones that take no more bytes of the tier. None: all."""
        if nbytes is None:
            return self
        kept: list[StateOf | UnitOf] = []
        for each in self.by_price():
            if each.parking.tier_nbytes <= nbytes:
                kept.append(each)
                nbytes -= each.parking.tier_nbytes
        return self.only(kept)

    @property
    def parked_states(self) -> tuple[StateParking, ...]:
        return tuple(state.parking for state in self.states)

    @property
    def parked_weights(self) -> tuple[WeightParking, ...]:
        return tuple(unit.parking for unit in self.units)

    def by_price(self) -> list[StateOf | UnitOf]:
        """Those whose copies take least for each byte first, of several the largest."""
        return sorted(
            (*self.states, *self.units), key=lambda each: (each.parking.seconds / each.parking.nbytes, -each.parking.nbytes)
        )

    def trained(self, graph: Graph) -> dict[str, int]:
        """Name of each parameter that is parked itself -> its bytes."""
        trained = (graph.tensors[t] for each in self.units for t in each.unit.trained)
        return {t.name: t.nbytes for t in trained}

    def priced(self, graph: Graph, chunks: Chunks) -> Rests:
        """The same, with the seconds for which a step waits in which this is parked, and nothing else. `chunks`: those of the
        update after backward.
        """
        states = tuple(priced(graph, self.states, chunks, self.ahead))
        rests = replace(self, states=states, units=tuple(in_turn(graph, self.units, self.ahead)))
        if not self.ahead:
            return rests
        step = rests.in_step(graph, chunks)
        return rests._with_less(step, _hidden(step))

    def in_step(self, graph: Graph, chunks: Chunks) -> Graph:
        """The step of this graph with this parked."""
        step = parked_weights(graph, self.units, self.ahead) if self.units else graph
        trained = self.trained(graph)
        return parked(step, self.states, chunks, trained) if self.states or trained else step

    def in_plan(self, graph: Graph, plan: Plan) -> Rests:
        """The same in a plan, which may update only some parameters early. `graph`: of the step in which all are."""
        step = step_of(graph, plan)
        if step is graph:
            return self
        parkings = in_plan(self.parked_states, names_of(graph, plan.updates))
        states = (replace(state, parking=parking) for state, parking in zip(self.states, parkings, strict=True))
        here, before = _hidden(step), _hidden(graph)
        less = {key: here.get(key, 0.0) - seconds for key, seconds in before.items()}
        may, does = {update.parameter for update in graph.updates}, set(plan.updates)

        units = (each.made_late(lambda t: t in may and t not in does) for each in self.units)
        return replace(self, states=tuple(states), units=tuple(units))._with_less(graph, less)

    def _with_less(self, graph: Graph, less: Mapping[Key, float]) -> Rests:
        """A step waits for so much less for these copies."""
        updated = {graph.tensors[update.parameter].name: update.parameter for update in graph.updates}

        def waiting(parking: Any, key: Key | None) -> Any:
            return parking if key is None else replace(parking, seconds=parking.seconds - less.get(key, 0.0))

        def key_of(state: StateParking) -> Key | None:
            if state.what == "gradient":
                return "gradient", graph.gradients[state.parameter][0]
            return ("state", updated[state.parameter]) if state.parameter in updated else None

        states = (replace(each, parking=waiting(each.parking, key_of(each.parking))) for each in self.states)
        units = (replace(each, parking=waiting(each.parking, ("weights", each.unit.weights[0]))) for each in self.units)
        return replace(self, states=tuple(states), units=tuple(units))


@dataclass(frozen=True, eq=False)
class Parked:
    """A step in which some of what rests is parked.

    whole: the step with nothing parked.
    rests: what is parked, with the seconds for which this step waits.
    chunks: those of the update after backward.
    """

    whole: Graph
    rests: Rests
    chunks: Chunks

    @classmethod
    def of(cls, whole: Graph, rests: Rests, chunks: Chunks) -> Parked:
        """`rests`: priced for any step."""
        return cls(whole, rests.priced(whole, chunks), chunks)

    @cached_property
    def graph(self) -> Graph:
        """That of the step."""
        return self.rests.in_step(self.whole, self.chunks)


def _hidden(step: Graph) -> Mapping[Key, float]:
    """Seconds of copies for which the step does not wait; below 0 where it also waits for copies before them."""
    hidden = defaultdict[Key, float](float)
    for copy, waited in zip(step.copies, waits(step), strict=True):
        hidden[copy.what, copy.tensor] += copy.seconds - waited
    return hidden


def _surely_waits(step: Graph) -> float:
    """For how many seconds the step waits, whatever is rebuilt: for copies that begin and end between two points that follow
    each other. Those of both directions run at the same time.
    """
    between = defaultdict[int, dict[str, float]](lambda: {"in": 0.0, "out": 0.0})
    for copy in step.copies:
        if copy.before == copy.after + 1:
            between[copy.after][copy.lane] += copy.seconds
    return sum(max(lanes.values()) for lanes in between.values())


def with_rest(plan: Plan, graph: Graph, rests: Rests) -> Plan:
    """This plan of a step in which this is parked, with what the copies cost. `graph`: of the step."""
    if not rests:
        return plan
    rests, step = rests.in_plan(graph, plan), step_of(graph, plan)
    each: tuple[StateParking | WeightParking, ...] = (*rests.parked_states, *rests.parked_weights)
    moved_nbytes = sum(2 * state.nbytes for state in rests.parked_states)
    moved_nbytes += sum(unit.moved_nbytes for unit in rests.parked_weights)
    seconds, alone = rests.seconds, sum(waits(step))
    bound = max(plan.lower_bound_seconds + _surely_waits(step), alone) + seconds - alone
    seconds += stall_seconds(step, lower(step, plan.lives)) - alone
    predicted = plan.predicted
    return replace(
        plan,
        states=rests.parked_states,
        weights=rests.parked_weights,
        lower_bound_seconds=bound,
        predicted=replace(
            predicted,
            moved_nbytes=predicted.moved_nbytes + moved_nbytes,
            copy_seconds=predicted.copy_seconds + sum(one.copy_seconds for one in each),
            stall_seconds=predicted.stall_seconds + seconds,
            tier_nbytes=predicted.tier_nbytes + sum(one.nbytes for one in each),
        ),
    )
