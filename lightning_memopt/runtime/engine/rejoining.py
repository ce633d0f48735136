"""Find where in the plan an op belongs that does not match the plan's op at the cursor, because the forward deviates.

If a layer is left out (LayerDrop, stochastic depth), the ops after it read the tensor before it. From then on that tensor
*stands in* for the tensor that was not made. If an op runs more often than planned, it makes a tensor that the plan does not
know, and the next op reads that tensor instead of a tensor of the plan. Parameters are known by their names, so an op that
reads one is found, however many ops did not run.

Nothing in this file can change numbers: a call names the storage versions that it read in this step, and a tensor of the plan
is matched to only one version. Bytes that a rebuild will read are held, or can be rebuilt from bytes that are held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lightning_memopt.graph import BEFORE
from lightning_memopt.record import OpRecord, storage_id
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.rebuild import Versions

REACH = 256
"""Number of ops before and after the cursor that are searched. For an op that reads a parameter, all ops are searched."""
_NEAR = 64
"""Number of ops after the cursor that are searched for an op that reads no known tensor."""
SPREAD = 20
"""The number of a call is the position of its op shifted by this many bits. Calls without a match get numbers in between."""

_ADDING = ("aten::add", "aten::index_add", "aten::mul", "aten::native_layer_norm", "aten::native_batch_norm")
"""Ops on the path around a layer (its residual connection): sums, and norms of them."""
_LINKS = 64
"""Maximum number of tensors on this path that are searched."""

Made = list[tuple[Version, torch.Tensor]]


def number_of(position: int) -> int:
    """The number of the call that is the plan's op at this position."""
    return (position + 1) << SPREAD


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the plan an op belongs.

    position: position of the op in the plan's forward.
    others: (version, planned tensor) of what it reads instead of the plan's tensors.
    """

    position: int
    others: tuple[tuple[Version, int], ...]


class Places:
    """Finds the places of the ops of one forward.

    program: the plan.
    learned: what the engine remembers of earlier forwards.
    versions: the versions of the tape, by id.
    model: returns the model, for the names of its parameters; None where it is not known.
    """

    def __init__(self, learned: Learned, versions: Versions) -> None:
        self.program = learned.program
        self.learned = learned
        self.versions = versions
        self.model: Callable[[], nn.Module | None] = lambda: None
        self._parameters: dict[int, int] | None = None

    def find(self, record: OpRecord, made: Made, at: int) -> Place | None:
        """The place at which most of the tensors that the op reads are the plan's. Of equal places, those from `at` on come
        first, then the nearest one. None if the op is not in the plan.
        """
        best, best_merit = None, (0, 0, 0)
        for j in self.program.places.get(record.func._name, ()):
            if j < at and self.program.passes(j):
                continue  # it may have run unrecorded
            candidate = self._place(record, made, j, at)
            if candidate is None:
                continue
            known, place = candidate
            merit = (known, int(j >= at), -abs(j - at))
            near = j == at or (at < j <= at + _NEAR and self._met_first(record, j))
            if (known or near) and (best is None or merit > best_merit):
                best, best_merit = place, merit
        return best

    def _met_first(self, record: OpRecord, j: int) -> bool:
        """Whether the op reads only one tensor, an activation that no recorded op made. It may be the next op of its name."""
        first = record.reads[0] if len(record.reads) == 1 else None
        return first is not None and first.external and self.program.graph.tensors[self.program.inputs[j][0]].born_at != BEFORE

    def _place(self, record: OpRecord, made: Made, j: int, at: int) -> tuple[int, Place] | None:
        """(number of inputs of the plan's op `j` that the op is known to read, the place); None if it cannot be that op."""
        program, versions, fits = self.program, self.versions, self.learned.fits
        inputs, outputs = program.inputs[j], program.outputs[j]
        if len(inputs) != len(record.reads) or len(outputs) != len(made) or any(tensor in versions for tensor in outputs):
            return None
        known, parameters, others = 0, 0, []
        for version, tensor in zip(record.reads, inputs, strict=True):
            planned = program.graph.tensors[tensor]
            matched = version.holding.tensor
            if versions.get(tensor) is version:
                known += 0 if version.external else 1
                parameters += 1 if planned.kind == "parameter" else 0
            elif planned.kind == "parameter" and self.parameters.get(storage_of(version), tensor) != tensor:
                return None
            elif matched is None and version.external and tensor not in versions and fits(version, tensor):
                parameters += 1 if planned.kind == "parameter" else 0  # it is matched when an op first reads it
            elif planned.born_at == BEFORE or not self._replaces(version, tensor, j):
                return None
            else:
                known += 1 if self._follows(tensor, matched) else 0
                others.append((version, tensor))
        if abs(j - at) > REACH and not parameters:
            return None
        all_fit = all(fits(version, tensor) for (version, _), tensor in zip(made, outputs, strict=True))
        if not all_fit and (j != at or others or not known):
            return None  # sizes may depend on data although no tag says so; then all else must be as planned
        known += parameters
        if others and not outputs:
            return None  # a view does not show where the op belongs
        if not known and any(tensor in versions and v.holding.tensor is not None for v, tensor in others):
            return None
        return known, Place(j, tuple(others))

    def _replaces(self, version: Version, tensor: int, j: int) -> bool:
        """Whether the version may be read where the plan reads `tensor`, which the forward makes.

        The call that made it must have a lower number than the calls that read it, because rebuilds run in that order.
        """
        if not self.learned.fits(version, tensor) or version.exposed or version.stale or version.empty:
            return False
        before = j if tensor in self.versions else self.program.graph.producers[tensor].id
        return version.call is None or version.call.op < number_of(before)

    def _follows(self, tensor: int, before: int | None) -> bool:
        """Whether a layer of the plan adds to the tensor `before` to make `tensor`. If the layer is left out, `before` is
        read.
        """
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
        """Storage of a parameter of the model -> its tensor of the plan."""
        if self._parameters is None:
            model = self.model()
            named = {t.name: t for t in self.program.graph.tensors if t.kind == "parameter"}
            tensors = {}
            for name, p in model.named_parameters() if model is not None else ():
                planned = named.get(name)
                if planned is not None and self.learned.fits_storage(p.untyped_storage().nbytes(), p.device, planned.id):
                    tensors[storage_id(p)] = planned.id
            self._parameters = tensors
        return self._parameters


def storage_of(version: Version) -> int:
    """`storage_id` of the version's value; 0 if it has no value."""
    value = version.holding.value
    return 0 if value is None else storage_id(value)


def starts_of(version: Version, versions: Versions) -> set[int] | None:
    """Ids of the versions from which a rebuild of the version starts; None if it cannot be rebuilt."""
    starts: set[int] = set()
    wanted, seen = [version], {version.id}
    while wanted:
        version = wanted.pop()
        call = version.call
        if call is None or not (call.repeats and (version.holding.reachable or version.empty)):
            if version.holding.value is None:
                return None
            starts.add(version.id)
            continue
        for id in call.reads:
            source = versions[id]
            if source.id not in seen:
                seen.add(source.id)
                wanted.append(source)
    return starts
