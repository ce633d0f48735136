"""A step at any batch size, from the same step recorded at two: every dimension, byte count and time is a + b * size.

Only dimensions have to be linear. Bytes follow from them, so that what grows with the square of the batch (the logits of a
contrastive loss) is exact too; a tensor that no dimensions are known of has linear bytes. Both steps must be the same ops on
the same tensors in the same order, backward and update included; `fit` says where they are not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_memopt.errors import MemOptError
from lightning_memopt.graph import Graph, Op, Tensor

_CUDA_ROUND = 512


class FitError(MemOptError, ValueError):
    """Two recorded steps are not the same step at two batch sizes, or its tensors do not grow linearly."""


def itemsize(dtype: str) -> int | None:
    """Bytes of an element: "float32" 4, "bool" 1, "float8_e4m3fn" 1; None where the name does not say."""
    if dtype == "bool":
        return 1
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) // 8 or None if found else None


def _allocated(dtype: str, size: tuple[int, ...], device: str) -> int | None:
    """Bytes that the device's allocator gives for a tensor that fills its storage."""
    item = itemsize(dtype)
    if item is None:
        return None
    nbytes = math.prod(size) * item
    return -(-nbytes // _CUDA_ROUND) * _CUDA_ROUND if device == "cuda" else nbytes


@dataclass(frozen=True, eq=False)
class StepFit:
    """The step at two sizes; `at` gives it at any."""

    small: Graph
    large: Graph
    sizes: tuple[int, int]

    def at(self, size: int) -> Graph:
        """The step at this batch size. Bytes are exact or rounded up, times are not below 0."""
        found = self._made.get(size)
        if found is None:
            found = self._made[size] = self._at(size)
        return found

    @cached_property
    def _made(self) -> dict[int, Graph]:
        return {}

    @property
    def _span(self) -> int:
        return self.sizes[1] - self.sizes[0]

    def _nbytes(self, one: int, other: int, size: int) -> int:
        """The line through two counts, rounded up; one that falls with the size is held at its larger value."""
        if other <= one:
            return one
        return max(0, one - (one - other) * (size - self.sizes[0]) // self._span)

    def _seconds(self, one: float, other: float, size: int) -> float:
        return max(0.0, one + max(0.0, other - one) * (size - self.sizes[0]) / self._span)

    def _dimensions(self, one: tuple[int, ...], other: tuple[int, ...], size: int) -> tuple[int, ...] | None:
        """None where a dimension is not on a line of whole numbers."""
        found = []
        for a, b in zip(one, other, strict=True):
            step, rest = divmod((b - a) * (size - self.sizes[0]), self._span)
            if rest or a + step < 0:
                return None
            found.append(a + step)
        return tuple(found)

    def _tensor(self, a: Tensor, b: Tensor, size: int) -> Tensor:
        freed_at = max(a.freed_at, b.freed_at)
        if a.nbytes == b.nbytes and a.size == b.size:
            return replace(a, freed_at=freed_at)
        device = self.small.device
        if a.dtype == b.dtype and len(a.size) == len(b.size):
            known = all(_allocated(t.dtype, t.size, device) == t.nbytes for t in (a, b))
            dimensions = self._dimensions(a.size, b.size, size) if known else None
            nbytes = _allocated(a.dtype, dimensions, device) if dimensions is not None else None
            if dimensions is not None and nbytes is not None:
                return replace(a, freed_at=freed_at, size=dimensions, nbytes=nbytes)
        return replace(a, freed_at=freed_at, dtype="", size=(), nbytes=self._nbytes(a.nbytes, b.nbytes, size))

    def _op(self, a: Op, b: Op, size: int) -> Op:
        return replace(
            a,
            seconds=self._seconds(a.seconds, b.seconds, size),
            workspace_nbytes=self._nbytes(a.workspace_nbytes, b.workspace_nbytes, size),
            flops=self._nbytes(a.flops, b.flops, size),
            recomputable=a.recomputable and b.recomputable,
        )

    def _at(self, size: int) -> Graph:
        ops = tuple(self._op(a, b, size) for a, b in zip(self.small.ops, self.large.ops, strict=True))
        tensors = tuple(self._tensor(a, b, size) for a, b in zip(self.small.tensors, self.large.tensors, strict=True))
        return replace(self.large, ops=ops, tensors=tensors, step_seconds=sum(op.seconds for op in ops))


def fit(small: Graph, large: Graph, sizes: tuple[int, int]) -> StepFit:
    """The step at any size, from its graphs at `sizes`, the smaller one first. Raises FitError naming the first difference."""
    if not 0 < sizes[0] < sizes[1]:
        raise FitError(f"A fit needs two batch sizes, the smaller one first, not {sizes}.")
    for a, b in zip(small.ops, large.ops, strict=False):
        where = f"op {a.id} ({a.name} in {a.scope or a.phase}) at batch {sizes[0]}"
        if (a.name, a.phase) != (b.name, b.phase):
            raise FitError(f"{where} is {b.name} ({b.phase}) at batch {sizes[1]}: the step depends on the batch size.")
        if (a.inputs, a.outputs, a.mutates) != (b.inputs, b.outputs, b.mutates):
            raise FitError(f"{where} reads or makes other tensors at batch {sizes[1]}: the step depends on the batch size.")
    if len(small.ops) != len(large.ops) or len(small.tensors) != len(large.tensors):
        raise FitError(
            f"The step has {len(small.ops)} ops and {len(small.tensors)} tensors at batch {sizes[0]}, {len(large.ops)} and "
            f"{len(large.tensors)} at batch {sizes[1]}."
        )
    if small.points != large.points or small.saves != large.saves:
        raise FitError(f"Autograd saves, or asks for, other tensors at batch {sizes[1]} than at batch {sizes[0]}.")
    for t, u in zip(small.tensors, large.tensors, strict=True):
        if (t.kind, t.storage, t.born_at) != (u.kind, u.storage, u.born_at):
            raise FitError(f"Tensor {t.id} ({t.name}) is another one at batch {sizes[1]}.")
        if u.nbytes < t.nbytes:
            raise FitError(f"Tensor {t.id} ({t.name}) shrinks from {t.nbytes} to {u.nbytes} bytes as the batch grows.")
        whole = (u.nbytes - t.nbytes) % (sizes[1] - sizes[0]) == 0 or small.device == "cuda"
        if not whole and u.size == t.size:
            raise FitError(f"Tensor {t.id} ({t.name}) has {t.nbytes} and {u.nbytes} bytes: no whole number of bytes a sample.")
    return StepFit(small, large, sizes)
