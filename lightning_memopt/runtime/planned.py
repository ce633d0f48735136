"""The engine that does what a plan says: drops what it drops, holds what it holds, rebuilds when its Schedule says.

Ops are matched against the plan by position, overload, the slots they read and the sizes they make. What does not match
(another branch, another shape, an extra op) is kept, and so is what follows from it: memory may grow, numbers cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch._ops import OpOverload

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Free, Life, Schedule, Segment, lower
from lightning_memopt.record import Slot, detached
from lightning_memopt.runtime.execute import below_autograd, checksum, flags_of, mismatch, missing, run
from lightning_memopt.runtime.replay import Engine, Handle

_LOOK_AHEAD = 16
"""How many planned saves a pack may skip before it counts as unplanned."""


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule, indexed by what the engine meets at run time."""

    graph: Graph
    lives: tuple[Life, ...]
    schedule: Schedule = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", lower(self.graph, self.lives))

    @cached_property
    def names(self) -> list[str]:
        return [op.name for op in self.graph.forward]

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

    @cached_property
    def births(self) -> dict[int, tuple[int, ...]]:
        """Point -> the tensors whose replayed lives begin there."""
        found: dict[int, tuple[int, ...]] = {}
        for life in self.lives:
            if life.how == "replay":
                found[life.born_at] = (*found.get(life.born_at, ()), life.tensor)
        return found

    @cached_property
    def saved(self) -> list[int]:
        """The tensor of every save, in packing order."""
        return [save.tensor for save in self.graph.saves]

    @cached_property
    def random(self) -> frozenset[int]:
        """Replayed ops that need the generator's state."""
        return frozenset(op for op in self.schedule.replayed if self.graph.ops[op].state_nbytes)

    @property
    def empty(self) -> bool:
        """Nothing is dropped: the recorder need not run at all."""
        return not self.schedule.segments


def _among(ids: set[int], slot: Slot) -> bool:
    return slot.id in ids


class PlannedEngine(Engine):
    """One forward pass under a program."""

    def __init__(self, program: Program, verify: bool = False) -> None:
        super().__init__()
        self.program = program
        self.verify = verify
        self.sums: dict[int, tuple[int, int]] = {}
        self.position = 0
        self.next_save = 0
        self.cursor = BEFORE
        self.by_tensor: dict[int, Slot] = {}
        self.active: set[int] = set()
        self.unmatched = 0
        self.first_unmatched: tuple[int, str] | None = None
        self.unplanned = False

    def wants_state(self) -> bool:
        return self.position in self.program.random

    def recorded(self, func: OpOverload, reads: tuple[Slot, ...], made: list[tuple[Slot, torch.Tensor]]) -> None:
        program, j = self.program, self.position
        if not (j < len(program.names) and func._name == program.names[j] and self._same(reads, made, j)):
            self.unmatched += 1
            if self.first_unmatched is None:
                self.first_unmatched = (j, func._name)
            return
        self.position = j + 1
        holds = program.schedule.holds
        for (slot, t), tensor in zip(made, program.outputs[j], strict=True):
            slot.plan = tensor
            self.by_tensor[tensor] = slot
            if tensor in holds and not slot.empty:
                slot.value = detached(t)
                slot.ok = slot.ok or slot.call is None
                self.active.add(tensor)

    def _same(self, reads: tuple[Slot, ...], made: list[tuple[Slot, torch.Tensor]], j: int) -> bool:
        inputs, outputs = self.program.inputs[j], self.program.outputs[j]
        if len(inputs) != len(reads) or len(outputs) != len(made):
            return False
        tensors = self.program.graph.tensors
        for i, tensor in enumerate(inputs):
            slot = reads[i]
            if slot.plan != tensor:
                if (
                    slot.plan is not None
                    or not slot.external
                    or tensor in self.by_tensor
                    or tensors[tensor].nbytes != slot.nbytes
                ):
                    return False
                slot.plan = tensor
                self.by_tensor[tensor] = slot
        for i, tensor in enumerate(outputs):  # noqa: SIM110 (a generator costs more than the comparison)
            if made[i][0].nbytes != tensors[tensor].nbytes:
                return False
        return True

    def save_of(self, slot: Slot) -> int:
        saved = self.program.saved
        for save in range(self.next_save, min(self.next_save + _LOOK_AHEAD, len(saved))):
            if saved[save] == slot.plan:
                self.next_save = save + 1
                return save
        return BEFORE

    def keeps(self, slot: Slot, t: torch.Tensor) -> bool:
        if slot.plan is None and not slot.external:
            self.unplanned = True  # autograd needs a result that the plan does not know
        if slot.external or slot.stale or slot.plan is None:
            return True
        if slot.value is not None:
            return False
        if not (slot.ok and slot.call is not None and slot.plan in self.program.drops):
            return True
        if self.verify and slot.id not in self.sums:
            with below_autograd():
                self.sums[slot.id] = checksum(t)
        return False

    # -- in backward -------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        with self.lock:
            planned = self.program.segments.get((handle.save, handle.unpacked))
            if planned is not None and planned[0] > self.cursor:
                self.cursor = planned[0]
                self.perform(planned[1], planned[0])
            key = ("unpack", handle.save, handle.unpacked)
            handle.unpacked += 1
            found = super().request(handle)
            if self.sums:
                self._compare(handle.view.slot)
            self._free(key)
            return found

    def _compare(self, slot: Slot) -> None:
        """Rule 8, in the first planned steps: the first rebuild must have the bits that were dropped."""
        then = self.sums.pop(slot.id, None)
        if then is not None and slot.value is not None and slot.call is not None:
            with below_autograd():
                now = checksum(slot.value)
            if now != then:
                raise mismatch(slot.call.func.name(), slot.nbytes)

    def perform(self, steps: Segment, point: int) -> None:
        """Run a segment. What it needs and finds missing is rebuilt on demand."""
        slots = self.tape.slots
        with below_autograd(), flags_of(self.tape):
            for step in steps:
                slot = None
                if isinstance(step, Free):
                    slot = self.by_tensor.get(step.tensor)
                    if slot is not None and step.tensor not in self.active:
                        slot.value = None
                    continue
                outputs = [self.by_tensor.get(t) for t in self.program.graph.ops[step.op].outputs]
                call = next((s.call for s in outputs if s is not None and s.call is not None), None)
                if call is None:
                    continue
                absent = [s for s in call.reads if missing(s)]
                if absent:
                    self.materialise(absent)
                clones = {self.by_tensor[t].id for t in step.clones if t in self.by_tensor}
                run(call, slots, partial(_among, clones))
                self.replayed.append(call.op)
        self.active.update(t for t in self.program.births.get(point, ()) if t in self.by_tensor)

    def _free(self, key: tuple[str, int, int]) -> None:
        for tensor in self.program.frees.get(key, ()):
            self.active.discard(tensor)
            slot = self.by_tensor.get(tensor)
            # what has no recipe goes only with the last node that reads it: a second backward may still ask
            if slot is not None and not slot.pinned and (key[0] == "release" or (slot.call is not None and slot.ok)):
                slot.value = None

    def released(self, handle: Handle) -> None:
        with self.lock:
            slot = handle.view.slot
            self._free(("release", handle.save, 0))
            if slot.handles == 0 and slot.plan not in self.active and not slot.pinned:
                slot.value = None
