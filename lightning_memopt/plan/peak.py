"""The bytes in memory in a planned step by purpose (`stacks`), and those at its peak also by layer (`at_peak`).

They add up exactly to the simulator's figures. Source: Echo (ISCA 2020), section III-B and figures 4, 16, 21, 23: *by
layer types* and *by data structures*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_memopt.graph import BEFORE, POOLS, Graph, Levels, Op, Tensor
from lightning_memopt.plan.logits import logits
from lightning_memopt.plan.lower import Free, Rebuild, Schedule, lower
from lightning_memopt.plan.model import Life
from lightning_memopt.plan.simulate import encoded, simulate, states

STRUCTURES = (
    "feature maps",
    "logits",
    "held to rebuild",
    "rebuilt",
    "fetched",
    "encoded",
    "generator states",
    "in use",
    "gradients",
    "workspace",
    "weights",
    "optimizer state",
    "inputs",
    POOLS,
    "outside the step",
)
"""The purposes of bytes. `feature maps`: held because autograd saves them. `logits`: what `plan.logits` finds, whether autograd
saves it, a plan holds or rebuilds it, or it passes by. `held to rebuild`: autograd does not save them, but
rebuilds start from them. `rebuilt`: made again by ops. `fetched`: parked before, and in memory again. `encoded`: in the form
of a codec. `in use`: user code, or the step itself, holds them at that moment.
`gradients`: those of parameters; all other tensors that backward makes are `in use`. `outside the step`: memory that was there
before the step and is not part of it, such as the data set or another model.
"""
_KINDS = {
    "parameter": "weights",
    "buffer": "weights",
    "optimizer_state": "optimizer state",
    "input": "inputs",
    "gradient": "gradients",
}
_WHOEVER_HOLDS_IT = ("feature maps", "held to rebuild", "rebuilt", "fetched", "in use")
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
    """A module's path without numbers, so that all repetitions of a block have the same: `h.3.mlp#1` becomes `h.*.mlp`."""
    path = scope.partition("#")[0].split(".")
    return ".".join("*" if part.isdigit() else part for part in path) or "the model itself"


def layer_name(graph: Graph, tensor: Tensor, layer: LayerOf) -> str:
    """The layer that a tensor belongs to. If it has none: what the tensor is, or the phase that made it."""
    if tensor.born_at == BEFORE:
        path = tensor.name.removesuffix(".grad")
        named = tensor.kind in ("parameter", "buffer", "gradient")
        return layer(path.rpartition(".")[0]) if named else tensor.name
    op = graph.producers.get(tensor.id)
    if op is None:
        return tensor.name  # memory that was not recorded has its name as layer
    return layer(op.scope) if op.phase == "forward" else op.phase


class Part(NamedTuple):
    """Bytes that are in memory for an interval of points.

    of: the tensor, or the scope of the op.
    structure: one of `STRUCTURES`.
    nbytes: how many bytes.
    first, last: the points of the interval.
    born: whether a segment at the point `first` makes the bytes, so that they are not there yet while it runs.
    """

    of: Tensor | str
    structure: str
    nbytes: int
    first: int
    last: int
    born: bool = False


def _named(found: Iterable[Part], scores: frozenset[int]) -> list[Part]:
    """The parts, those of logits by this name."""
    return [
        part._replace(structure="logits")
        if isinstance(part.of, Tensor) and part.of.id in scores and part.structure in _WHOEVER_HOLDS_IT
        else part
        for part in found
    ]


def _parts(graph: Graph, lives: Sequence[Life], schedule: Schedule) -> Iterator[Part]:
    """Everything in memory in a planned step, except what segments make and free again."""
    gradients = _gradients(graph)
    for t in graph.tensors:
        for first, last in t.spans:
            yield from _used(graph, t, first, last, t.storage in gradients)
    for life in lives:
        t = graph.tensors[life.tensor]
        if life.how == "original":
            first, saved_until = max(life.born_at, t.freed_at + 1), graph.saved_until(t.id)
            yield Part(t, "feature maps", t.nbytes, first, min(life.freed_at, saved_until))
            yield Part(t, "held to rebuild", t.nbytes, max(first, saved_until + 1), life.freed_at)
        else:
            rebuilt = life.how == "rebuild"
            yield Part(t, "rebuilt" if rebuilt else "fetched", t.nbytes, life.born_at, life.freed_at, rebuilt)
    if schedule.parked:
        for tensor, first, last, nbytes in encoded(graph, lives):
            yield Part(graph.tensors[tensor], "encoded", nbytes, first, last)
    for op in states(graph, schedule):
        yield Part(op.scope, "generator states", op.state_nbytes, op.at, graph.last_release)
    for op in graph.ops:
        if op.workspace_nbytes:
            yield Part(op.scope if op.phase == "forward" else op.phase, "workspace", op.workspace_nbytes, op.at, op.at)


