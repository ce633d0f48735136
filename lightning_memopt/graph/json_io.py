"""Write a graph as JSON and read it back. A file may come from anywhere, so everything is checked.

The file has columns, not rows: one array for each field. Ids are positions, and texts are indices into a table. Values of a
closed set are one letter each, the first of the name (`f`orward, `b`ackward, `u`pdate), and flags are `0` and `1`. A graph of
1,500 ops takes 130 KB. In a graph from `graph_from_json`, every id refers to an existing object and every interval lies on the
axis; otherwise it raises PlanFileError with the field and the index.
"""

from __future__ import annotations

from typing import Any, get_args

from lightning_memopt.graph.fields import MOST, Fields, letters
from lightning_memopt.graph.model import (
    BEFORE,
    Copy,
    EarlyUpdate,
    Graph,
    Kind,
    Lane,
    Op,
    Phase,
    Point,
    PointKind,
    Rest,
    Save,
    Tensor,
)

SCHEMA = 2
WINDOWED = 3
"""The schema of a graph with windowed tensors: it has one more field, `windows`."""
UPDATED = 4
"""The schema of a graph with parameters that may be updated early: it has `windows`, `updates` and `usual_nbytes`, too."""
UNREBUILT = 5
"""The schema of a graph with ops that do not make all of their outputs again: it has `unrebuilt`, too."""
UNCOMPUTED = 6
"""The schema of a graph of a step that was recorded without being computed: it has `computed`, which is 0, too."""
PARKED = 7
"""The schema of a graph with copies of what rests: it has `computed` and `copies`, too."""

