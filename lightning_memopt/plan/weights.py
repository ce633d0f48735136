"""How a step changes whose weights are parked in a tier, and are on the device only while their module runs.

A *unit* is a module whose weights come and go together: a block of a transformer. They come when it is called, and go when the
call is over. If backward reads or updates them, they come before the first node of the unit, and go when those of another unit
come, or when backward is over. So in the graph such a weight is a tensor with windows.

Frozen weights go without a copy: the tier has them. Those that are trained are copied out once a step. An early update writes
them on the device, before they go. For the update after backward, they come once more, a chunk of parameters at a time
(`plan.states`).

Units may also be copied *ahead*: the copy for a unit begins as soon as the unit before it is there, and runs while that one
computes. Then two units are on the device at once, and the step waits only for what takes longer than this computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from lightning_memopt.graph import BEFORE, Copy, Graph
from lightning_memopt.graph.model import around
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.model import WeightParking
from lightning_memopt.plan.tiers import PAGE_NBYTES
from lightning_memopt.units import round_up


@dataclass(frozen=True)
class Unit:
    """The weights of a module.

    path: the module's path in the model.
    weights: ids of their tensors in the graph.
    trained: those of them that are trained.
    """

    path: str
    weights: tuple[int, ...]
    trained: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitOf:
    """The weights of a module of the model, which are parked together.

    parking: what is parked, and what that costs.
    unit: the same in the graph.
    updated: each weight that the step updates, and its bytes.
    back_seconds: how long it takes to copy all of them to the device once.
    out_seconds: how long it takes to copy those out that are updated.
    late_seconds: how long it takes to copy these to the device once more, for an update after backward.
    """

    parking: WeightParking
    unit: Unit
    updated: tuple[tuple[int, int], ...] = ()
    back_seconds: float = 0.0
    out_seconds: float = 0.0
    late_seconds: float = 0.0

    def made_late(self, late: Callable[[int], bool]) -> UnitOf:
        """The same where those weights are updated after backward that are `late`, and were not before."""
        nbytes = sum(n for t, n in self.updated if late(t))
        if not nbytes:
            return self
        parking, more = self.parking, self.late_seconds * nbytes / sum(n for _, n in self.updated)
        copy_seconds, seconds = parking.copy_seconds + more, parking.seconds + more
        moved_nbytes = parking.moved_nbytes + nbytes
        return replace(self, parking=replace(parking, copy_seconds=copy_seconds, seconds=seconds, moved_nbytes=moved_nbytes))


def read_units(graph: Graph, weights: Mapping[str, Mapping[str, bool]]) -> list[Unit]:
    """The units whose weights the step reads, all of them. `weights`: path of a module -> name of each of its weights, and
    whether it is trained.
    """
    ids = {t.name: t.id for t in graph.tensors if t.kind == "parameter" and t.storage == t.id}
    units = []
    for path, own in weights.items():
        if ids.keys() >= own.keys():
            trained = tuple(ids[name] for name, is_trained in own.items() if is_trained)
            units.append(Unit(path, tuple(ids[name] for name in own), trained))
    return units


def movable(graph: Graph, units: Sequence[Unit]) -> tuple[list[Unit], dict[str, str]]:
    """Those of these units that run once in the forward, and once in backward or never, and whose weights nothing else reads.
    And path of each other unit -> why it is none of these.
    """
    written = {t for op in graph.ops for t, _ in op.mutates if op.phase != "update"}

    def obstacle(unit: Unit) -> str:
        if unit.path not in graph.unbroken:
            return "their modules do not run once in the forward"
        if not written.isdisjoint(unit.weights):
            return "the step writes weights of their modules"
        first, end = graph.unbroken[unit.path]
        readers = ((t, op) for t in unit.weights for op in graph.consumers.get(t, ()))
        elsewhere = any(
            t not in unit.trained if op.phase == "update" else op.phase == "forward" and not first <= op.id < end
            for t, op in readers
        )
        return "other modules read them, or an update does" if elsewhere else ""

    others = {unit.path: why for unit in units if (why := obstacle(unit))}
    while True:
        waiting = [unit for unit in units if unit.path not in others]
        broken = _Backward.of(graph, waiting).broken
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
    runs = [(unit.path, point) for point, unit in _Backward.of(graph, units).runs]
    over = _backward_ends(graph, runs[-1][1] if runs else BEFORE)
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


def _backward_ends(graph: Graph, since: int) -> int:
    """The last point of a backward that runs at this point. Ops between the steps of two optimizers are none of it."""
    early = {op.id for update in graph.updates for op in graph.ops_of(update.at)}
    usual = (run[0].at for run in graph.runs_of_updates if run[-1].id not in early)
    until = min((point for point in usual if point > since), default=len(graph.points))
    return max((op.at for op in graph.ops if op.phase == "backward" and op.at < until), default=BEFORE)


def all_of(graph: Graph, units: Sequence[Unit], tier: str, rates: TransferRates | None) -> list[UnitOf]:
    """These units, parked in this tier, if the step waits for all of each copy. `rates`: None: copies take no time."""
    found = []
    fetches, early = fetches_of(graph, units, ahead=False), {update.parameter for update in graph.updates}
    updated = _updated(graph)
    for unit in units:
        nbytes = sum(graph.tensors[t].nbytes for t in unit.weights)
        own = tuple((t, graph.tensors[t].nbytes) for t in unit.trained if t in updated)
        updated_nbytes = sum(n for _, n in own)
        back = out = late = 0.0
        if rates is not None:
            back = rates.in_seconds(tier, nbytes)
            if own:
                out, late = rates.out_seconds(tier, updated_nbytes), rates.in_seconds(tier, updated_nbytes)
        times = len(fetches[unit.path])
        seconds = times * back + out
        parking = WeightParking(
            module=unit.path,
            tier=tier,
            nbytes=nbytes,
            beside=tuple(fetch.beside for fetch in fetches[unit.path]),
            copy_seconds=seconds,
            seconds=seconds,
            tier_nbytes=sum(round_up(graph.tensors[t].nbytes, PAGE_NBYTES) for t in unit.weights),
            moved_nbytes=times * nbytes + updated_nbytes,
        )
        found.append(UnitOf(parking, unit, own, back, out, late).made_late(lambda t: t not in early))
    return found


def _updated(graph: Graph) -> set[int]:
    """The tensors that the step updates: what has a gradient, or an update reads."""
    read = {t for op in graph.ops if op.phase == "update" for t in op.inputs}
    return read | {t.id for t in graph.tensors if t.name in graph.gradients} | {update.parameter for update in graph.updates}


def in_turn(graph: Graph, units: Sequence[UnitOf], ahead: bool) -> list[UnitOf]:
    """These units in a step in which no others are parked, if it waits for all of each copy. `ahead`: each is copied while the
    one before it computes.
    """
    fetches = fetches_of(graph, [each.unit for each in units], ahead)

    def of(each: UnitOf) -> UnitOf:
        beside = tuple(fetch.beside for fetch in fetches[each.unit.path])
        return replace(each, parking=replace(each.parking, beside=beside, seconds=each.parking.copy_seconds))

    return [of(each) for each in units]


class _Backward(NamedTuple):
    """Where units run in backward.

    runs: (point, unit): its weights come before this point, and those of the one before have gone.
    broken: paths of units whose weights are read after those of another one have come.
    """

    runs: list[tuple[int, Unit]]
    broken: set[str]

    @classmethod
    def of(cls, graph: Graph, units: Sequence[Unit]) -> _Backward:
        """A unit whose weights backward reads or writes comes before the first node that it has made. That a later node of it
        runs brings nothing back: modules within it may be units of their own, and what an op has made may be saved only when
        the next module runs.
        """
        unit_of_weight = {t: unit for unit in units for t in unit.weights}
        unit_of_path = {unit.path: unit for unit in units}

        def needs() -> Iterator[tuple[int, bool, Unit]]:
            """(point, whether weights are read or written there, unit)."""
            for save in graph.saves:
                unit = next((unit_of_path[path] for path in _paths(graph, save.op) if path in unit_of_path), None)
                if unit is not None:
                    yield from ((point, False, unit) for point in save.unpacked_at)
            for op in graph.ops[len(graph.forward) :]:
                if op.phase == "backward":
                    yield from ((op.at, True, unit_of_weight[t]) for t in op.inputs if t in unit_of_weight)
            for update in graph.updates:  # the weight comes before the node that makes its gradient
                unit = unit_of_weight.get(update.parameter)
                gradient = graph.gradients.get(graph.tensors[update.parameter].name)
                if unit is not None and gradient is not None:
                    made_at, accumulated_at = graph.tensors[gradient[0]].born_at, gradient[1]
                    yield accumulated_at if made_at == BEFORE else made_at, True, unit

        found = cls([], set())
        came = set[str]()
        now = ""
        in_order = sorted(needs(), key=itemgetter(0, 1))
        wanted = {unit.path for _, are_read, unit in in_order if are_read}
        for point, are_read, unit in in_order:
            if unit.path not in wanted:
                continue
            if unit.path not in came:
                came.add(unit.path)
                found.runs.append((point, unit))
                now = unit.path
            elif are_read and unit.path != now:
                found.broken.add(unit.path)
        return found


def _paths(graph: Graph, op: int) -> Iterator[str]:
    """The modules that a forward op ran in, from the inside."""
    return around(graph.ops[op].scope.partition("#")[0]) if op < len(graph.forward) else iter(())


def parked_weights(graph: Graph, units: Sequence[UnitOf], ahead: bool) -> Graph:
    """The step of this graph with these units in a tier. Points and ids are those of `graph`."""
    tensors, copies = list(graph.tensors), list(graph.copies)
    versions = defaultdict[int, list[int]](list)
    for version in graph.tensors:
        if version.storage != version.id:
            versions[version.storage].append(version.id)
    fetches = fetches_of(graph, [each.unit for each in units], ahead)
    for each in units:
        own = fetches[each.unit.path]
        last = own[-1].ends_at
        for t in each.unit.weights:
            *before, final = ((fetch.begins_at, fetch.ends_at) for fetch in own)
            until = min(final[1], tensors[t].freed_at)  # an early update makes another version
            windows = (*before, (final[0], until)) if until >= final[0] else tuple(before)
            tensors[t] = replace(tensors[t], windows=windows, freed_at=until)
            for each_version in versions.get(t, ()):
                updated = tensors[each_version]
                if updated.born_at <= last:
                    tensors[each_version] = replace(updated, freed_at=min(updated.freed_at, last))
                else:  # the chunk of its update has it
                    tensors[each_version] = replace(updated, nbytes=0)
        copy = partial(Copy, what="weights", tensor=each.unit.weights[0])
        for fetch in own:
            copies.append(copy(lane="in", after=fetch.begins_at - 1, before=fetch.needed_at, seconds=each.back_seconds))
        if each.out_seconds:
            copies.append(copy(lane="out", after=last, before=last + 1, seconds=each.out_seconds))
    return replace(graph, tensors=tuple(tensors), copies=tuple(copies))
