"""A step recorded on this CPU at two batch sizes, as a card would run it at any: what its ops move, and what that takes.

An op takes `max(FLOPs / rate, bytes / bandwidth) + launch` (the roofline). FLOPs and bytes follow the batch size, seconds are
computed from them at that size: what a launch hides at one size is not what it hides at another. Bytes are those of the views
that an op reads and writes, not of the storages that they are pieces of: a cell reads one moment of a sequence.
Nothing here is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memopt import jsonio
from lightning_memopt.batching.fit import StepFit, fit
from lightning_memopt.graph import Graph, Op, graph_from_json, graph_to_json
from lightning_memopt.plan.rates import Device
from lightning_memopt.record import storage_id
from lightning_memopt.trace import Tracer

KEPT = 8
"""Graphs of a fitted step that are kept, each some hundred MiB."""
_NO_KERNEL = ("aten::empty", "aten::new_empty")
_ADDS = ("aten::add", "aten::add_")


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a card makes of an op.

    `hidden`: launches run ahead, so that an op takes the longer of its launch and its work, not both. `adds_free`: gradients of
    weights are accumulated by the matrix products that make them (BLAS's beta = 1) and not by ops of their own.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    hidden: bool = False
    adds_free: bool = False

    def seconds(self, op: Op, flops: float, nbytes: float, grows: bool) -> float:
        """Of an op. `grows`: whether its bytes follow the batch size."""
        if not op.outputs or op.name.startswith(_NO_KERNEL):  # a view, an allocation
            return 0.0
        if self.adds_free and not grows and op.phase == "backward" and op.name.partition(".")[0] in _ADDS:
            return 0.0
        work = max(flops / self.flops_per_second, nbytes / self.bytes_per_second)
        return max(work, self.launch_seconds) if self.hidden else work + self.launch_seconds

    @classmethod
    def of(cls, device: Device, efficiency: float) -> Price:
        """A card's, in float32. `efficiency`: the share of its FLOP rate that ops get."""
        return cls(
            flops_per_second=efficiency * device.flops_per_second["float32"],
            bytes_per_second=device.bytes_per_second,
            launch_seconds=device.launch_seconds,
        )


@dataclass(frozen=True)
class Step:
    """A recorded step, and the bytes that each op reads and writes."""

    graph: Graph
    moved: tuple[int, ...]

    def write(self, path: Path) -> None:
        jsonio.write(path, {"graph": graph_to_json(self.graph), "moved": list(self.moved)})

    @classmethod
    def read(cls, path: Path) -> Step:
        found: Any = jsonio.read(path)
        return cls(graph_from_json(found["graph"]), tuple(found["moved"]))


@dataclass(frozen=True, eq=False)
class PricedFit(StepFit):
    """The step at any batch size, in the seconds that `price` gives its ops there."""

    moved: tuple[tuple[int, ...], tuple[int, ...]]
    price: Price

    def at(self, size: int) -> Graph:
        while size not in self._graphs and len(self._graphs) >= KEPT:
            self._graphs.pop(next(iter(self._graphs)))
        return super().at(size)

    def bytes_moved(self, op: int, size: int) -> int:
        return self._count(self.moved[0][op], self.moved[1][op], size)

    def priced(self, price: Price, size: int) -> list[float]:
        """Seconds of every op."""
        found = []
        for a, b in zip(self.small.ops, self.large.ops, strict=True):
            one, other = self.moved[0][a.id], self.moved[1][a.id]
            flops, nbytes = self._count(a.flops, b.flops, size), self._count(one, other, size)
            found.append(price.seconds(a, flops, nbytes, one != other))
        return found

    def _at(self, size: int) -> Graph:
        graph = super()._at(size)
        seconds = self.priced(self.price, size)
        ops = tuple(replace(op, seconds=s) for op, s in zip(graph.ops, seconds, strict=True))
        return replace(graph, ops=ops, step_seconds=sum(seconds))


def priced(steps: tuple[Step, Step], sizes: tuple[int, int], price: Price) -> PricedFit:
    """Raises FitError where the steps are not the same one at two sizes."""
    both = fit(steps[0].graph, steps[1].graph, sizes)
    return PricedFit(both.small, both.large, sizes, (steps[0].moved, steps[1].moved), price)


def _nbytes(t: Tensor) -> int:
    """Bytes that reading or writing all of it moves: an expanded dimension is there once."""
    count = 1
    for n, stride in zip(t.shape, t.stride(), strict=True):
        count *= n if stride or not n else 1
    return count * t.element_size()


def _tensors(*values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


@contextlib.contextmanager
def counting_moved() -> Iterator[list[int]]:
    """The bytes that each op reads and writes, of all steps that are observed within this context."""
    moved: list[int] = []
    end = Tracer.end

    def counted(self: Tracer, record: Any, args: tuple, kwargs: dict, out: Any) -> None:
        read = {(storage_id(t), t.storage_offset(), t.shape, t.stride()): _nbytes(t) for t in _tensors(args, kwargs)}
        moved.append(sum(read.values()) + sum(map(_nbytes, _tensors(out))))
        end(self, record, args, kwargs, out)

    with mock.patch.object(Tracer, "end", counted):
        yield moved


def recorded(observe: Callable[[int], Step], name: str, sizes: tuple[int, int], traces: Path | None) -> tuple[Step, Step]:
    """Steps at two sizes, from files in `traces` where they are there already."""

    def one(size: int) -> Step:
        path = traces / f"{name}_{size}.json" if traces else None
        if path is not None and path.exists():
            return Step.read(path)
        step = observe(size)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            step.write(path)
        return step

    return one(sizes[0]), one(sizes[1])
