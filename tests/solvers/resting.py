"""Steps with what rests: optimizer state, gradients and frozen weights, small enough for all choices of what to park."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from build import random_step
from windows import windowed

from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor
from lightning_memopt.graph.model import Kind
from lightning_memopt.plan.model import StateParking, WeightParking
from lightning_memopt.plan.states import Chunk, StateOf, parked
from lightning_memopt.plan.weights import Unit, UnitOf


@dataclass(frozen=True)
class Resting:
    """A step, and what rests in it.

    graph: with nothing parked.
    rests: all that may be parked.
    windows: frozen weight -> where it is on the device if it is parked.
    beside_nbytes: parameter -> bytes that its update takes beside.
    ahead: parameters whose state is copied back while the one before is updated.
    """

    graph: Graph
    rests: tuple[StateOf | UnitOf, ...]
    windows: dict[int, tuple[tuple[int, int], ...]]
    beside_nbytes: dict[str, int]
    ahead: frozenset[str]

    def in_step(self, each: Sequence[StateOf | UnitOf]) -> Graph:
        """The step in which this is parked."""
        states = [one for one in each if isinstance(one, StateOf)]
        tensors = list(self.graph.tensors)
        for unit in (one.unit for one in each if isinstance(one, UnitOf)):
            for t in unit.weights:
                tensors[t] = replace(tensors[t], windows=self.windows[t], freed_at=self.windows[t][-1][1])
        return parked(replace(self.graph, tensors=tuple(tensors)), states, self.chunks)

    @property
    def chunks(self) -> list[list[Chunk]]:
        """Those of the update: one for each parameter."""
        return [[Chunk((name,), nbytes, name in self.ahead) for name, nbytes in self.beside_nbytes.items()]]

    def choices(self) -> Iterator[tuple[StateOf | UnitOf, ...]]:
        """All choices of what to park."""
        return chain.from_iterable(combinations(self.rests, count) for count in range(len(self.rests) + 1))

    @property
    def once_nbytes(self) -> int:
        """Bytes of frozen weights that may be parked."""
        return sum(each.parking.nbytes for each in self.rests if isinstance(each, UnitOf))


def moved_nbytes(each: StateOf | UnitOf) -> int:
    """Bytes that a step copies if this is parked."""
    return each.parking.moved_nbytes if isinstance(each.parking, WeightParking) else 2 * each.parking.nbytes


def resting(seed: int, parameters: int = 3) -> Resting:
    """A random step with a few trained parameters, which are updated at its end, and a few frozen weights of units."""
    rng = random.Random(seed)
    graph = random_step(rng, 8)
    before, last = len(graph.tensors), len(graph.points) - 1
    graph = windowed(graph, rng)
    tensors, rests = list(graph.tensors), list[StateOf | UnitOf]()
    windows = {t.id: t.windows for t in tensors[before:] if t.nbytes}
    for t, spans in windows.items():
        tensors[t] = replace(tensors[t], windows=(), freed_at=last)
        rests.append(UnitOf(_of_weight(tensors[t], len(spans), rng.random()), Unit(tensors[t].name, (t,))))
    begins = min(p for s in graph.saves for p in s.unpacked_at)
    update = Op(id=len(graph.ops), name="update", phase="update", inputs=(), outputs=(), at=last + 1)
    points, ops = (*graph.points, Point("op", update.id)), (*graph.ops, update)
    tensors = [replace(t, freed_at=last + 1) if t.freed_at == last and t.born_at == BEFORE else t for t in tensors]
    gradients, beside = {}, {}
    for number in range(parameters):
        name = f"p{number}"
        kinds: tuple[tuple[Kind, int, int], ...] = (
            ("optimizer_state", BEFORE, rng.randint(1, 90)),
            ("gradient", rng.randint(begins, last), rng.randint(1, 60)),
        )
        for kind, born_at, nbytes in kinds:
            id = len(tensors)
            tensors.append(
                Tensor(
                    id=id, name=f"{kind} of {name}", nbytes=nbytes, kind=kind, storage=id, born_at=born_at, freed_at=last + 1
                )
            )
            if kind == "gradient":
                gradients[name] = (id, rng.randint(born_at, last))
            rests.append(StateOf(_of_state(name, kind, nbytes, 2 * rng.random()), (nbytes,)))
        beside[name] = rng.randint(0, 9)
    graph = replace(graph, points=points, ops=ops, tensors=tuple(tensors), gradients=gradients)
    ahead = frozenset(name for name in [*beside][1:] if rng.random() < 0.5)
    return Resting(graph, tuple(rests), windows, beside, ahead)


def _of_weight(weight: Tensor, fetches: int, seconds: float) -> WeightParking:
    return WeightParking(
        module=weight.name,
        tier="disk",
        nbytes=weight.nbytes,
        beside=("",) * fetches,
        moved_nbytes=fetches * weight.nbytes,
        copy_seconds=seconds,
        seconds=seconds,
        tier_nbytes=weight.nbytes,
    )


def _of_state(name: str, kind: Kind, nbytes: int, seconds: float) -> StateParking:
    return StateParking(
        parameter=name,
        what="gradient" if kind == "gradient" else "state",
        tier="disk",
        nbytes=nbytes,
        copy_seconds=seconds,
        seconds=seconds,
        tier_nbytes=nbytes,
    )