def _gradients(graph: Graph) -> set[int]:
    """The storages of the parameters' gradients: those that an update reads, or that outlive backward."""
    backward = max((op.at for op in graph.ops if op.phase == "backward"), default=BEFORE)
    outlives = min(max(backward, graph.last_release) + 1, len(graph.points) - 1)
    read = {t for op in graph.ops if op.phase == "update" for t in op.inputs}
    made = (t for t in graph.tensors if t.kind == "gradient")
    return {t.storage for t in made if t.born_at == BEFORE or t.id in read or t.freed_at >= outlives}


def _used(graph: Graph, t: Tensor, first: int, last: int, is_gradient: bool) -> Iterator[Part]:
    """The interval during which a tensor is in memory without any plan. `is_gradient`: it is the gradient of a parameter."""
    if t.born_at == BEFORE:
        yield Part(t, POOLS if t.name == POOLS else _KINDS.get(t.kind, "outside the step"), t.nbytes, first, last)
    elif t.kind == "gradient":
        yield Part(t, "gradients" if is_gradient else "in use", t.nbytes, first, last)
    else:
        saved_until = graph.saved_until(t.id) if t.kind == "activation" else BEFORE
        yield Part(t, "feature maps", t.nbytes, first, min(last, saved_until))
        yield Part(t, "in use", t.nbytes, max(first, saved_until + 1), last)


def parts_at(graph: Graph, lives: Iterable[Life], point: int) -> list[Part]:
    """What is in memory at the worst moment of a point of a plan; the bytes add up to those that `simulate` predicts."""
    lives = tuple(lives)
    schedule = lower(graph, lives)
    there = [part for part in _parts(graph, lives, schedule) if part.first <= point <= part.last]
    in_segment = _in_segment(graph, schedule, point)
    born = sum(part.nbytes for part in there if part.born and part.first == point)
    if sum(part.nbytes for part in in_segment) > born:
        there = [part for part in there if not (part.born and part.first == point)] + in_segment
    return _named(there, logits(graph))


def at_peak(graph: Graph, lives: Iterable[Life], layer: LayerOf = layer_of) -> Breakdown:
    """What is in memory at the peak of a plan; `total` is the peak that `simulate` predicts."""
    lives = tuple(lives)
    totals: Counter[tuple[str, str]] = Counter()
    for part in parts_at(graph, lives, simulate(graph, lives).peak_at):
        where = layer(part.of) if isinstance(part.of, str) else layer_name(graph, part.of, layer)
        totals[where, part.structure] += part.nbytes
    return Breakdown({key: nbytes for key, nbytes in totals.items() if nbytes})


def stacks(graph: Graph, lives: Iterable[Life]) -> dict[str, list[int]]:
    """Structure -> bytes at every point of a planned step, at the worst moment within the point. They add up to those of
    `simulate`.
    """
    lives = tuple(lives)
    schedule = lower(graph, lives)
    scores = logits(graph)
    n = len(graph.points)
    levels = {structure: Levels(n) for structure in STRUCTURES}
    born: dict[int, list[Part]] = {}
    for part in _named(_parts(graph, lives, schedule), scores):
        levels[part.structure].add(part.first, part.last, part.nbytes)
        if part.born:
            born.setdefault(part.first, []).append(part)
    nbytes = {structure: level.levels() for structure, level in levels.items()}
    for point in schedule.segments:
        in_segment, at_rest = _named(_in_segment(graph, schedule, point), scores), born.get(point, [])
        if sum(part.nbytes for part in in_segment) > sum(part.nbytes for part in at_rest):
            for part in at_rest:
                nbytes[part.structure][point] -= part.nbytes
            for part in in_segment:
                nbytes[part.structure][point] += part.nbytes
    return nbytes


def _in_segment(graph: Graph, schedule: Schedule, point: int) -> list[Part]:
    """What the segment at a point has made and not yet freed at its worst moment."""
    there: Counter[int] = Counter()
    now = most = 0
    worst: Counter[int] = Counter()
    at_work: Op | None = None
    for step in schedule.segments.get(point, ()):
        if isinstance(step, Rebuild):
            op = graph.ops[step.op]
            new = {made for _, made in op.mutates}
            for t in (*(t for t in op.outputs if t not in new), *step.clones):
                there[t] += 1
                now += graph.tensors[t].nbytes
            if now + op.workspace_nbytes > most:
                most, at_work, worst = now + op.workspace_nbytes, op, there.copy()
        elif isinstance(step, Free):
            there[step.tensor] -= 1
            now -= graph.tensors[step.tensor].nbytes
    made = [Part(graph.tensors[t], "rebuilt", n * graph.tensors[t].nbytes, point, point) for t, n in worst.items() if n]
    if at_work is not None:
        made.append(Part(at_work.scope, "workspace", at_work.workspace_nbytes, point, point))
    return made