_GRAPH = ("schema", "device", "step_seconds", "texts", "points", "ops", "tensors", "saves")
_OP = (
    *("name", "phase", "inputs", "outputs", "mutates", "seconds", "workspace_nbytes", "flops", "scope", "heavy"),
    *("recomputable", "state_nbytes", "at"),
)
_FLAGS = {"0": "no", "1": "yes"}
_TENSOR = ("name", "nbytes", "kind", "storage", "born_at", "freed_at", "dtype", "size")
_UPDATE = ("parameter", "at", "nbytes", "since", "until", "beside_nbytes")
_COPY = ("what", "tensor", "lane", "after", "before", "seconds", "neighbour")
_UPDATED = ("windows", "updates", "usual_nbytes")
_MORE = {
    SCHEMA: (),
    WINDOWED: ("windows",),
    UPDATED: _UPDATED,
    UNREBUILT: (*_UPDATED, "unrebuilt"),
    UNCOMPUTED: (*_UPDATED, "unrebuilt", "computed"),
    PARKED: (*_UPDATED, "unrebuilt", "computed", "copies"),
}
_PHASES = letters(get_args(Phase))
_KINDS = letters(get_args(Kind))
_POINTS = letters(get_args(PointKind))
_LANES = letters(get_args(Lane))
_RESTS = letters(get_args(Rest))


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The columns of `graph`, with keys in a fixed order. Nothing is checked."""
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    ops, tensors, saves, points = graph.ops, graph.tensors, graph.saves, graph.points
    columns: dict[str, Any] = {
        "points": {
            "kind": "".join(p.kind[0] for p in points),
            "id": [p.id for p in points],
            "occurrence": [p.occurrence for p in points],
        },
        "ops": {
            "name": [text(o.name) for o in ops],
            "phase": "".join(o.phase[0] for o in ops),
            "inputs": [list(o.inputs) for o in ops],
            "outputs": [list(o.outputs) for o in ops],
            "mutates": [[o.id, old, new] for o in ops for old, new in o.mutates],
            "seconds": [o.seconds for o in ops],
            "workspace_nbytes": [o.workspace_nbytes for o in ops],
            "flops": [o.flops for o in ops],
            "scope": [text(o.scope) for o in ops],
            "heavy": "".join("1" if o.heavy else "0" for o in ops),
            "recomputable": "".join("1" if o.recomputable else "0" for o in ops),
            "state_nbytes": [o.state_nbytes for o in ops],
            "at": [o.at for o in ops],
        },
        "tensors": {
            "name": [text(t.name) for t in tensors],
            "nbytes": [t.nbytes for t in tensors],
            "kind": "".join(t.kind[0] for t in tensors),
            "storage": [t.storage for t in tensors],
            "born_at": [t.born_at for t in tensors],
            "freed_at": [t.freed_at for t in tensors],
            "dtype": [text(t.dtype) for t in tensors],
            "size": [list(t.size) for t in tensors],
        },
        "saves": {
            "tensor": [s.tensor for s in saves],
            "op": [s.op for s in saves],
            "unpacked_at": [list(s.unpacked_at) for s in saves],
            "released_at": [s.released_at for s in saves],
        },
    }
    windows = [[t.id, first, last] for t in tensors for first, last in t.windows]
    unrebuilt = [[o.id, t] for o in ops for t in o.unrebuilt]
    schema = UNREBUILT if unrebuilt else UPDATED if graph.updates else WINDOWED if windows else SCHEMA
    if not graph.computed:
        schema = UNCOMPUTED
    if graph.copies:
        schema = PARKED
    updates = {name: [getattr(u, name) for u in graph.updates] for name in _UPDATE}
    more: dict[str, Any] = {"windows": windows, "updates": updates, "usual_nbytes": graph.usual_nbytes, "unrebuilt": unrebuilt}
    more["computed"] = int(graph.computed)
    more["copies"] = {name: [getattr(copy, name) for copy in graph.copies] for name in _COPY}
    for name in ("what", "lane"):
        more["copies"][name] = "".join(getattr(copy, name)[0] for copy in graph.copies)
    columns |= {name: more[name] for name in _MORE[schema]}
    head = {"schema": schema, "device": graph.device, "step_seconds": graph.step_seconds, "texts": list(texts)}
    return head | columns


def graph_from_json(obj: object) -> Graph:
    """The graph that `graph_to_json` wrote. Raises PlanFileError for anything else, naming the field and the index."""
    schema = obj.get("schema") if isinstance(obj, dict) else None
    more = _MORE.get(schema, ()) if type(schema) is int else ()
    top = Fields(obj, "graph", (*_GRAPH, *more), tuple(_MORE))
    texts = top.strings("texts")
    points, n_points = top.table("points", ("kind", "id", "occurrence"), "kind")
    ops, n_ops = top.table("ops", _OP, "phase")
    tensors, n_tensors = top.table("tensors", _TENSOR, "kind")
    saves, n_saves = top.table("saves", ("tensor", "op", "unpacked_at", "released_at"), "tensor")
    mutates: dict[int, list[tuple[int, int]]] = {}
    for i, entry in enumerate(ops.lists("mutates", None, 0, max(n_ops, n_tensors) - 1)):
        if len(entry) != 3 or entry[0] >= n_ops or max(entry[1:]) >= n_tensors:
            ops.refuse("mutates", i, f"{list(entry)} is not [op, tensor overwritten, tensor made]")
        mutates.setdefault(entry[0], []).append((entry[1], entry[2]))
    windows = _windows(top, n_tensors, n_points) if "windows" in more else {}
    unrebuilt = _unrebuilt(top, n_ops, n_tensors) if "unrebuilt" in more else {}
    graph = Graph(
        points=tuple(
            map(
                Point,
                points.chosen("kind", n_points, _POINTS),
                points.ints("id", n_points, 0, max(n_ops, n_saves) - 1),
                points.ints("occurrence", n_points, 0, n_points),
            )
        ),
        ops=tuple(
            Op(
                id=i,
                name=texts[name],
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                mutates=tuple(mutates.get(i, ())),
                seconds=seconds,
                workspace_nbytes=workspace,
                flops=flops,
                scope=texts[scope],
                heavy=heavy == "yes",
                recomputable=recomputable == "yes",
                state_nbytes=state,
                at=at,
                unrebuilt=tuple(unrebuilt.get(i, ())),
            )
            for i, (
                name,
                phase,
                inputs,
                outputs,
                seconds,
                workspace,
                flops,
                scope,
                heavy,
                recomputable,
                state,
                at,
            ) in enumerate(
                zip(
                    ops.ints("name", n_ops, 0, len(texts) - 1),
                    ops.chosen("phase", n_ops, _PHASES),
                    ops.lists("inputs", n_ops, 0, n_tensors - 1),
                    ops.lists("outputs", n_ops, 0, n_tensors - 1),
                    ops.floats("seconds", n_ops),
                    ops.ints("workspace_nbytes", n_ops),
                    ops.ints("flops", n_ops),
                    ops.ints("scope", n_ops, 0, len(texts) - 1),
                    ops.chosen("heavy", n_ops, _FLAGS),
                    ops.chosen("recomputable", n_ops, _FLAGS),
                    ops.ints("state_nbytes", n_ops),
                    ops.ints("at", n_ops, 0, n_points - 1),
                    strict=True,
                )
            )
        ),
        tensors=tuple(
            Tensor(
                id=i,
                name=texts[name],
                nbytes=nbytes,
                kind=kind,
                storage=storage,
                born_at=born_at,
                freed_at=freed_at,
                dtype=texts[dtype],
                size=size,
                windows=tuple(windows.get(i, ())),
            )
            for i, (name, nbytes, kind, storage, born_at, freed_at, dtype, size) in enumerate(
                zip(
                    tensors.ints("name", n_tensors, 0, len(texts) - 1),
                    tensors.ints("nbytes", n_tensors),
                    tensors.chosen("kind", n_tensors, _KINDS),
                    tensors.ints("storage", n_tensors, 0, n_tensors - 1),
                    tensors.ints("born_at", n_tensors, BEFORE, n_points - 1),
                    tensors.ints("freed_at", n_tensors, BEFORE, n_points - 1),
                    tensors.ints("dtype", n_tensors, 0, len(texts) - 1),
                    tensors.lists("size", n_tensors, 0, MOST),
                    strict=True,
                )
            )
        ),
        saves=tuple(
            Save(id=i, tensor=tensor, op=op, unpacked_at=unpacked_at, released_at=released_at)
            for i, (tensor, op, unpacked_at, released_at) in enumerate(
                zip(
                    saves.ints("tensor", n_saves, 0, n_tensors - 1),
                    saves.ints("op", n_saves, 0, n_ops),  # packed after the last op: `n_ops`
                    saves.lists("unpacked_at", n_saves, 0, n_points - 1),
                    saves.ints("released_at", n_saves, 0, n_points - 1),
                    strict=True,
                )
            )
        ),
        device=top.string("device"),
        computed="computed" not in more or top.integer("computed", 0, 1) == 1,
        updates=_updates(top, n_tensors, n_points) if "updates" in more else (),
        usual_nbytes=top.integer("usual_nbytes") if "updates" in more else 0,
        copies=_copies(top, n_tensors, n_points) if "copies" in more else (),
        step_seconds=top.number("step_seconds"),
    )
    _check_points(graph, points)
    _check_ops(graph, ops)
    _check_tensors(graph, tensors)
    _check_saves(graph, saves)
    return graph


def _windows(top: Fields, n_tensors: int, n_points: int) -> dict[int, list[tuple[int, int]]]:
    """Tensor -> its windows, from rows `[tensor, first point, last point]`."""
    windows: dict[int, list[tuple[int, int]]] = {}
    for i, row in enumerate(top.lists("windows", None, 0, max(n_tensors, n_points) - 1)):
        if len(row) != 3 or row[0] >= n_tensors or not row[1] <= row[2] < n_points:
            top.refuse("windows", i, f"{list(row)} is not [tensor, first point, last point]")
        earlier = windows.setdefault(row[0], [])
        if earlier and row[1] <= earlier[-1][1]:
            top.refuse("windows", i, f"{list(row)} is not after the window before it, which ends at {earlier[-1][1]}")
        earlier.append((row[1], row[2]))
    return windows


def _unrebuilt(top: Fields, n_ops: int, n_tensors: int) -> dict[int, list[int]]:
    """Op -> those of its outputs that it does not make again, from rows `[op, tensor]`."""
    unrebuilt: dict[int, list[int]] = {}
    for i, row in enumerate(top.lists("unrebuilt", None, 0, max(n_ops, n_tensors) - 1)):
        if len(row) != 2 or row[0] >= n_ops or row[1] >= n_tensors:
            top.refuse("unrebuilt", i, f"{list(row)} is not [op, tensor that it does not make again]")
        unrebuilt.setdefault(row[0], []).append(row[1])
    return unrebuilt


def _updates(top: Fields, n_tensors: int, n_points: int) -> tuple[EarlyUpdate, ...]:
    """The early updates: each of another parameter, their points rising."""
    columns, n = top.table("updates", _UPDATE, "parameter")
    found = tuple(
        EarlyUpdate(parameter=parameter, at=at, nbytes=nbytes, since=since, until=until, beside_nbytes=beside)
        for parameter, at, nbytes, since, until, beside in zip(
            columns.ints("parameter", n, 0, n_tensors - 1),
            columns.ints("at", n, 0, n_points - 1),
            columns.ints("nbytes", n),
            columns.ints("since", n, 0, n_points),
            columns.ints("until", n, BEFORE, n_points - 1),
            columns.ints("beside_nbytes", n),
            strict=True,
        )
    )
    for i, update in enumerate(found):
        if i and update.at < found[i - 1].at:
            columns.refuse("at", i, f"{update.at} is before that of the update before it, {found[i - 1].at}")
        if update.since <= update.at and update.nbytes:
            columns.refuse("since", i, f"{update.since} is not after {update.at}, where the gradient is final")
    if len({update.parameter for update in found}) < n:
        columns.refuse("parameter", None, "a parameter is in it twice")
    return found


def _copies(top: Fields, n_tensors: int, n_points: int) -> tuple[Copy, ...]:
    """The copies of what rests: each ends after it has begun."""
    columns, n = top.table("copies", _COPY, "tensor")
    found = tuple(
        Copy(what=what, tensor=tensor, lane=lane, after=after, before=before, seconds=seconds, neighbour=neighbour)
        for what, tensor, lane, after, before, seconds, neighbour in zip(
            columns.chosen("what", n, _RESTS),
            columns.ints("tensor", n, 0, n_tensors - 1),
            columns.chosen("lane", n, _LANES),
            columns.ints("after", n, BEFORE, n_points - 1),
            columns.ints("before", n, 0, n_points),
            columns.floats("seconds", n),
            columns.ints("neighbour", n, -1, n_tensors - 1),
            strict=True,
        )
    )
    for i, copy in enumerate(found):
        if copy.before <= copy.after:
            columns.refuse("before", i, f"{copy.before} is not after {copy.after}, where the copy begins")
    return found


def _check_points(graph: Graph, fields: Fields) -> None:
    """Check that every point refers to an existing op or save, which refers to this point."""
    ops, saves = graph.ops, graph.saves
    for i, (kind, id, occurrence) in enumerate(graph.points):
        if id >= (len(ops) if kind == "op" else len(saves)):
            fields.refuse("id", i, f"there is no {'op' if kind == 'op' else 'save'} {id}")
        if kind != "unpack" and occurrence:
            fields.refuse("occurrence", i, f"{occurrence}, but {kind} {id} happens once")
        stated_point: int | None
        if kind == "op":
            stated_point = ops[id].at
        elif kind == "release":
            stated_point = saves[id].released_at
        else:
            stated_point = saves[id].unpacked_at[occurrence] if occurrence < len(saves[id].unpacked_at) else None
        if stated_point != i:
            fields.refuse("id", i, f"{kind} {id}, occurrence {occurrence}, is said to be at point {stated_point}")


def _check_ops(graph: Graph, fields: Fields) -> None:
    """Check that ops are in order on the axis, forward first, and that each tensor is made once, before ops read it."""
    made = [t.born_at == BEFORE for t in graph.tensors]
    phase, last = "forward", -1
    for op in graph.ops:
        point = graph.points[op.at]
        if (point.kind, point.id) != ("op", op.id):
            fields.refuse("at", op.id, f"point {op.at} is {point.kind} {point.id}, not op {op.id}")
        if op.at <= last:
            fields.refuse("at", op.id, f"{op.at} is not after the op before it, at {last}")
        last = op.at
        if op.phase == "forward" != phase:
            fields.refuse("phase", op.id, f"forward after {phase}; forward ops come first")
        phase = op.phase
        if op.recomputable and op.phase != "forward":
            fields.refuse("recomputable", op.id, f"a {op.phase} op cannot run again")
        for t in op.inputs:
            if not made[t]:
                fields.refuse("inputs", op.id, f"tensor {t} is not made yet")
        for t in op.outputs:
            if made[t]:
                fields.refuse("outputs", op.id, f"tensor {t} is made already")
            if graph.tensors[t].born_at != op.at:
                fields.refuse("outputs", op.id, f"tensor {t} is born at {graph.tensors[t].born_at}, not at {op.at}")
            made[t] = True
        if not set(op.unrebuilt) <= set(op.outputs):
            fields.refuse("outputs", op.id, f"{list(op.unrebuilt)} are not all made by the op, which does not make them again")
        for old, new in op.mutates:
            if old not in op.inputs or new not in op.outputs:
                fields.refuse("mutates", op.id, f"{old} is not an input, or {new} no output of the op")
            if graph.tensors[old].storage != graph.tensors[new].storage:
                fields.refuse("mutates", op.id, f"tensors {old} and {new} are not of one storage")
            if graph.tensors[old].freed_at >= op.at:
                fields.refuse("mutates", op.id, f"tensor {old} is not freed before the op overwrites it")


def _check_tensors(graph: Graph, fields: Fields) -> None:
    """Check lifetimes, and that a tensor that appears during the step without an op is neither read nor saved."""
    used = {t for op in graph.ops for t in op.inputs} | {save.tensor for save in graph.saves}
    for t in graph.tensors:
        if t.born_at != BEFORE and t.id not in graph.producers and t.id in used:
            fields.refuse("born_at", t.id, f"{t.born_at}, but no op makes this tensor, which is read or saved")
        if t.windows and (t.born_at != BEFORE or t.freed_at != t.windows[-1][1]):
            fields.refuse("freed_at", t.id, f"{t.freed_at}, but its last window ends at {t.windows[-1][1]}, and no op makes it")
        if t.freed_at < t.born_at:
            fields.refuse("freed_at", t.id, f"{t.freed_at} is before the birth, at {t.born_at}")


def _check_saves(graph: Graph, fields: Fields) -> None:
    """Check that each save is packed after its tensor is made, then unpacked, then released."""
    for save in graph.saves:
        producer = graph.producers.get(graph.packed(save))  # `save.tensor` may be a later version of the packed one
        if producer is not None and producer.id > save.op:
            fields.refuse("op", save.id, f"{save.op}, but tensor {save.tensor} is made by op {producer.id}")
        last = graph.tensors[save.tensor].born_at
        for k, p in enumerate(save.unpacked_at):
            if p <= last:
                fields.refuse("unpacked_at", save.id, f"{p} is not after {last}")
            last = p
            if graph.points[p] != ("unpack", save.id, k):
                fields.refuse("unpacked_at", save.id, f"point {p} is not an unpack {k} of save {save.id}")
        if save.released_at < last:
            fields.refuse("released_at", save.id, f"{save.released_at} is before {last}")
        if save.released_at != len(graph.points) - 1 and graph.points[save.released_at][:2] != ("release", save.id):
            fields.refuse("released_at", save.id, f"point {save.released_at} is not a release of save {save.id}")
