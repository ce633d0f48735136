"""Where an op belongs that does not read or make what the plan has at its position: how forwards that vary find back to it.

A layer is left out (LayerDrop, stochastic depth): what follows reads the tensor before it, which from then on *stands in* for
the one that was not made. An op that runs more often than planned makes a tensor the plan does not know, which the next op
reads *in place* of the last one it knows. Parameters are known by their names, so they tell where a forward is, however much
of it did not run.

Nothing here can change a number: a call names the slots that it read in this step, and a name of the plan, once given to a
slot, is not given to another. What a rebuild will read is held, or seen to be within reach of what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_memopt.graph import BEFORE
from lightning_memopt.record import OpRecord, Slot, storage_id
from lightning_memopt.runtime.program import Program

REACH = 256
"""How far from its position an op is looked for, where some planned ops did not run or run later; one that reads a parameter
is looked for everywhere."""
_NEAR = 64
"""How far ahead of its position an op is looked for that reads nothing known."""
SPREAD = 20
"""Calls are numbered by the plan's op shifted by this many bits: room for unmatched ones between two matched ones."""

_ADDING = ("aten::add", "aten::index_add", "aten::mul", "aten::native_layer_norm", "aten::native_batch_norm")
"""Ops of the way past a layer: sums, and norms of them."""
_LINKS = 64
"""Tensors of that way that are looked at."""

Made = list[tuple[Slot, torch.Tensor]]


def number_of(position: int) -> int:
    """The number of the call that is the plan's op at this position."""
    return (position + 1) << SPREAD


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op belongs: its position, and what it reads there of other slots than the plan's: (slot, planned tensor)."""

    position: int
    others: tuple[tuple[Slot, int], ...]


class Places:
    """Finds where ops of one forward belong. `slots`: those of the tape. `model`: whose parameters have the names to go by."""

    def __init__(self, program: Program, slots: Mapping[int, Slot]) -> None:
        self.program = program
        self.slots = slots
        self.model: Callable[[], nn.Module | None] = lambda: None
        self._parameters: dict[int, int] | None = None

    def find(self, record: OpRecord, made: Made, at: int) -> Place | None:
        """The position that most of what the op reads speaks for, of these the nearest, those ahead of `at` first."""
        best, merit = None, (0, 0, 0)
        for j in self.program.places.get(record.func._name, ()):
            if j < at and self.program.passes(j):
                continue  # it may have run unrecorded
            found = self._place(record, made, j, at)
            if found is None:
                continue
            known, place = found
            new = (known, int(j >= at), -abs(j - at))
            near = j == at or (at < j <= at + _NEAR and self._met_first(record, j))
            if (known or near) and (best is None or new > merit):
                best, merit = place, new
        return best

    def _met_first(self, record: OpRecord, j: int) -> bool:
        """Whether the op reads but one tensor, an activation that nobody recorded: the next of its name may be meant."""
        first = record.reads[0] if len(record.reads) == 1 else None
        return first is not None and first.external and self.program.graph.tensors[self.program.inputs[j][0]].born_at != BEFORE

    def _place(self, record: OpRecord, made: Made, j: int, at: int) -> tuple[int, Place] | None:
        """How many tensors of the plan's op `j` are known to be read, and what is read in place of the others; None where it
        cannot be that op.
        """
        program, slots = self.program, self.slots
        inputs, outputs = program.inputs[j], program.outputs[j]
        if len(inputs) != len(record.reads) or len(outputs) != len(made) or not slots.keys().isdisjoint(outputs):
            return None
        known, parameters, others = 0, 0, []
        for slot, tensor in zip(record.reads, inputs, strict=True):
            planned = program.graph.tensors[tensor]
            if slots.get(tensor) is slot:
                known += not slot.external
                parameters += planned.kind == "parameter"
            elif planned.kind == "parameter" and self.parameters.get(storage_of(slot), tensor) != tensor:
                return None
            elif slot.plan is None and slot.external and tensor not in slots and program.fits(slot.nbytes, tensor):
                parameters += planned.kind == "parameter"  # what nobody recorded is matched where it is first met
            elif planned.born_at == BEFORE or not self._replaces(slot, tensor, j):
                return None
            else:
                known += self._follows(tensor, slot.plan)
                others.append((slot, tensor))
        if abs(j - at) > REACH and not parameters:
            return None
        fits = all(program.fits(slot.nbytes, tensor) for (slot, _), tensor in zip(made, outputs, strict=True))
        if not fits and (j != at or others or not known):
            return None  # data decides on sizes in ways that torch does not say; then all else must be as planned
        known += parameters
        if others and not outputs:
            return None  # a view says nothing
        if not known and any(tensor in slots and slot.plan is not None for slot, tensor in others):
            return None
        return known, Place(j, tuple(others))

    def _replaces(self, slot: Slot, tensor: int, j: int) -> bool:
        """Whether the slot may be read where the plan reads `tensor`, which forward makes.

        It must have been made by a call with a lower number than those that read it: rebuilds run in that order.
        """
        if not self.program.fits(slot.nbytes, tensor) or slot.exposed or slot.stale or slot.empty:
            return False
        before = j if tensor in self.slots else self.program.graph.producers[tensor].id
        return slot.call is None or slot.call.op < number_of(before)

    def _follows(self, tensor: int, before: int | None) -> bool:
        """Whether a layer makes the plan's tensor from another one by adding to it: it follows where the layer is left out."""
        graph, seen = self.program.graph, {tensor}
        wanted = [tensor] if before is not None else []
        while wanted and len(seen) < _LINKS:
            made = wanted.pop()
            op = graph.producers.get(made)
            if op is None or not op.name.startswith(_ADDING):
                continue
            if before in op.inputs:
                return True
            size = graph.tensors[made].nbytes
            links = [t for t in op.inputs if t not in seen and graph.tensors[t].nbytes == size]
            seen.update(links)
            wanted.extend(links)
        return False

    @property
    def parameters(self) -> dict[int, int]:
        """Storage -> the plan's tensor, of the model's parameters."""
        if self._parameters is None:
            model = self.model()
            named = {t.name: t for t in self.program.graph.tensors if t.kind == "parameter"}
            found = {}
            for name, p in model.named_parameters() if model is not None else ():
                planned = named.get(name)
                if planned is not None and self.program.fits(p.untyped_storage().nbytes(), planned.id):
                    found[storage_id(p)] = planned.id
            self._parameters = found
        return self._parameters


def storage_of(slot: Slot) -> int:
    """`storage_id` of what the slot holds; 0 where it holds nothing."""
    return 0 if slot.value is None else storage_id(slot.value)


def starts_of(slot: Slot, slots: Mapping[int, Slot]) -> set[int] | None:
    """The slots that a rebuild of this one starts from and that nothing can make again; None where it cannot be rebuilt."""
    found: set[int] = set()
    wanted, seen = [slot], {slot.id}
    while wanted:
        s = wanted.pop()
        call = s.call
        if call is None or not (call.repeats and (s.ok or s.empty)):
            if s.value is None:
                return None
            found.add(s.id)
            continue
        for id in call.reads:
            source = slots[id]
            if source.id not in seen:
                seen.add(source.id)
                wanted.append(source)
    return found
