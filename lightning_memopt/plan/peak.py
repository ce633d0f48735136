"""The bytes in memory at the peak of a plan, by layer and by purpose.

They add up to the simulator's peak, to the byte. Source: Echo (ISCA 2020), section III-B and figures 4, 16, 21, 23: *by layer
types* and *by data structures*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_memopt.graph import BEFORE, Graph, Tensor
from lightning_memopt.plan.lower import Rebuild, Schedule, lower
from lightning_memopt.plan.model import Life
from lightning_memopt.plan.simulate import simulate

STRUCTURES = (
    "feature maps",
    "held to rebuild",
    "rebuilt",
    "generator states",
    "in use",
    "gradients",
    "workspace",
    "weights",
    "optimizer state",
    "inputs",
)
"""The purposes of bytes. `feature maps`: held because autograd saves them. `held to rebuild`: autograd does not save them, but
rebuilds start from them. `rebuilt`: made again by ops. `in use`: user code, or the step itself, holds them at that moment.
`gradients`: made by backward.
"""
_KINDS = {"parameter": "weights", "buffer": "weights", "optimizer_state": "optimizer state", "input": "inputs"}
LayerOf = Callable[[str], str]


@dataclass(frozen=True)
class Breakdown:
    """Bytes by (layer, structure)."""

    nbytes: dict[tuple[str, str], int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())

    def by(self, axis: int) -> Counter[str]:
        """Bytes by layer (axis 0) or by structure (axis 1)."""
        totals: Counter[str] = Counter()
        for key, nbytes in self.nbytes.items():
            totals[key[axis]] += nbytes
        return totals


def layer_of(scope: str) -> str:
    """A module's path, alike for all repetitions of a block: `h.3.mlp#1` is `h.*.mlp`."""
    path = scope.partition("#")[0].split(".")
    return ".".join("*" if part.isdigit() else part for part in path) or "the model itself"


def layer_name(graph: Graph, tensor: Tensor, layer: LayerOf) -> str:
    """The layer that a tensor belongs to; where it has none, what it is, or the phase that made it."""
    if tensor.born_at == BEFORE:
        path = tensor.name.removesuffix(".grad")
        named = tensor.kind in ("parameter", "buffer", "gradient")
        return layer(path.rpartition(".")[0]) if named else tensor.name
    op = graph.producers.get(tensor.id)
    if op is None:
        return tensor.name  # of what is not recorded
    return layer(op.scope) if op.phase == "forward" else op.phase


def at_peak(graph: Graph, lives: Iterable[Life], layer: LayerOf = layer_of) -> Breakdown:
    """What is in memory at the peak of a plan; `total` is the peak that `simulate` predicts."""
    lives = tuple(lives)
    schedule = lower(graph, lives)
    timeline = simulate(graph, lives, schedule)
    point = timeline.peak_at
    parts = list(_at_rest(graph, lives, schedule, point, births=True))
    if sum(nbytes for *_, nbytes in parts) < timeline.predicted.peak_nbytes:
        parts = [*_at_rest(graph, lives, schedule, point, births=False), *_in_segment(graph, schedule, point)]
    totals: Counter[tuple[str, str]] = Counter()
    for where, structure, nbytes in parts:
        totals[layer(where) if isinstance(where, str) else layer_name(graph, where, layer), structure] += nbytes
    return Breakdown({key: nbytes for key, nbytes in totals.items() if nbytes})


_Part = tuple[Tensor | str, str, int]
"""(a tensor, or the scope of an op; its structure; bytes)"""


def _at_rest(graph: Graph, lives: Sequence[Life], schedule: Schedule, point: int, births: bool) -> Iterator[_Part]:
    """The parts in memory at a point, without those that a segment makes on the way. `births`: with lives that begin there."""
    for t in graph.tensors:
        if t.there(point):
            yield t, _structure(graph, t, point), t.nbytes
    for life in lives:
        t = graph.tensors[life.tensor]
        if life.how == "original" and max(life.born_at, t.freed_at + 1) <= point <= life.freed_at:
            yield t, "feature maps" if graph.saved_until(t.id) >= point else "held to rebuild", t.nbytes
        elif life.how == "rebuild" and life.born_at <= point <= life.freed_at and (births or life.born_at < point):
            yield t, "rebuilt", t.nbytes
    for op_id in schedule.rebuilt:
        op = graph.ops[op_id]
        if op.at <= point <= graph.last_release:
            yield op.scope, "generator states", op.state_nbytes
    if graph.points[point].kind == "op":
        op = graph.ops[graph.points[point].id]
        yield (op.scope if op.phase == "forward" else op.phase), "workspace", op.workspace_nbytes


def _structure(graph: Graph, t: Tensor, point: int) -> str:
    if t.born_at == BEFORE:
        return _KINDS.get(t.kind, "gradients")
    if t.kind == "gradient":
        return "gradients"
    return "feature maps" if graph.saved_until(t.id) >= point and t.kind == "activation" else "in use"


def _in_segment(graph: Graph, schedule: Schedule, point: int) -> list[_Part]:
    """The parts that the segment at a point has made and not freed, at its worst moment."""
    there: Counter[int] = Counter()
    now = most = 0
    worst: list[_Part] = []
    for step in schedule.segments.get(point, ()):
        if isinstance(step, Rebuild):
            op = graph.ops[step.op]
            new = {made for _, made in op.mutates}
            for t in (*(t for t in op.outputs if t not in new), *step.clones):
                there[t] += 1
                now += graph.tensors[t].nbytes
            if now + op.workspace_nbytes > most:
                most = now + op.workspace_nbytes
                worst = [(graph.tensors[t], "rebuilt", n * graph.tensors[t].nbytes) for t, n in there.items() if n]
                worst.append((op.scope, "workspace", op.workspace_nbytes))
        else:
            there[step.tensor] -= 1
            now -= graph.tensors[step.tensor].nbytes
    return worst
