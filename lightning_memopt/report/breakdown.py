"""Where the bytes of a step are: by layer and by what they are for, at the peak of a plan and over all that autograd saves.

Input: a graph and the lives of a plan, no torch. Output: a table of bytes by (layer, structure). What is there at the peak adds
up to the simulator's peak, to the byte. Source: Echo (ISCA 2020), section III-B and figures 4, 16, 21, 23: *by layer types* and
*by data structures*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_memopt.graph import BEFORE, Graph, Tensor
from lightning_memopt.plan import Life, Run, Schedule, lower, simulate
from lightning_memopt.report.text import Table, render
from lightning_memopt.units import format_nbytes

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
"""What bytes are for. `feature maps`: held because autograd saves them. `held to rebuild`: autograd does not save them, but
rebuilds start from them. `rebuilt`: made again by ops. `in use`: user code, or the step itself, holds them at that moment.
`gradients`: what backward makes.
"""
FATES = ("held", "rebuilt", "there anyway")
"""What becomes of what autograd saves; `there anyway`: user code holds it until backward asks."""

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
        found: Counter[str] = Counter()
        for key, nbytes in self.nbytes.items():
            found[key[axis]] += nbytes
        return found


def layer_of(scope: str) -> str:
    """A module's path, alike for all repetitions of a block: `h.3.mlp#1` is `h.*.mlp`."""
    path = scope.partition("#")[0].split(".")
    return ".".join("*" if part.isdigit() else part for part in path) or "the model itself"


def _layer(graph: Graph, tensor: Tensor, layer: LayerOf) -> str:
    if tensor.born_at == BEFORE:
        path = tensor.name.removesuffix(".grad")
        named = tensor.kind in ("parameter", "buffer", "gradient")
        return layer(path.rpartition(".")[0]) if named else tensor.name
    op = graph.producers[tensor.id]
    return layer(op.scope) if op.phase == "forward" else op.phase


def at_peak(graph: Graph, lives: Iterable[Life], layer: LayerOf = layer_of) -> Breakdown:
    """What is in memory at the peak of a plan; `total` is the peak that `simulate` predicts."""
    lives = tuple(lives)
    schedule = lower(graph, lives)
    timeline = simulate(graph, lives, schedule)
    point = timeline.peak_at
    parts = list(_at_rest(graph, lives, schedule, point, births=True))
    if sum(nbytes for *_, nbytes in parts) < timeline.predicted.peak_bytes:
        parts = [*_at_rest(graph, lives, schedule, point, births=False), *_in_segment(graph, schedule, point)]
    found: Counter[tuple[str, str]] = Counter()
    for where, structure, nbytes in parts:
        found[layer(where) if isinstance(where, str) else _layer(graph, where, layer), structure] += nbytes
    return Breakdown({key: nbytes for key, nbytes in found.items() if nbytes})


_Part = tuple[Tensor | str, str, int]
"""What is there (a tensor, or the scope of an op), the structure, bytes."""


def _at_rest(graph: Graph, lives: Sequence[Life], schedule: Schedule, point: int, births: bool) -> Iterator[_Part]:
    """What is there at a point beside what a segment makes on the way; `births`: with the lives that begin at the point."""
    for t in graph.tensors:
        if t.born_at <= point <= t.freed_at:
            yield t, _structure(graph, t, point), t.nbytes
    for life in lives:
        t = graph.tensors[life.tensor]
        if life.how == "original" and max(life.born_at, t.freed_at + 1) <= point <= life.freed_at:
            yield t, "feature maps" if graph.saved_until(t.id) >= point else "held to rebuild", t.nbytes
        elif life.how == "replay" and life.born_at <= point <= life.freed_at and (births or life.born_at < point):
            yield t, "rebuilt", t.nbytes
    for replayed in schedule.replayed:
        op = graph.ops[replayed]
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
    """What the segment at a point has made, and has not let go of, at its worst moment."""
    there: Counter[int] = Counter()
    now = most = 0
    worst: list[_Part] = []
    for step in schedule.segments.get(point, ()):
        if isinstance(step, Run):
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


def saved(graph: Graph, lives: Iterable[Life], layer: LayerOf = layer_of) -> Breakdown:
    """All bytes that autograd saves and asks for, by layer and fate; each tensor once."""
    held = {life.tensor for life in lives if life.how == "original"}
    found: Counter[tuple[str, str]] = Counter()
    for tensor, saves in graph.saves_of.items():
        t = graph.tensors[tensor]
        requests = [p for s in saves for p in s.unpacked_at]
        if not requests or t.born_at == BEFORE:
            continue
        fate = "held" if tensor in held else "there anyway" if t.freed_at >= max(requests) else "rebuilt"
        found[_layer(graph, t, layer), fate] += t.nbytes
    return Breakdown(dict(found))


def line(found: Breakdown) -> str:
    """What is in memory at the peak, in one line, by structure."""
    parts = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in found.by(1).most_common())
    return f"At the peak: {parts}."


def compared(named: dict[str, Breakdown], axis: int, title: str, most: int = 12) -> str:
    """A table of breakdowns beside each other: a row a layer (axis 0), or a structure (axis 1)."""
    columns = {name: b.by(axis) for name, b in named.items()}
    rows = _rows(columns, axis, most)
    table = Table(title=title)
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for row, names in rows.items():
        table.add_row(row, *(format_nbytes(sum(c[n] for n in names)) for c in columns.values()))
    table.add_row("all", *(format_nbytes(b.total) for b in named.values()))
    return render(table, 140)


def _rows(columns: dict[str, Counter[str]], axis: int, most: int) -> dict[str, list[str]]:
    """Row -> the keys it sums up: structures in their order, layers by their largest bytes, the last ones together."""
    if axis == 1:
        return {s: [s] for s in (*STRUCTURES, *FATES) if any(c[s] for c in columns.values())}
    largest: Counter[str] = Counter()
    for c in columns.values():
        largest |= c
    names = [name for name, _ in largest.most_common()]
    rows = {name: [name] for name in names[:most]}
    return rows | ({f"{len(names) - most} others": names[most:]} if len(names) > most else {})


def plot(named: dict[str, Breakdown], path: Path, title: str, most: int = 8) -> None:
    """Stacked bars by layer and by structure. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5))
    for axis, (ax, kind) in enumerate(zip(axes, ("layer", "data structure"), strict=True)):
        columns = {name: b.by(axis) for name, b in named.items()}
        bottom = [0.0] * len(columns)
        for row, names in _rows(columns, axis, most).items():
            mib = [sum(c[n] for n in names) / 2**20 for c in columns.values()]
            ax.bar(list(columns), mib, bottom=bottom, label=row)
            bottom = [b + m for b, m in zip(bottom, mib, strict=True)]
        ax.set(title=f"{title}, by {kind}", ylabel="MiB at the peak")
        ax.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
