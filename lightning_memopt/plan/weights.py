"""How a step changes whose frozen weights are parked in a tier, and are on the device only while their module runs.

A *unit* is a module whose frozen weights come and go together: a block of a transformer. They come when it is called, and go
when the call is over. In backward, they come before the first node of the unit, and go when those of another unit come, or when
backward is over. So in the graph such a weight is a tensor with windows.

Units may also be copied *ahead*: the copy for a unit begins as soon as the unit before it is there, and runs while that one
computes. Then two units are on the device at once, and the step waits only for what takes longer than this computing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_memopt.graph import BEFORE, Copy, Graph
from lightning_memopt.graph.model import around
from lightning_memopt.plan.model import WeightParking
from lightning_memopt.plan.tiers import PAGE_NBYTES
from lightning_memopt.units import round_up


@dataclass(frozen=True)
class Unit:
    """The frozen weights of a module.

    path: the module's path in the model.
    weights: ids of their tensors in the graph.
    """

    path: str
    weights: tuple[int, ...]


@dataclass(frozen=True)
class UnitOf:
    """The frozen weights of a module of the model, which are parked together.

    parking: what is parked, and what that costs.
    unit: the same in the graph.
    """

    parking: WeightParking
    unit: Unit


def read_units(graph: Graph, weights: Mapping[str, Collection[str]]) -> list[Unit]:
    """The units whose weights the step reads, all of them. `weights`: path of a module -> names of its frozen weights."""
    ids = {t.name: t.id for t in graph.tensors if t.kind == "parameter" and t.storage == t.id}
    return [Unit(path, tuple(ids[name] for name in own)) for path, own in weights.items() if ids.keys() >= set(own)]


def movable(graph: Graph, units: Sequence[Unit]) -> tuple[list[Unit], dict[str, str]]:
    """Those of these units that run once in the forward, and once in backward or never, and whose weights nothing else reads.
    And path of each other unit -> why it is none of these.
    """
    written = {t for op in graph.ops for t, _ in op.mutates}
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for t in op.inputs:
            readers.setdefault(t, []).append(op.id)

    def obstacle(unit: Unit) -> str:
        if unit.path not in graph.unbroken:
            return "their modules do not run once in the forward"
        if not written.isdisjoint(unit.weights):
            return "the step writes weights of their modules"
        first, end = graph.unbroken[unit.path]
        ops = [o for t in unit.weights for o in readers.get(t, ())]
        elsewhere = any(graph.ops[o].phase == "update" or (o < len(graph.forward) and not first <= o < end) for o in ops)
        return "other modules read them, or an update does" if elsewhere else ""

    others = {unit.path: why for unit in units if (why := obstacle(unit))}
    while True:
        waiting = [unit for unit in units if unit.path not in others]
        runs = [unit.path for _, unit in _in_backward(graph, waiting)]
        broken = {path for path in runs if runs.count(path) > 1}
        if not broken:
            return waiting, others
        others |= dict.fromkeys(broken, "their modules do not run at one time in backward")


@dataclass(frozen=True, slots=True)
class Fetch:
    """The weights of a unit come to the device and go again.

    begins_at: the point before which the copy begins.
    needed_at: the point before which it must have ended.
    ends_at: the last point at which the weights are on the device.
    beside: the unit that is there already when the copy begins, and computes beside it; "": none, the step waits for the copy.
    """

    begins_at: int
    needed_at: int
    ends_at: int
    beside: str = ""


def fetches_of(graph: Graph, units: Sequence[Unit], ahead: bool) -> dict[str, tuple[Fetch, ...]]:
    """Path of a unit -> its fetches in a step in which all of these units are parked: one in the forward, one in backward if it
    is read there. `ahead`: they are copied ahead.
    """
    first_ops = sorted((graph.unbroken[unit.path], unit.path) for unit in units)
    forward = [(path, graph.ops[first].at, graph.ops[end - 1].at) for (first, end), path in first_ops]
    over = max((op.at for op in graph.ops if op.phase == "backward"), default=BEFORE)
    runs = [(unit.path, point) for point, unit in _in_backward(graph, units)]
    ends = [point - 1 for _, point in runs[1:]] + [over]
    backward = [(path, point, end) for (path, point), end in zip(runs, ends, strict=False)]  # there may be no run
    fetches: dict[str, tuple[Fetch, ...]] = {unit.path: () for unit in units}
    for direction in (forward, backward):
        before: tuple[str, int] | None = None
        for path, point, end in direction:
            fetch = Fetch(point, point, end) if before is None else Fetch(before[1], point, end, before[0])
            fetches[path] += (fetch,)
            before = (path, point) if ahead else None
    return fetches


def all_of(graph: Graph, units: Sequence[Unit], tier: str, in_seconds: Callable[[str, int], float] | None) -> list[UnitOf]:
    """These units, parked in this tier, if the step waits for all of each copy. `in_seconds`: seconds that a copy of so many
    bytes from a tier takes; None: copies take none.
    """
    found = []
    fetches = fetches_of(graph, units, ahead=False)
    for unit in units:
        nbytes = sum(graph.tensors[t].nbytes for t in unit.weights)
        seconds = 0.0 if in_seconds is None else len(fetches[unit.path]) * in_seconds(tier, nbytes)
        parking = WeightParking(
            module=unit.path,
            tier=tier,
            nbytes=nbytes,
            beside=tuple(fetch.beside for fetch in fetches[unit.path]),
            copy_seconds=seconds,
            seconds=seconds,
            tier_nbytes=sum(round_up(graph.tensors[t].nbytes, PAGE_NBYTES) for t in unit.weights),
        )
        found.append(UnitOf(parking, unit))
    return found


def in_turn(graph: Graph, units: Sequence[UnitOf], ahead: bool) -> list[UnitOf]:
    """These units in a step in which no others are parked, if it waits for all of each copy. `ahead`: each is copied while the
    one before it computes.
    """
    fetches = fetches_of(graph, [each.unit for each in units], ahead)

    def of(each: UnitOf) -> UnitOf:
        beside = tuple(fetch.beside for fetch in fetches[each.unit.path])
        return replace(each, parking=replace(each.parking, beside=beside, seconds=each.parking.copy_seconds))

    return [of(each) for each in units]


def _in_backward(graph: Graph, units: Sequence[Unit]) -> list[tuple[int, Unit]]:
    """(point, unit): the weights of the unit come before this point of backward, and those of the one before have gone."""
    unit_of_weight = {t: unit for unit in units for t in unit.weights}
    unit_of_path = {unit.path: unit for unit in units}
    forward = len(graph.forward)

    def needs() -> Iterator[tuple[int, Unit]]:
        for save in graph.saves:
            unit = next((unit_of_path[path] for path in _paths(graph, save.op) if path in unit_of_path), None)
            if unit is not None:
                yield from ((point, unit) for point in save.unpacked_at)
        for op in graph.ops[forward:]:
            yield from ((op.at, unit_of_weight[t]) for t in op.inputs if t in unit_of_weight)

    ordered = sorted(needs(), key=lambda need: need[0])
    return [next(group) for _, group in groupby(ordered, key=lambda need: need[1].path)]


def _paths(graph: Graph, op: int) -> Iterator[str]:
    """The modules that a forward op ran in, from the inside."""
    return around(graph.ops[op].scope.partition("#")[0]) if op < len(graph.forward) else iter(())


def parked_weights(graph: Graph, units: Sequence[UnitOf], ahead: bool) -> Graph:
    """The step of this graph with these units in a tier. Points and ids are those of `graph`."""
    tensors, copies = list(graph.tensors), list(graph.copies)
    fetches = fetches_of(graph, [each.unit for each in units], ahead)
    for each in units:
        own = fetches[each.unit.path]
        windows = tuple((fetch.begins_at, fetch.ends_at) for fetch in own)
        for t in each.unit.weights:
            tensors[t] = replace(tensors[t], windows=windows, freed_at=windows[-1][1])
        first, seconds = each.unit.weights[0], each.parking.copy_seconds / len(own)
        for fetch in own:
            copies.append(Copy(tensor=first, lane="in", after=fetch.begins_at - 1, before=fetch.needed_at, seconds=seconds))
    return replace(graph, tensors=tuple(tensors), copies=tuple(copies))
