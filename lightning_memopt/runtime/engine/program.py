"""A plan's schedule, indexed by the events that the engine meets at run time: ops, unpacks and releases."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import torch

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import BEFORE, CALL, Graph, around, resident_nbytes
from lightning_memopt.plan import Life, Schedule, Segment, lower
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.record import is_norm, is_unshared

_WORTHWHILE = 16
"""Minimum number of ops of a module that runs unrecorded. The native engine runs about as many while the recorder is left
and entered.
"""


def sized_by_data(graph: Graph) -> frozenset[int]:
    """Tensors of the forward whose sizes may differ from step to step: results of ops whose sizes depend on data, and all
    results made from them.
    """
    varying: set[int] = set()
    for op in graph.forward:
        if _looks_at_data(op.name) or not varying.isdisjoint(op.inputs):
            varying.update(op.outputs)
    return frozenset(varying)


@cache
def _looks_at_data(name: str) -> bool:
    """Whether the sizes of an op's results depend on data, by the tags of the op `aten::name.overload`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return False
    return torch.Tag.dynamic_output_shape in func.tags


@dataclass(frozen=True, eq=False)
class Program:
    """A plan's lives, lowered to a schedule and indexed for the engine. It never changes.

    Many methods: each is one index of the same schedule, made when it is first used.

    graph: the graph that the plan was made for.
    lives: the plan.
    """

    graph: Graph
    lives: tuple[Life, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """The actions of the engine, by points."""
        return lower(self.graph, self.lives)

    @cached_property
    def resident_nbytes(self) -> int:
        """Bytes of tensors from before the step."""
        return resident_nbytes(self.graph)

    @cached_property
    def names(self) -> list[str]:
        """Names of the forward's ops, by position."""
        return [op.name for op in self.graph.forward]

    @cached_property
    def calls(self) -> list[int]:
        """The positions at which calls of the model begin, except the first call."""
        return [j for j, name in enumerate(self.names) if name == CALL]

    @cached_property
    def handed_over(self) -> frozenset[int]:
        """Tensors that the plan holds and that were made before the call that reads them: by an earlier call or between
        calls.
        """
        return self.holds.intersection(t for j in self.calls for t in self.outputs[j])

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """Name -> the positions of ops of that name."""
        positions: dict[str, list[int]] = {}
        for j, name in enumerate(self.names):
            positions.setdefault(name, []).append(j)
        return positions

    @cached_property
    def inputs(self) -> list[tuple[int, ...]]:
        """Tensors that the forward's ops read, by position."""
        return [op.inputs for op in self.graph.forward]

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        """Tensors that the forward's ops make, by position."""
        return [op.outputs for op in self.graph.forward]

    @cached_property
    def drops(self) -> frozenset[int]:
        """Tensors that autograd saves, and that the plan drops and rebuilds."""
        held = self.schedule.holds
        return frozenset(life.tensor for life in self.lives if life.how == "rebuild" and life.tensor not in held)

    @cached_property
    def segments(self) -> dict[tuple[int, int], tuple[int, Segment]]:
        """(save, occurrence) -> (point, steps)."""
        points = self.graph.points
        return {(points[p].id, points[p].occurrence): (p, steps) for p, steps in self.schedule.segments.items()}

    @cached_property
    def frees(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        """Event -> the tensors that the plan frees at it."""
        points = self.graph.points
        frees = ((points[p], tensors) for p, tensors in self.schedule.frees.items() if p < len(points))
        return {(point.kind, point.id, point.occurrence): tensors for point, tensors in frees}

    @cached_property
    def parked(self) -> dict[int, str]:
        """Parked tensor -> its form."""
        return self.schedule.parked

    @cached_property
    def fences(self) -> list[tuple[int, int]]:
        """(forward op, parked tensor), in order: when the op has run, the tensor's bytes are dropped.

        Autograd releases a save within the forward if user code drops a result that autograd saved (`argsort` drops the sorted
        values). A tensor that is freed then may be packed again for the next op, so it has a fence, too.
        """
        points, begins = self.graph.points, [op.at for op in self.graph.forward]
        in_forward = (p for p in self.schedule.frees if p < self.graph.backward_begins and points[p].kind != "unpack")
        at_ops = ((bisect_right(begins, p) - 1, t) for p in in_forward for t in self.schedule.frees[p])
        return sorted((op, t) for op, t in at_ops if t in self.parked)

    @cached_property
    def fence_of(self) -> dict[int, int]:
        """Parked tensor -> the forward op after which its bytes are dropped."""
        return {tensor: op for op, tensor in self.fences}

    @cached_property
    def last_fetch(self) -> dict[int, int]:
        """Parked tensor -> the point at which it is fetched for the last time."""
        points: dict[int, int] = {}
        for life in self.lives:
            if life.how == "fetch":
                points[life.tensor] = max(life.born_at, points.get(life.tensor, BEFORE))
        return points

    @cached_property
    def unsaved(self) -> frozenset[int]:
        """Tensors that are parked although autograd never packs them, because rebuilds start from them."""
        packed = {then for then, _ in self._packed}
        return frozenset(t for t in self.parked if t not in packed)

    @cached_property
    def births(self) -> dict[int, tuple[int, ...]]:
        """Point -> the tensors that are rebuilt there, or fetched bit-identically."""
        births: dict[int, tuple[int, ...]] = {}
        for life in self.lives:
            if life.how == "rebuild" or (life.how == "fetch" and codec_of(life.form) in EXACT):
                births[life.born_at] = (*births.get(life.born_at, ()), life.tensor)
        return births

    @cached_property
    def tracked(self) -> frozenset[int]:
        """Tensors that the engine must match: those that the plan drops or parks, the inputs and results of ops that run again,
        all other versions of their storages, and the tensors whose handles are the events at which segments run or such
        tensors are freed.
        """
        ops, tensors, points = self.graph.ops, self.graph.tensors, self.graph.points
        tracked: set[int] = set()
        new = {*self.drops, *self.parked, *(self.graph.asked_at(p) for p in self.schedule.segments)}
        for op in self.schedule.rebuilt:
            new.update(ops[op].inputs)
            new.update(ops[op].outputs)
        frees = [(ts, self.graph.asked_at(p)) for p, ts in self.schedule.frees.items() if points[p].kind != "op"]
        while not new <= tracked:
            storages = {tensors[t].storage for t in tracked | new}
            tracked = {t.id for t in tensors if t.storage in storages}
            new = {asked for ts, asked in frees if not tracked.isdisjoint(ts)}
        return frozenset(tracked)

    @cached_property
    def cut_by(self) -> dict[int, int]:
        """Tensor -> the first forward op that cuts its storage into pieces with version counters of their own
        (`Rule.unshared`).
        """
        tensors = self.graph.tensors
        cuts = {tensors[t].storage: op.id for op in reversed(self.graph.forward) if is_unshared(op.name) for t in op.inputs}
        return {t.id: cuts[t.storage] for t in tensors if t.storage in cuts}

    @cached_property
    def sized_by_data(self) -> frozenset[int]:
        """See the function `sized_by_data`."""
        return sized_by_data(self.graph)

    @cached_property
    def holds(self) -> frozenset[int]:
        """Tracked tensors that the engine holds from their birth. Autograd holds the other tensors that the plan holds."""
        return self.schedule.holds & self.tracked

    @cached_property
    def starts(self) -> frozenset[int]:
        """Tensors that ops which run again read."""
        return frozenset(t for op in self.schedule.rebuilt for t in self.graph.ops[op].inputs)

    @cached_property
    def resident_starts(self) -> frozenset[int]:
        """Tensors from before the step from which rebuilds start and that have no life in the plan: they are always in
        memory.
        """
        living = {life.tensor for life in self.lives}
        return frozenset(t for t in self.starts - living if self.graph.tensors[t].born_at == BEFORE)

    @cached_property
    def recorded(self) -> frozenset[int]:
        """Forward ops that must be recorded, because they run again, or make or write a tracked tensor."""
        makers = (self.graph.producers.get(t) for t in self.tracked)
        return frozenset(op.id for op in makers if op is not None) | self.schedule.rebuilt.keys()

    def passes(self, op: int) -> bool:
        """Whether a forward op need not be recorded, because no tracked tensor depends on it."""
        return op not in self.recorded

    @cached_property
    def aside(self) -> frozenset[int]:
        """Ops that need not be recorded (`passes`), save nothing for autograd, and read no weight: a metric, a log."""
        saving = {s.op for s in self.graph.saves}
        weights = {t.id for t in self.graph.tensors if t.kind == "parameter"}
        free = (op for op in self.graph.forward if op.id not in saving and weights.isdisjoint(op.inputs))
        return frozenset(op.id for op in free if self.passes(op.id))

    @cached_property
    def quiet(self) -> dict[str, tuple[int, int]]:
        """Modules that run without the recorder: path -> (position of their first op, of the first op after them).

        All their ops pass (`passes`), autograd saves no tracked tensor in them, they are called once a step, they have at least
        `_WORTHWHILE` ops, and no module that contains them is quiet itself. They contain no batch norm: it writes running
        statistics, from which a rebuild may start, and neither the graph nor a version counter shows that. They contain no
        buffer from which a rebuild starts, because they may write it in another step. On CUDA, they add no bias that torch adds
        in place without the recorder (`Graph.biased`): their requests would differ from the graph's, and so would reserved
        bytes.
        """
        busy = set(self.recorded) | {save.op for save in self.graph.saves if save.id in self._handled}
        busy.update(j for name, js in self.places.items() if is_norm(name) for j in js)
        if kind_of(self.graph.device).has_segments:
            busy |= self.graph.biased.keys()
        before = [0, *accumulate(j in busy for j in range(len(self.names)))]
        starts = [self.graph.tensors[t] for t in self.starts]
        writers = {path for t in starts if t.kind == "buffer" for path in around(t.name)}
        quiet = {
            path: (first, end)
            for path, (first, end) in self.graph.unbroken.items()
            if end - first >= _WORTHWHILE and before[first] == before[end]
            if path not in writers and not self._packs_behind(first, end)
        }
        return {path: span for path, span in quiet.items() if quiet.keys().isdisjoint(around(path.rpartition(".")[0]))}

    def _packs_behind(self, first: int, end: int) -> bool:
        """Whether a save of these ops may be packed after the last of them, as a custom Function packs when its forward has
        ended. Only a tensor that the next op reads and none of these reads is certainly packed by that next op.
        """
        behind = {tensor for tensor, position in self.packs_here if position == end}
        if not behind or end == len(self.names):
            return bool(behind)
        mine = {t for j in range(first, end) for t in self.inputs[j]}
        return not behind <= set(self.inputs[end]) - mine

    @cached_property
    def saved(self) -> list[tuple[int, int]]:
        """(save, tensor packed) of the forward's saves of tracked tensors, in packing order. Autograd gets handles for them."""
        tensors = self.graph.tensors
        made = (s for s in self.graph.saves if s.tensor in self.tracked and tensors[s.tensor].born_at != BEFORE)
        return [(save.id, self.graph.packed(save)) for save in made]

    @cached_property
    def packs(self) -> dict[int, list[tuple[int, int]]]:
        """Tensor packed -> (position of the op during or before which it is packed, save), of `saved`."""
        packs: dict[int, list[tuple[int, int]]] = {}
        for save, tensor in self.saved:
            packs.setdefault(tensor, []).append((self.graph.saves[save].op, save))
        return packs

    @cached_property
    def packs_here(self) -> dict[tuple[int, int], list[int]]:
        """(tensor packed, position) -> saves, of `packs`."""
        here: dict[tuple[int, int], list[int]] = {}
        for tensor, saves in self.packs.items():
            for position, save in saves:
                here.setdefault((tensor, position), []).append(save)
        return here

    @cached_property
    def saving(self) -> bytes:
        """For each position, including the one after the forward: 0 if the saved-tensor hooks may be off there.

        That is so if no tensor of `saved` is packed there, and the op is not `detach`, which a mode also sees when torch saves
        a result itself.
        """
        positions = {position for saves in self.packs.values() for position, _ in saves}
        positions.update(j for j, name in enumerate(self.names) if name.startswith("aten::detach"))
        return bytes(j in positions for j in range(len(self.names) + 1))

    @cached_property
    def _packed(self) -> list[tuple[int, int]]:
        """(tensor packed, tensor that backward reads), of every save."""
        return [(self.graph.packed(save), save.tensor) for save in self.graph.saves]

    @cached_property
    def dropped_at_pack(self) -> frozenset[int]:
        """Tensors whose bytes autograd does not keep when it packs them, because the plan drops what backward reads."""
        return frozenset(then for then, read in self._packed if read in self.drops)

    @cached_property
    def packed_then_overwritten(self) -> frozenset[int]:
        """Tensors that are overwritten after they were packed, if the plan holds the later version, which backward reads."""
        return frozenset(then for then, read in self._packed if then != read and read in self.holds)

    @cached_property
    def _handled(self) -> frozenset[int]:
        return frozenset(save for save, _ in self.saved)

    @cached_property
    def events(self) -> list[tuple[str, int, int]]:
        """Unpacks and releases of handles, in the observed order."""
        return [(p.kind, p.id, p.occurrence) for p in self.graph.points if p.kind != "op" and p.id in self._handled]

    @cached_property
    def event_points(self) -> list[int]:
        """The points of `events`."""
        return [i for i, p in enumerate(self.graph.points) if p.kind != "op" and p.id in self._handled]

    def wanted_until(self, tensor: int) -> int:
        """The last point at which a life of the tensor ends, or at which its op runs again."""
        ends = [life.freed_at for life in self.lives if life.tensor == tensor]
        return max([*ends, self.schedule.rebuilt.get(self.graph.producers[tensor].id, BEFORE)])

    @cached_property
    def turns(self) -> dict[tuple[str, int, int], int]:
        """Event -> its index in `events`."""
        return {event: i for i, event in enumerate(self.events)}

    @cached_property
    def random(self) -> frozenset[int]:
        """Ops that run again and need the generator's state."""
        return frozenset(op for op in self.schedule.rebuilt if self.graph.ops[op].state_nbytes)

    @property
    def empty(self) -> bool:
        """Whether the plan rebuilds and fetches nothing, so that the recorder need not run at all."""
        return not self.schedule.segments
