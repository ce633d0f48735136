"""A schedule, indexed by what the engine meets at run time."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import nn

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Life, Schedule, Segment, lower
from lightning_memopt.plan.forms import EXACT, codec_of
from lightning_memopt.record import is_norm
from lightning_memopt.runtime.templates import Templates

Spans = dict[int, tuple[nn.Module, tuple[int, int]]]
_WORTHWHILE = 4
"""Ops that a module must run for leaving and entering the recorder to pay."""


def sized_by_data(graph: Graph) -> frozenset[int]:
    """Tensors of the forward whose sizes may differ from step to step: what ops make that look at data for that, and what
    follows from it.
    """
    found: set[int] = set()
    for op in graph.forward:
        if _looks_at_data(op.name) or not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


@cache
def _looks_at_data(name: str) -> bool:
    """Whether torch says of an op, `aten::name.overload`, that it takes data to know the sizes of its results."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return False
    return torch.Tag.dynamic_output_shape in func.tags


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule, indexed by what the engine meets at run time. `sized`: only tensors of the graph's sizes are its tensors."""

    graph: Graph
    lives: tuple[Life, ...]
    sized: bool = True
    schedule: Schedule = field(init=False)
    templates: Templates = field(init=False)
    _spans: tuple[weakref.ref[nn.Module], Spans] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", lower(self.graph, self.lives))
        object.__setattr__(self, "templates", Templates(len(self.graph.forward)))

    def resized(self) -> Program:
        """The same schedule for steps of this graph on tensors of other sizes."""
        found = copy.copy(self)
        object.__setattr__(found, "sized", False)
        object.__setattr__(found, "templates", Templates(len(self.graph.forward)))
        return found

    def fits(self, nbytes: int, tensor: int) -> bool:
        """Whether a storage of this size may be the graph's tensor."""
        planned = self.graph.tensors[tensor]
        if nbytes == planned.nbytes or tensor in self.sized_by_data:
            return True
        return not self.sized and planned.kind not in ("parameter", "buffer")

    @cached_property
    def names(self) -> list[str]:
        return [op.name for op in self.graph.forward]

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """Name -> the positions of ops of that name."""
        found: dict[str, list[int]] = {}
        for j, name in enumerate(self.names):
            found.setdefault(name, []).append(j)
        return found

    @cached_property
    def inputs(self) -> list[tuple[int, ...]]:
        return [op.inputs for op in self.graph.forward]

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        return [op.outputs for op in self.graph.forward]

    @cached_property
    def drops(self) -> frozenset[int]:
        """Tensors that autograd saves and that the plan neither holds nor leaves alone."""
        held = self.schedule.holds
        return frozenset(life.tensor for life in self.lives if life.how == "replay" and life.tensor not in held)

    @cached_property
    def segments(self) -> dict[tuple[int, int], tuple[int, Segment]]:
        """(save, occurrence) -> (point, steps)."""
        points = self.graph.points
        return {(points[p].id, points[p].occurrence): (p, steps) for p, steps in self.schedule.segments.items()}

    @cached_property
    def frees(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        points = self.graph.points
        frees = ((points[p], tensors) for p, tensors in self.schedule.frees.items() if p < len(points))
        return {(point.kind, point.id, point.occurrence): tensors for point, tensors in frees}

    @property
    def away(self) -> dict[int, str]:
        """Tensors that go away, and in which form."""
        return self.schedule.away

    @cached_property
    def fences(self) -> list[tuple[int, int]]:
        """(forward op, tensor): when the op has run, the tensor's bytes are to be gone."""
        points, last = self.graph.points, len(self.graph.forward)
        at_ops = ((points[p].id, t) for p, ts in self.schedule.frees.items() if points[p].kind == "op" for t in ts)
        return sorted((op, t) for op, t in at_ops if op < last and t in self.away)

    @cached_property
    def fence_of(self) -> dict[int, int]:
        return {tensor: op for op, tensor in self.fences}

    @cached_property
    def last_back(self) -> dict[int, int]:
        """Tensor that goes away -> the point at which it comes back for the last time."""
        found: dict[int, int] = {}
        for life in self.lives:
            if life.how == "fetch":
                found[life.tensor] = max(life.born_at, found.get(life.tensor, BEFORE))
        return found

    @cached_property
    def unsaved(self) -> frozenset[int]:
        """Tensors that go away although autograd never packs them: they are held for rebuilds."""
        packed = {then for then, _ in self._packed}
        return frozenset(t for t in self.away if t not in packed)

    @cached_property
    def births(self) -> dict[int, tuple[int, ...]]:
        """Point -> the tensors that are made again there, or come back with the very bits."""
        found: dict[int, tuple[int, ...]] = {}
        for life in self.lives:
            if life.how == "replay" or (life.how == "fetch" and codec_of(life.form) in EXACT):
                found[life.born_at] = (*found.get(life.born_at, ()), life.tensor)
        return found

    @cached_property
    def tracked(self) -> frozenset[int]:
        """Tensors that the engine has to recognise: what is dropped or goes away, what ops that run again read and make,
        and the other versions of their storages; then those whose handles tell it when a segment is to run, or when one of
        them is to go.
        """
        ops, tensors, points = self.graph.ops, self.graph.tensors, self.graph.points
        found: set[int] = set()
        new = {*self.drops, *self.away, *(self.graph.asked_at(p) for p in self.schedule.segments)}
        for op in self.schedule.replayed:
            new.update(ops[op].inputs)
            new.update(ops[op].outputs)
        frees = [(ts, self.graph.asked_at(p)) for p, ts in self.schedule.frees.items() if points[p].kind != "op"]
        while not new <= found:
            storages = {tensors[t].storage for t in found | new}
            found = {t.id for t in tensors if t.storage in storages}
            new = {asked for ts, asked in frees if not found.isdisjoint(ts)}
        return frozenset(found)

    @cached_property
    def sized_by_data(self) -> frozenset[int]:
        """See the function."""
        return sized_by_data(self.graph)

    @cached_property
    def holds(self) -> frozenset[int]:
        """Tracked tensors that are held from their birth. The others that the plan holds, autograd holds anyway."""
        return self.schedule.holds & self.tracked

    @cached_property
    def starts(self) -> frozenset[int]:
        """What ops that run again read."""
        return frozenset(t for op in self.schedule.replayed for t in self.graph.ops[op].inputs)

    @cached_property
    def outlasting(self) -> frozenset[int]:
        """What rebuilds start from that was there before the step and has no life: it is in memory, whatever the plan says."""
        living = {life.tensor for life in self.lives}
        return frozenset(t for t in self.starts - living if self.graph.tensors[t].born_at == BEFORE)

    def passes(self, op: int) -> bool:
        """A forward op that nothing of the plan depends on: it need not be recorded."""
        made = self.graph.ops[op]
        tensors = (*made.outputs, *(old for old, _ in made.mutates))
        return op not in self.schedule.replayed and self.tracked.isdisjoint(tensors)

    @cached_property
    def aside(self) -> frozenset[int]:
        """Ops that pass, for which autograd saves nothing, and that read no weight: a metric, a log."""
        saving = {s.op for s in self.graph.saves}
        weights = {t.id for t in self.graph.tensors if t.kind == "parameter"}
        free = (op for op in self.graph.forward if op.id not in saving and weights.isdisjoint(op.inputs))
        return frozenset(op.id for op in free if self.passes(op.id))

    @cached_property
    def _starts_nbytes(self) -> frozenset[int]:
        """Sizes of what was there before the step and is no parameter, where a rebuild starts from it."""
        ops, tensors = self.graph.ops, self.graph.tensors
        read = (tensors[t] for op in self.schedule.replayed for t in ops[op].inputs)
        return frozenset(t.nbytes for t in read if t.born_at == BEFORE and t.kind != "parameter")

    def _disturbs(self, op: int) -> bool:
        """Whether a batch norm, of whose running statistics the graph says nothing, may write over what a rebuild reads."""
        made = self.graph.ops[op]
        sizes = (self.graph.tensors[t].nbytes for t in made.outputs[1:])
        return is_norm(made.name) and not self._starts_nbytes.isdisjoint(sizes)

    @cached_property
    def quiet(self) -> dict[str, tuple[int, int]]:
        """Modules that run without the recorder: path -> (position of their first op, of the first one after them).

        All their ops pass, autograd saves in them nothing that the plan says something about, they are called once a step,
        and nothing else runs meanwhile. Shorter ones are not worth it.
        """
        saving = {save.op for save in self.graph.saves if save.id in self._handled}
        spans: dict[str, list[int]] = {}
        for j, op in enumerate(self.graph.forward):
            path = op.scope
            while path:
                spans.setdefault(path, []).append(j)
                path = path.rpartition(".")[0]
        again = {path.partition("#")[0] for path in spans if "#" in path}
        return {
            path: (js[0], js[-1] + 1)
            for path, js in spans.items()
            if len(js) >= _WORTHWHILE
            and js[-1] - js[0] + 1 == len(js)
            and not any(other == path or other.startswith(path + ".") for other in again)
            and all(self.passes(j) and j not in saving and not self._disturbs(j) for j in js)
        }

    def spans_of(self, model: nn.Module) -> Spans:
        """`quiet`, by the identity of this model's modules. Remembered for one model: a step must not walk its modules."""
        if self._spans is None or self._spans[0]() is not model:
            quiet = self.quiet
            spans = {id(m): (m, quiet[name]) for name, m in model.named_modules() if name in quiet}
            object.__setattr__(self, "_spans", (weakref.ref(model), spans))
        assert self._spans is not None
        return self._spans[1]

    @cached_property
    def saved(self) -> list[tuple[int, int]]:
        """(save, tensor packed) where autograd gets a handle: what it saves of tracked tensors, in packing order."""
        tensors = self.graph.tensors
        made = (s for s in self.graph.saves if s.tensor in self.tracked and tensors[s.tensor].born_at != BEFORE)
        return [(save.id, self.graph.packed(save)) for save in made]

    @cached_property
    def packs(self) -> dict[int, list[tuple[int, int]]]:
        """Tensor packed -> (position of the op during which it is packed, or of the one after it; save), of `saved`."""
        found: dict[int, list[tuple[int, int]]] = {}
        for save, tensor in self.saved:
            found.setdefault(tensor, []).append((self.graph.saves[save].op, save))
        return found

    @cached_property
    def _packed(self) -> list[tuple[int, int]]:
        """(tensor packed, tensor read in its place), of every save."""
        return [(self.graph.packed(save), save.tensor) for save in self.graph.saves]

    @cached_property
    def unkept(self) -> frozenset[int]:
        """Tensors of which autograd gets no bytes when it packs them."""
        return frozenset(then for then, read in self._packed if read in self.drops)

    @cached_property
    def outdated(self) -> frozenset[int]:
        """Tensors that are packed and then written over, where the plan holds what is read in their place."""
        return frozenset(then for then, read in self._packed if then != read and read in self.holds)

    @cached_property
    def _handled(self) -> frozenset[int]:
        return frozenset(save for save, _ in self.saved)

    @cached_property
    def events(self) -> list[tuple[str, int, int]]:
        """Requests and releases of handles, in the observed order."""
        return [(p.kind, p.id, p.occurrence) for p in self.graph.points if p.kind != "op" and p.id in self._handled]

    @cached_property
    def event_points(self) -> list[int]:
        """Where on the graph's axis `events` are."""
        return [i for i, p in enumerate(self.graph.points) if p.kind != "op" and p.id in self._handled]

    def wanted_until(self, tensor: int) -> int:
        """The last point at which a life of the tensor ends, or at which its op runs again."""
        ends = [life.freed_at for life in self.lives if life.tensor == tensor]
        return max([*ends, self.schedule.replayed.get(self.graph.producers[tensor].id, BEFORE)])

    @cached_property
    def turns(self) -> dict[tuple[str, int, int], int]:
        """Event -> its place among `events`."""
        return {event: i for i, event in enumerate(self.events)}

    @cached_property
    def random(self) -> frozenset[int]:
        """Replayed ops that need the generator's state."""
        return frozenset(op for op in self.schedule.replayed if self.graph.ops[op].state_nbytes)

    @property
    def empty(self) -> bool:
        """Nothing is dropped: the recorder need not run at all."""
        return not self.schedule.segments
