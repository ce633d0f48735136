"""A plan file: the plan and the graph it was made for, as JSON that people can read, diff and share. It is never a pickle.

`{"format": "lightning_memopt.plan", "schema": 8, "plan": {...}, "graph": {...}}`, with one array per line. Lives are stored as
columns, as tensors and ops of the graph are. A plan that was read may be carried out: its graph is consistent, its fingerprint
belongs to that graph, and the validator has carried out its lives and updates without finding a problem. Predictions are not
checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from lightning_memopt import jsonio
from lightning_memopt.errors import PlanFileError
from lightning_memopt.files import replace_file
from lightning_memopt.graph import BEFORE, Graph, fingerprint
from lightning_memopt.graph.fields import MOST, Fields, letters
from lightning_memopt.graph.json_io import graph_from_json, graph_to_json
from lightning_memopt.plan.lower import LoweringError, lower
from lightning_memopt.plan.model import (
    Addresses,
    How,
    Life,
    Plan,
    Prediction,
    Read,
    RegionPlan,
    StateParking,
    TiledHead,
    WeightParking,
)
from lightning_memopt.plan.tiers import taken
from lightning_memopt.plan.validate import beyond_limits, validate, wrong_addresses

FORMAT = "lightning_memopt.plan"
SCHEMA = 9

_HOWS = letters(get_args(How))
_PLAN = (
    *("fingerprint", "solver", "budget_nbytes", "unmodified_peak_nbytes", "step_seconds", "lower_bound_seconds"),
    *("solve_seconds", "updates", "regions", "tiles", "states", "weights", "tiers", "addresses", "predicted", "lives"),
)
_PREDICTED = (
    *("peak_nbytes", "reserved_nbytes", "extra_seconds", "overhead_seconds", "extra_flops", "rebuilt_nbytes"),
    *("rebuilt_ops", "moved_nbytes", "copy_seconds", "stall_seconds", "codec_seconds", "tier_nbytes"),
    "update_seconds",
)
_LIFE = ("tensor", "born_at", "freed_at", "how", "forms", "form", "parked_nbytes")
_REGION = ("key", "calls", "flops", "extra_flops", "rebuilt_ops", "saved_nbytes", "peak_nbytes", "lives")
_TILES = ("module", "classes", "tokens", "rows", "columns", "unmade_nbytes", "threads", "ops", "assembled", "rounded")
_STATE = ("parameter", "what", "tier", "nbytes", "tier_nbytes", "copy_seconds", "seconds", "comes_after", "leaves_before")
_WEIGHTS = ("module", "tier", "nbytes", "tier_nbytes", "beside", "moved_nbytes", "copy_seconds", "seconds")
_TIER = ("tier", "nbytes", "limit_nbytes")
_ADDRESSES = ("nbytes", "offsets", "until", "arena_nbytes", "max_live_nbytes", "needed_nbytes")
_SINCE_9 = ("what", "copy_seconds", "tier_nbytes", "comes_after", "leaves_before")
_OLD_NAMES: dict[int, dict[str, str]] = {
    8: {},
    7: {},
    6: {},
    5: {},
    4: {},
    3: {
        "budget_nbytes": "budget_bytes",
        "unmodified_peak_nbytes": "unmodified_peak_bytes",
        "peak_nbytes": "peak_bytes",
        "reserved_nbytes": "reserved_bytes",
        "rebuilt_nbytes": "rebuilt_bytes",
        "rebuilt_ops": "replayed_ops",
        "moved_nbytes": "moved_bytes",
        "tier_nbytes": "tier_bytes",
        "parked_nbytes": "away_nbytes",
    },
}
"""Older schema -> the names that its files use for fields. The letters of `how` are the same in all schemas."""
_SINCE = {"updates": 5, "update_seconds": 5, "regions": 6, "addresses": 6, "tiles": 7, "states": 8, "weights": 9, "tiers": 9}
"""Field -> the first schema whose files have it."""


def plan_to_json(plan: Plan, graph: Graph) -> dict[str, Any]:
    """The content of a plan file, with keys in a fixed order. The plan is not checked."""
    return {"format": FORMAT, "schema": SCHEMA, "plan": fields_of(plan), "graph": graph_to_json(graph)}


def fields_of(plan: Plan) -> dict[str, Any]:
    """The plan without its graph, as it stands in a plan file."""
    fields: dict[str, Any] = {key: getattr(plan, key, None) for key in _PLAN}
    fields["predicted"] = {key: getattr(plan.predicted, key) for key in _PREDICTED}
    fields["lives"] = _columns(plan.lives)
    fields["regions"] = [
        {key: getattr(region, key) for key in _REGION} | {"lives": None if region.lives is None else _columns(region.lives)}
        for region in plan.regions
    ]
    fields["tiles"] = [{key: getattr(head, key) for key in _TILES} for head in plan.tiles]
    fields["states"] = [{key: getattr(state, key) for key in _STATE} for state in plan.states]
    fields["weights"] = [{key: getattr(unit, key) for key in _WEIGHTS} for unit in plan.weights]
    limits = dict(plan.tier_limits)
    fields["tiers"] = [
        {"tier": tier, "nbytes": plan.in_tiers.get(tier, 0), "limit_nbytes": limits.get(tier)}
        for tier in dict.fromkeys((*plan.in_tiers, *limits))
    ]
    if plan.addresses is not None:
        a = plan.addresses
        offsets = [-1 if offset is None else offset for offset in a.offsets]
        fields["addresses"] = {key: getattr(a, key) for key in _ADDRESSES} | {"offsets": offsets}
    return fields


def _columns(lives: tuple[Life, ...]) -> dict[str, Any]:
    forms = sorted({life.form for life in lives})
    return {
        "tensor": [life.tensor for life in lives],
        "born_at": [life.born_at for life in lives],
        "freed_at": [life.freed_at for life in lives],
        "how": "".join(life.how[0] for life in lives),
        "forms": forms,
        "form": [forms.index(life.form) for life in lives],
        "parked_nbytes": [life.parked_nbytes for life in lives],
    }


def plan_from_json(obj: object) -> tuple[Plan, Graph]:
    """Read the plan and the graph from the content of a plan file. Raises PlanFileError, which names the field and index, or
    the reason.
    """
    if not isinstance(obj, dict) or obj.get("format") != FORMAT:
        shown = repr(obj.get("format"))[:80] if isinstance(obj, dict) else type(obj).__name__
        raise PlanFileError(f'"format" is {shown}, not "{FORMAT}": this is not a plan file; give the path of one')
    top = Fields(obj, "file", ("format", "schema", "plan", "graph"), (SCHEMA, *_OLD_NAMES))
    schema = top.obj["schema"]
    graph = graph_from_json(top.obj["graph"])
    fields = Fields(top.obj["plan"], "plan", _keys(_PLAN, schema), old_names=_OLD_NAMES.get(schema, {}))
    plan = _plan(fields, graph, schema)
    if schema < _SINCE["updates"] and _updates_early(graph):
        raise PlanFileError(
            f"the file has schema {schema}, which does not say which parameters the plan updates in backward, but "
            "its step does update some there; make the file again"
        )
    actual = fingerprint(graph)
    if plan.fingerprint != actual:
        fields.refuse("fingerprint", None, f"{plan.fingerprint[:40]!r}, but the graph in this file has {actual!r}")
    try:
        report = validate(graph, plan.lives, lower(graph, plan.lives), plan.updates)
    except LoweringError as error:
        raise PlanFileError(f"the plan cannot be carried out: {error}; make it again") from error
    if not report.ok:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise PlanFileError(f"the plan cannot be carried out: {report.problems[0]}{more}; make it again")
    wrong = [] if plan.addresses is None else wrong_addresses(plan.addresses)
    if wrong:
        raise PlanFileError(f"plan.addresses: {wrong[0]}; make the file again")
    beyond = beyond_limits(plan)
    if beyond:
        raise PlanFileError(f"plan.tiers: {beyond[0]}; make the file again")
    return plan, graph


def plan_of_fields(obj: object, graph: Graph) -> Plan:
    """Read a plan for this graph from what `fields_of` wrote, without carrying it out to check it. Raises PlanFileError."""
    return _plan(Fields(obj, "plan", _PLAN), graph, SCHEMA)


def _keys(keys: tuple[str, ...], schema: int) -> tuple[str, ...]:
    return tuple(key for key in keys if _SINCE.get(key, 0) <= schema)


def _updates_early(graph: Graph) -> bool:
    """Whether the step updates parameters before its backward is over."""
    last = max((op.at for op in graph.ops if op.phase == "backward"), default=BEFORE)
    read = (t for op in graph.ops if op.phase == "update" and op.at < last for t in op.inputs)
    return any(graph.tensors[t].kind == "parameter" for t in read)


def _plan(fields: Fields, graph: Graph, schema: int) -> Plan:
    old = schema < _SINCE["updates"]
    predicted = fields.inner("predicted", _keys(_PREDICTED, schema))
    return Plan(
        fingerprint=fields.string("fingerprint"),
        lives=_lives(fields, graph),
        updates=() if old else tuple(fields.ints("updates", None, 0, len(graph.tensors) - 1)),
        regions=() if schema < _SINCE["regions"] else tuple(_regions(fields)),
        tiles=() if schema < _SINCE["tiles"] else tuple(_tiles(fields)),
        states=() if schema < _SINCE["states"] else tuple(_states(fields, schema)),
        weights=() if schema < _SINCE["weights"] else tuple(_weights(fields)),
        tier_limits=() if schema < _SINCE["tiers"] else tuple(_tier_limits(fields)),
        addresses=None if schema < _SINCE["addresses"] or fields.value("addresses") is None else _addresses(fields),
        solver=fields.string("solver"),
        budget_nbytes=fields.integer("budget_nbytes"),
        unmodified_peak_nbytes=fields.integer("unmodified_peak_nbytes"),
        step_seconds=fields.number("step_seconds"),
        lower_bound_seconds=fields.number("lower_bound_seconds"),
        solve_seconds=fields.number("solve_seconds"),
        predicted=Prediction(
            peak_nbytes=predicted.integer("peak_nbytes"),
            reserved_nbytes=predicted.integer("reserved_nbytes"),
            extra_seconds=predicted.number("extra_seconds"),
            overhead_seconds=predicted.number("overhead_seconds"),
            extra_flops=predicted.integer("extra_flops"),
            rebuilt_nbytes=predicted.integer("rebuilt_nbytes"),
            rebuilt_ops=predicted.integer("rebuilt_ops"),
            moved_nbytes=predicted.integer("moved_nbytes"),
            copy_seconds=predicted.number("copy_seconds"),
            stall_seconds=predicted.number("stall_seconds"),
            codec_seconds=predicted.number("codec_seconds"),
            tier_nbytes=predicted.integer("tier_nbytes"),
            update_seconds=0.0 if old else predicted.number("update_seconds"),
        ),
    )


def _read_lives(columns: Fields, last_tensor: int = MOST, last_point: int = MOST) -> tuple[Life, ...]:
    """Read the lives of a table, and check that each one ends after it begins."""
    tensors = columns.ints("tensor", None, 0, last_tensor)
    born = columns.ints("born_at", len(tensors), BEFORE, last_point)
    freed = columns.ints("freed_at", len(tensors), 0, last_point)
    hows = columns.chosen("how", len(tensors), _HOWS)
    form_names = columns.strings("forms")
    forms = [form_names[i] for i in columns.ints("form", len(tensors), 0, len(form_names) - 1)]
    parked = columns.ints("parked_nbytes", len(tensors), 0, MOST)
    for i, (born_at, freed_at) in enumerate(zip(born, freed, strict=True)):
        if freed_at < born_at:
            columns.refuse("freed_at", i, f"{freed_at} is before the birth, at {born_at}")
    return tuple(
        Life(tensor=tensor, born_at=born_at, freed_at=freed_at, how=how, form=form, parked_nbytes=nbytes)
        for tensor, born_at, freed_at, how, form, nbytes in zip(tensors, born, freed, hows, forms, parked, strict=True)
    )


def _lives(fields: Fields, graph: Graph) -> tuple[Life, ...]:
    columns = fields.inner("lives", _LIFE)
    lives = _read_lives(columns, len(graph.tensors) - 1, len(graph.points) - 1)
    for i, life in enumerate(lives):
        tensor, born_at, before = life.tensor, life.born_at, lives[i - 1] if i else None
        if before is not None and tensor < before.tensor:
            columns.refuse("tensor", i, f"{tensor} after {before.tensor}; lives are sorted by tensor, then by birth")
        if before is not None and tensor == before.tensor and born_at <= before.freed_at:
            columns.refuse("born_at", i, f"{born_at}, but the life of tensor {tensor} before it ends at {before.freed_at}")
        if life.how != "original" and (born_at == BEFORE or graph.points[born_at].kind != "unpack"):
            columns.refuse("born_at", i, f"{born_at}: a {life.how} begins at an unpack, which this point is not")
        if life.how == "original" and born_at != graph.tensors[tensor].born_at:
            columns.refuse("born_at", i, f"{born_at}, but tensor {tensor} is made at {graph.tensors[tensor].born_at}")
    return lives


def _regions(fields: Fields) -> Iterator[RegionPlan]:
    """The file does not have the graphs of regions, so the lives of a region are checked when a region with its key is
    compiled.
    """
    for i, each in enumerate(fields.objects("regions")):
        region = Fields(each, f"plan.regions[{i}]", _REGION)
        yield RegionPlan(
            key=region.string("key"),
            lives=None if region.value("lives") is None else _region_lives(region),
            calls=region.number("calls"),
            flops=region.integer("flops"),
            extra_flops=region.integer("extra_flops"),
            rebuilt_ops=region.integer("rebuilt_ops"),
            saved_nbytes=region.integer("saved_nbytes"),
            peak_nbytes=region.integer("peak_nbytes"),
        )


def _region_lives(region: Fields) -> tuple[Life, ...]:
    columns = region.inner("lives", _LIFE)
    lives = _read_lives(columns)
    for i, life in enumerate(lives):
        if life.how == "fetch":
            columns.refuse("how", i, "a compiled region cannot park tensors")
    return lives


def _tiles(fields: Fields) -> Iterator[TiledHead]:
    for i, each in enumerate(fields.objects("tiles")):
        head = Fields(each, f"plan.tiles[{i}]", _TILES)
        sizes: dict[str, Any] = {
            key: head.integer(key, 1 if key in ("classes", "tokens", "rows") else 0) for key in _TILES[1:-3]
        }
        names: dict[str, Any] = {key: tuple(head.strings(key)) for key in _TILES[-3:]}
        yield TiledHead(module=head.string("module"), **sizes, **names)


def _states(fields: Fields, schema: int) -> Iterator[StateParking]:
    copies = "copy_seconds" if schema > 8 else "seconds"  # before, a step waited for all of them
    for i, each in enumerate(fields.objects("states")):
        state = Fields(each, f"plan.states[{i}]", tuple(key for key in _STATE if key not in _SINCE_9 or schema > 8))
        nbytes = state.integer("nbytes", 1)
        yield StateParking(
            parameter=state.string("parameter"),
            what=_what(state) if schema > 8 else "state",
            tier=state.string("tier"),
            nbytes=nbytes,
            tier_nbytes=state.integer("tier_nbytes", nbytes) if schema > 8 else taken(state.string("tier"), nbytes),
            copy_seconds=state.number(copies),
            seconds=state.number("seconds"),
            comes_after=state.string("comes_after") if schema > 8 else "",
            leaves_before=state.string("leaves_before") if schema > 8 else "",
        )


def _what(state: Fields) -> Read:
    name = state.string("what")
    for what in get_args(Read):
        if what == name:
            return what
    return state.refuse("what", None, f"{name!r} is none of {', '.join(get_args(Read))}")


def _weights(fields: Fields) -> Iterator[WeightParking]:
    for i, each in enumerate(fields.objects("weights")):
        unit = Fields(each, f"plan.weights[{i}]", _WEIGHTS)
        yield WeightParking(
            module=unit.string("module"),
            tier=unit.string("tier"),
            nbytes=unit.integer("nbytes", 1),
            tier_nbytes=unit.integer("tier_nbytes", unit.integer("nbytes", 1)),
            beside=tuple(unit.strings("beside")),
            moved_nbytes=unit.integer("moved_nbytes"),
            copy_seconds=unit.number("copy_seconds"),
            seconds=unit.number("seconds"),
        )


def _tier_limits(fields: Fields) -> Iterator[tuple[str, int]]:
    for i, each in enumerate(fields.objects("tiers")):
        row = Fields(each, f"plan.tiers[{i}]", _TIER)
        row.integer("nbytes")  # what the lives and what rests take says more
        if row.value("limit_nbytes") is not None:
            yield row.string("tier"), row.integer("limit_nbytes")


def _addresses(fields: Fields) -> Addresses:
    columns = fields.inner("addresses", _ADDRESSES)
    nbytes = columns.ints("nbytes", None)
    return Addresses(
        nbytes=tuple(nbytes),
        offsets=tuple(None if offset < 0 else offset for offset in columns.ints("offsets", len(nbytes), -1)),
        until=tuple(columns.ints("until", len(nbytes))),
        arena_nbytes=columns.integer("arena_nbytes"),
        max_live_nbytes=columns.integer("max_live_nbytes"),
        needed_nbytes=columns.integer("needed_nbytes"),
    )


def write_plan(path: str | os.PathLike[str], plan: Plan, graph: Graph) -> None:
    """Write a plan file, whole or not at all. Raises PlanFileError for a plan that `read_plan` would refuse."""
    with jsonio.writing(path):  # raises for what `parse` refuses, too
        data = (_lines(plan_to_json(plan, graph)) + "\n").encode("ascii")
        plan_from_json(jsonio.parse(data, name="what would be written"))
        # not `jsonio.write`, which writes one number per line or everything on one line
        replace_file(Path(path), data)


def read_plan(path: str | os.PathLike[str]) -> tuple[Plan, Graph]:
    """The plan in the file at `path`, and the graph it was made for. Raises PlanFileError."""
    obj = jsonio.read(path)
    try:
        return plan_from_json(obj)
    except PlanFileError as error:
        raise PlanFileError(f"{os.fspath(path)!r}: {error}") from error


def _lines(value: object, depth: int = 0) -> str:
    """JSON with each field of an object on its own line, and each array on one line."""
    if not isinstance(value, dict):
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    indent = " " * (depth + 1)
    inner = ",\n".join(f"{indent}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items())
    return f"{{\n{inner}\n{' ' * depth}}}"
