"""What the engine remembers of the forwards under a plan. The plan itself never changes."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.device.places import is_on
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import Fetch, Free, Rebuild
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.program import Program
from lightning_memopt.runtime.engine.templates import Templates

Spans = dict[int, tuple[weakref.ref[nn.Module], tuple[int, int]]]
"""Identity of a module -> (weak reference to the module, its entry in `Program.quiet`)."""


def actions_for(engine: Any, program: Program) -> object:
    """What a plan does in backward, in the native engine's form (`Actions` in native/engine/backward.h)."""
    kinds, points = (Fetch, Free, Rebuild), sorted(program.schedule.segments)
    numbers = {point: i for i, point in enumerate(points)}
    segments = []
    for point in points:
        steps = []
        for step in program.schedule.segments[point]:
            fields = (step.op, program.outputs[step.op], step.clones) if isinstance(step, Rebuild) else (step.tensor, (), ())
            steps.append((kinds.index(type(step)), *fields))
        segments.append((point, program.births.get(point, ()), steps))
    events = []
    for event in program.events:
        kind, save, occurrence = event
        planned = program.segments.get((save, occurrence)) if kind == "unpack" else None
        number = -1 if planned is None else numbers[planned[0]]
        events.append((kind == "unpack", save, occurrence, number, program.frees.get(event, ())))
    return engine.actions(events, segments, program.last_fetch)


class Learned:
    """What is known of the forwards of one signature under a program.

    program: the program.
    sized: whether a recorded tensor is matched only to a tensor of the graph with the same size. False for a signature that
        borrows the plan of a larger batch.
    device: the training device; the session sets its index.
    native: the native engine; None where there is none.
    numbers: makes an empty set of tensors or saves of the plan.
    templates: the templates of the ops of these forwards.
    familiar: tensor of the plan that is made before the forward -> (bytes, device) of the tensor that was last matched to it
        without further work.
    actions, saves: what the plan does in backward, and when autograd saves a tensor, in the native engine's form; None where
        Python does all of it.
    """

    def __init__(self, program: Program, sized: bool = True) -> None:
        self.program = program
        self.sized = sized
        self.device = torch.device(program.graph.device)
        self.native = loaded()
        self.numbers: type[set[int]] = set if self.native is None else self.native.Numbers
        self.templates = Templates(self.native, program)
        self.familiar: dict[int, tuple[int, torch.device]] = {}
        self._spans: tuple[weakref.ref[nn.Module], Spans] | None = None

    @cached_property
    def actions(self) -> object:
        return None if self.native is None else actions_for(self.native, self.program)

    @cached_property
    def saves(self) -> object:
        program = self.program
        sets = program.tracked, program.parked, program.packed_then_overwritten, program.dropped_at_pack, program.packs
        return None if self.native is None else self.native.saves(sets, program.packs_here)

    def counted_nbytes(self, nbytes: int, device: torch.device) -> int:
        """The bytes that a graph counts for a storage of `nbytes`: what the allocator rounds them to; 0 on other devices."""
        return kind_of(self.device.type).allocated_nbytes(nbytes) if is_on(self.device, device) else 0

    def fits(self, version: Version, tensor: int) -> bool:
        """Whether a recorded tensor may be matched to this tensor of the graph."""
        return self.fits_storage(version.nbytes, version.device, tensor)

    def fits_storage(self, nbytes: int, device: torch.device, tensor: int) -> bool:
        """Like `fits`, for a storage of `nbytes` on this device."""
        planned = self.program.graph.tensors[tensor]
        if self.counted_nbytes(nbytes, device) == planned.nbytes or tensor in self.program.sized_by_data:
            return True
        if not planned.nbytes and planned.kind == "input":  # numpy's memory, whose bytes are not counted
            return True
        return not self.sized and planned.kind not in ("parameter", "buffer")

    def spans_of(self, model: nn.Module) -> Spans:
        """`Program.quiet`, by the identity of this model's modules. It is cached, because visiting all modules takes too
        long.
        """
        if self._spans is None or self._spans[0]() is not model:
            quiet = self.program.quiet
            spans = {id(m): (weakref.ref(m), quiet[name]) for name, m in model.named_modules() if name in quiet}
            self._spans = (weakref.ref(model), spans)
        return self._spans[1]

    def always_recorded(self, module: nn.Module) -> None:
        """From now on, record this module when it runs."""
        if self._spans is not None:
            self._spans[1].pop(id(module), None)
