"""Predict a step at any batch size from the same step observed at two sizes: each dimension and time is `a + b * size`.

Bytes are computed from the dimensions, so tensors that grow with the square of the batch (the logits of a contrastive loss)
are exact too. If the dimensions of a tensor are unknown, its bytes are taken as linear. Both steps must have the same ops on
the same tensors in the same order, backward and update included; otherwise `fit` raises FitError, naming the difference.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import MemOptError
from lightning_memopt.graph import Graph, Op, Tensor


class FitError(MemOptError, ValueError):
    """Two recorded steps are not the same step at two batch sizes, or its tensors do not grow linearly.

    Remedy: nothing needs to be done: sizes are then tried by real steps.
    """


@cache
def itemsize(dtype: str) -> int | None:
    """Bytes of an element: "float32" 4, "bool" 1, "float8_e4m3fn" 1; None if the name does not say."""
    if dtype == "bool":
        return 1
    match = re.match(r"[a-z]+(\d+)", dtype)
    if match is None:
        return None
    return int(match[1]) // 8 or None


def _allocated(dtype: str, size: tuple[int, ...], device: str) -> int | None:
    """Bytes that the device's allocator gives to a tensor that fills its storage; None if the dtype is unknown."""
    item = itemsize(dtype)
    if item is None:
        return None
    return kind_of(device).allocated_nbytes(math.prod(size) * item)


@dataclass(frozen=True, eq=False)
class StepFit:
    """A training step at any batch size: `at(size)`.

    small: graph of the step at the smaller observed size.
    large: graph of the step at the larger observed size.
    sizes: the two observed sizes, in samples, the smaller one first.
    """

    small: Graph
    large: Graph
    sizes: tuple[int, int]

    def at(self, size: int) -> Graph:
        """The graph of the step at this batch size. Bytes are exact or rounded up; seconds are not negative."""
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._at(size)
            self._graphs[size] = graph
        return graph

    @cached_property
    def _graphs(self) -> dict[int, Graph]:
        return {}

    @property
    def _span(self) -> int:
        return self.sizes[1] - self.sizes[0]

    def _count(self, small: int, large: int, size: int) -> int:
        """The line through a count (bytes, FLOPs) at both sizes, rounded up; a count that falls keeps its larger value."""
        if large <= small:
            return small
        return max(0, small - (small - large) * (size - self.sizes[0]) // self._span)

    def _seconds(self, small: float, large: float, size: int) -> float:
        """The line through the seconds at both sizes, at least 0; seconds that fall keep their larger value."""
        return max(0.0, small + max(0.0, large - small) * (size - self.sizes[0]) / self._span)

    def _dimensions(self, small: tuple[int, ...], large: tuple[int, ...], size: int) -> tuple[int, ...] | None:
        """The line through each dimension at both sizes; None if one is not a whole number of 0 or more."""
        dimensions = []
        for a, b in zip(small, large, strict=True):
            growth, remainder = divmod((b - a) * (size - self.sizes[0]), self._span)
            if remainder or a + growth < 0:
                return None
            dimensions.append(a + growth)
        return tuple(dimensions)

    @cached_property
    def _tensors(self) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, bool, tuple[int, ...] | None]]]:
        """All tensors as they are at every size, and those of them that change: (at the smaller size, at the larger size,
        whether their dimensions say their bytes, by how much each dimension grows with the size, if these are whole numbers).
        """
        lasting, changing = [], []
        for a, b in zip(self.small.tensors, self.large.tensors, strict=True):
            freed_at = max(a.freed_at, b.freed_at)
            a = a if freed_at == a.freed_at else replace(a, freed_at=freed_at)
            lasting.append(a)
            if a.nbytes != b.nbytes or a.size != b.size:
                alike = a.dtype == b.dtype and len(a.size) == len(b.size)
                known = alike and all(_allocated(t.dtype, t.size, self.small.device) == t.nbytes for t in (a, b))
                grown = [e - d for d, e in zip(a.size, b.size, strict=True)] if known else []
                whole = known and not any(n % self._span for n in grown)
                changing.append((a, b, known, tuple(n // self._span for n in grown) if whole else None))
        return lasting, changing

    def _tensor(self, a: Tensor, b: Tensor, is_known: bool, slopes: tuple[int, ...] | None, size: int) -> Tensor:
        if slopes is None:
            dimensions = self._dimensions(a.size, b.size, size) if is_known else None
        else:
            more = size - self.sizes[0]
            dimensions = tuple([d + slope * more for d, slope in zip(a.size, slopes, strict=True)])
            if min(dimensions, default=0) < 0:
                dimensions = None
        nbytes = _allocated(a.dtype, dimensions, self.small.device) if dimensions is not None else None
        if dimensions is None or nbytes is None:
            return replace(a, dtype="", size=(), nbytes=self._count(a.nbytes, b.nbytes, size))
        return Tensor(  # `replace` takes three times as long
            id=a.id,
            name=a.name,
            nbytes=nbytes,
            kind=a.kind,
            storage=a.storage,
            born_at=a.born_at,
            freed_at=a.freed_at,
            dtype=a.dtype,
            size=dimensions,
            windows=a.windows,
        )

    @cached_property
    def _ops(self) -> tuple[list[Op], list[tuple[Op, Op]]]:
        """All ops as they are at every size, and those of them that change, at both sizes."""
        lasting, changing = [], []
        for a, b in zip(self.small.ops, self.large.ops, strict=True):
            recomputable = a.recomputable and b.recomputable
            a = a if recomputable == a.recomputable else replace(a, recomputable=recomputable)
            lasting.append(a)
            if (a.seconds, a.workspace_nbytes, a.flops) != (b.seconds, b.workspace_nbytes, b.flops):
                changing.append((a, b))
        return lasting, changing

    def _op(self, a: Op, b: Op, size: int) -> Op:
        seconds = self._seconds(a.seconds, b.seconds, size)
        workspace_nbytes = self._count(a.workspace_nbytes, b.workspace_nbytes, size)
        return replace(a, seconds=seconds, workspace_nbytes=workspace_nbytes, flops=self._count(a.flops, b.flops, size))

    def _at(self, size: int) -> Graph:
        ops, changing_ops = self._ops
        ops = ops.copy()
        for small, large in changing_ops:
            ops[small.id] = self._op(small, large, size)
        tensors, changing = self._tensors
        tensors = tensors.copy()
        for a, b, is_known, slopes in changing:
            tensors[a.id] = self._tensor(a, b, is_known, slopes, size)
        return replace(self.large, ops=tuple(ops), tensors=tuple(tensors), step_seconds=sum(op.seconds for op in ops))


def fit(small: Graph, large: Graph, sizes: tuple[int, int]) -> StepFit:
    """Fit a step from its graphs at two batch sizes; `sizes` are in samples, the smaller one first.

    Raises FitError, naming the first difference, if the graphs are not the same step.
    """
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
        whole = (u.nbytes - t.nbytes) % (sizes[1] - sizes[0]) == 0 or kind_of(small.device).block_nbytes > 1
        if not whole and u.size == t.size:
            raise FitError(f"Tensor {t.id} ({t.name}) has {t.nbytes} and {u.nbytes} bytes: no whole number of bytes a sample.")
    return StepFit(small, large, sizes)
