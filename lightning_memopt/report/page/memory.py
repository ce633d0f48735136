"""Memory over the step, without a plan and with it, stacked by purpose.

The axis of points is shortened for the page: of several consecutive points, only the one with the most bytes is drawn, so that
no maximum is lost. What is in memory at the peak is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from lightning_memopt.graph import POOLS, Graph
from lightning_memopt.plan import Life, Plan, lower, step_of
from lightning_memopt.plan.lower import Rebuild, Schedule
from lightning_memopt.plan.peak import STRUCTURES, layer_name, parts_at, stacks
from lightning_memopt.report.page.parts import Grid, Picture, Rows, Section, count, size
from lightning_memopt.report.record import RunRecord
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.units import format_nbytes

MOST_POINTS = 500
_MOST_TENSORS = 20

MEANINGS = {
    "outside the step": "in memory before the step and not part of it: the data set, another model",
    POOLS: "kept by torch's allocator for the collectives of a sharded model",
    "weights": "parameters and buffers",
    "optimizer state": "the optimizer's state",
    "inputs": "the batch",
    "gradients": "of the parameters",
    "feature maps": "saved tensors: autograd holds them until backward",
    "logits": "scores of all classes that a loss reads, what is made from them one by one, and their gradients",
    "held to rebuild": "not saved by autograd, but held because rebuilds start from them",
    "fetched": "saved tensors that were parked and are in memory again",
    "encoded": "saved tensors in the form of a codec",
    "rebuilt": "saved tensors that were dropped and rebuilt",
    "generator states": "states of random generators, so that rebuilds draw the same numbers",
    "in use": "temporaries, including those of backward, and what the program itself holds at that moment",
    "workspace": "what an op allocates in addition to its outputs while it runs",
}
"""Structure -> what it means, in the order in which the picture stacks them, from below."""


def kept_points(totals: list[int], most: int = MOST_POINTS) -> list[int]:
    """At most `most` points of an axis: the first, the last, and the largest one of each of equal parts of the axis."""
    n = len(totals)
    if n <= most:
        return list(range(n))
    parts = most - 2
    edges = [i * n // parts for i in range(parts + 1)]
    largest = {max(range(first, last), key=totals.__getitem__) for first, last in pairwise(edges)}
    return sorted(largest | {0, n - 1})


def event(graph: Graph, schedule: Schedule | None, point: int) -> tuple[str, str, str]:
    """(what happens at a point, the layer, the tensor) as text."""
    p = graph.points[point]
    if p.kind == "op":
        op = graph.ops[p.id]
        made = max(op.outputs, key=lambda t: graph.tensors[t].nbytes, default=None)
        return f"{op.phase}: {op.name} runs", op.scope, _tensor(graph, made)
    tensor = graph.asked_at(point)
    what = "backward asks for a saved tensor" if p.kind == "unpack" else "backward releases a saved tensor"
    again = [s.op for s in schedule.segments.get(point, ()) if isinstance(s, Rebuild)] if schedule is not None else []
    if again:
        names = ", ".join(dict.fromkeys(graph.ops[op].name for op in again[:4]))
        what += f"; {len(again)} ops run again ({names}{', ...' if len(again) > 4 else ''})"
    producer = graph.producers.get(tensor)
    return what, producer.scope if producer is not None else "", _tensor(graph, tensor)


def _tensor(graph: Graph, tensor: int | None) -> str:
    if tensor is None:
        return ""
    t = graph.tensors[tensor]
    shape = f" {t.dtype}{list(t.size)}" if t.dtype else ""
    return f"{t.name}{shape}, {format_nbytes(t.nbytes)}"


def section(record: RunRecord) -> Section:
    """The section. Its pictures are predictions for the observed step."""
    graph, plan = record.graph, record.plan
    title = "Memory over the step"
    if graph is None or not graph.points:
        return Section("memory", title, ("No step was recorded, so there is nothing to draw.",), absent=True)
    lead: tuple[str, ...] = (
        "The height is everything that is in memory. The circle is the peak; the dashed line is the budget. Saved tensors "
        "(feature maps) are orange: without a plan they pile up in forward, until backward has read them." + _with_plan(plan),
        "Predicted, to the byte, from the observed step. From left to right are the points of the step, in order: each op, and "
        "each moment when autograd asks for a saved tensor or releases it. Distances along this axis do not show time.",
    )
    named: list[tuple[str, str, Graph, tuple[Life, ...]]] = [("before", "Without a plan", graph, keep_all(graph))]
    if plan is not None:
        named.append(("after", "With the plan", step_of(graph, plan), plan.lives))
    else:
        lead += ("There is no plan, so the second picture is missing.",)
    pictures, grids, tops = [], [], []
    for key, name, step, lives in named:
        levels = stacks(step, lives)
        totals = [sum(column) for column in zip(*levels.values(), strict=True)]
        tops.append(max(totals))
        picture, *tables = _drawn(step, key, name, lives, levels, totals)
        pictures.append(picture)
        grids += tables
    for picture in pictures:
        picture.data["top"] = max(tops)
        picture.data["budget"] = record.budget_nbytes
    if plan is not None and tops[-1] != plan.predicted_peak_nbytes:
        beside = plan.predicted_peak_nbytes - tops[-1]
        lead += (f"The plan also counts {format_nbytes(beside)} outside of the step, which the picture does not show.",)
    shown = {s["name"] for picture in pictures for s in picture.data["series"]}
    rows: Rows = [[name, meaning] for name, meaning in MEANINGS.items() if name in shown]
    meanings = Grid("purposes", "What the colours mean", ("purpose", "is"), rows, printed=True)
    return Section("memory", title, lead, pictures=tuple(pictures), grids=(meanings, *grids))


def _with_plan(plan: Plan | None) -> str:
    """The colours of the picture with the plan."""
    hows = {life.how for life in plan.lives} if plan is not None else set()
    text = " Those that the plan rebuilds just before backward reads them are green." if "rebuild" in hows else ""
    return text + (" Those that it parked are purple when they are back in memory." if "fetch" in hows else "")


def _drawn(
    graph: Graph, key: str, name: str, lives: Iterable[Life], levels: dict[str, list[int]], totals: list[int]
) -> tuple[Picture, Grid, Grid]:
    schedule = lower(graph, lives)
    points = kept_points(totals)
    top = max(totals)
    peak = totals.index(top)
    structures = [s for s in MEANINGS if any(levels[s])]
    assert set(MEANINGS) == set(STRUCTURES)
    says = [event(graph, schedule, p) for p in points]
    data = {
        "points": points,
        "series": [{"name": s, "nbytes": [levels[s][p] for p in points]} for s in structures],
        "says": [[*text] for text in says],
        "peak": {"point": peak, "nbytes": top},
        "phases": phases(graph),
    }
    what, layer, tensor = event(graph, schedule, peak)
    where = f"{what}{f' in {layer}' if layer else ''}"
    label = f"{name}: bytes over {len(graph.points)} points; the peak is {format_nbytes(top)} at point {peak} ({where})"
    rows: Rows = [
        [count(p), *text, size(totals[p]), *(size(levels[s][p]) for s in structures)]
        for p, text in zip(points, says, strict=True)
    ]
    dropped = len(graph.points) - len(points)
    caption = f"{name}: bytes at {len(points)} points"
    caption += f" ({dropped} smaller ones between them are left out)" if dropped else ""
    table = Grid(f"memory-{key}", caption, ("point", "what happens", "layer", "tensor", "in memory", *structures), rows)
    at_peak = sorted(parts_at(graph, lives, peak), key=lambda part: -part.nbytes)
    shown: Rows = [
        [
            part.of if isinstance(part.of, str) else part.of.name,
            part.of if isinstance(part.of, str) else layer_name(graph, part.of, str),
            part.structure,
            size(part.nbytes),
        ]
        for part in at_peak[:_MOST_TENSORS]
        if part.nbytes
    ]
    rest = at_peak[_MOST_TENSORS:]
    if rest:
        shown.append([f"{len(rest)} smaller ones", "", "", size(sum(part.nbytes for part in rest))])
    shown.append(["all", "", f"at point {peak}: {where}{f', {tensor}' if tensor else ''}", size(top)])
    return (
        Picture("stack", name, label, data),
        Grid(f"peak-{key}", f"{name}: in memory at the peak", ("tensor", "layer", "purpose", "bytes"), shown),
        table,
    )


def phases(graph: Graph) -> list[dict[str, object]]:
    """The phases of the step: name, first point, and the point after the last."""
    n = len(graph.points)
    update = next((op.at for op in graph.ops if op.phase == "update"), n)
    backward = min(graph.backward_begins, update)
    spans = (("forward", 0, backward), ("backward", backward, update), ("update", update, n))
    return [{"name": name, "first": first, "last": last} for name, first, last in spans if last > first]
