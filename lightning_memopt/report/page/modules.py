"""The plan on the tree of modules: what each keeps, rebuilds and parks, in bytes and milliseconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_memopt.errors import ConfigError
from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Plan, lower
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.lower import Rebuild
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.report.page.parts import Branch, Grid, Rows, Section, ms, size
from lightning_memopt.report.record import RunRecord
from lightning_memopt.units import format_nbytes

_MOST_TENSORS = 12
_MOST_MODULES = 1500
_UNFOLDED = 24
"""Maximum number of lines that are unfolded at first."""
FATES = ("kept", "rebuilt", "parked", "there anyway")
"""The fates of a saved tensor. `there anyway`: the program itself holds it until backward asks for it."""
_MEANINGS = {
    "kept": "stays in memory until backward has read it",
    "rebuilt": "dropped in forward; its ops run again in backward",
    "parked": "copied or compressed in forward, fetched in backward",
    "there anyway": "held by the program itself",
}


@dataclass
class Figures:
    """The figures of one module, including the modules inside it. Bytes and numbers are of saved tensors, by fate."""

    nbytes: Counter[str] = field(default_factory=Counter)
    tensors: Counter[str] = field(default_factory=Counter)
    forward_seconds: float = 0.0
    rebuild_seconds: float = 0.0
    copy_seconds: float = 0.0
    codec_seconds: float = 0.0
    own: list[tuple[int, str]] = field(default_factory=list)
    """(tensor, fate) of the module itself."""


def figures(graph: Graph, plan: Plan, rates: MachineRates | None) -> dict[tuple[str, ...], Figures]:
    """Path of a module -> its figures; the empty path is the model."""
    tree: defaultdict[tuple[str, ...], Figures] = defaultdict(Figures)
    for op in graph.forward:
        for node in _upwards(op.scope):
            tree[node].forward_seconds += op.seconds
    schedule = lower(graph, plan.lives)
    for steps in schedule.segments.values():
        for step in steps:
            if isinstance(step, Rebuild):
                op = graph.ops[step.op]
                for node in _upwards(op.scope):
                    tree[node].rebuild_seconds += op.seconds
    for tensor, fate in fates(graph, plan).items():
        t = graph.tensors[tensor]
        nodes = _upwards(graph.producers[tensor].scope if tensor in graph.producers else "")
        tree[nodes[0]].own.append((tensor, fate))
        for node in nodes:
            tree[node].nbytes[fate] += t.nbytes
            tree[node].tensors[fate] += 1
    if rates is not None:
        for tensor, (copy, codec) in _trips(plan, graph, rates).items():
            for node in _upwards(graph.producers[tensor].scope if tensor in graph.producers else ""):
                tree[node].copy_seconds += copy
                tree[node].codec_seconds += codec
    return dict(tree)


def fates(graph: Graph, plan: Plan) -> dict[int, str]:
    """Saved tensor that backward asks for -> its fate."""
    hows: defaultdict[int, set[str]] = defaultdict(set)
    for life in plan.lives:
        hows[life.tensor].add(life.how)
    result = {}
    for tensor, saves in graph.saves_of.items():
        t, requests = graph.tensors[tensor], [p for s in saves for p in s.unpacked_at]
        if t.born_at == BEFORE or not requests:
            continue
        if "fetch" in hows[tensor]:
            result[tensor] = "parked"
        elif "rebuild" in hows[tensor]:
            result[tensor] = "rebuilt"
        else:
            result[tensor] = "there anyway" if t.freed_at >= max(requests) else "kept"
    return result


def _trips(plan: Plan, graph: Graph, rates: MachineRates) -> dict[int, tuple[float, float]]:
    """Parked tensor -> seconds of its copies, and of its codec, predicted at these rates."""
    trips: dict[int, tuple[float, float]] = {}
    for life in plan.lives:
        if life.how == "fetch":
            first = life.tensor not in trips
            copy, codec = trips.get(life.tensor, (0.0, 0.0))
            if tier := tier_of(life.form):
                copy += rates.in_seconds(tier, life.parked_nbytes)
                copy += rates.out_seconds(tier, life.parked_nbytes) if first else 0.0
            if name := codec_of(life.form):
                nbytes = graph.tensors[life.tensor].nbytes
                codec += rates.decode_seconds(name, nbytes) + (rates.encode_seconds(name, nbytes) if first else 0.0)
            trips[life.tensor] = (copy, codec)
    return trips


def _upwards(scope: str) -> list[tuple[str, ...]]:
    """The paths of a module and of all modules around it, the model last. `h.3.mlp#1` is `h.3.mlp`."""
    name = scope.partition("#")[0]
    path = tuple(name.split(".")) if name else ()
    return [path[:n] for n in range(len(path), -1, -1)]


def section(record: RunRecord) -> Section:
    graph, plan, title = record.graph, record.plan, "The plan on the modules"
    if plan is None or graph is None:
        return Section("modules", title, ("There is no plan.",), absent=True)
    try:
        tree = figures(graph, plan, record.rates)
    except ConfigError:  # rates of another machine
        tree = figures(graph, plan, None)
    lead = [
        "What the plan does with the saved tensors of each module, including the modules inside it. A full bar is all saved "
        "tensors of the model. Milliseconds are the predicted time that this adds to a step. Unfold a module to see what is "
        "inside it."
    ]
    if any(f.rebuild_seconds and not f.tensors["rebuilt"] for f in tree.values()):
        lead.append('"runs again for others": the module saves nothing, but its result is needed to rebuild another tensor.')
    if plan.parks and record.rates is None:
        lead.append("The rates of copies and codecs are not known, so parked bytes have no milliseconds.")
    depth = max((n for n in range(1, 20) if sum(len(path) <= n for path in tree) <= _MOST_MODULES), default=1)
    hidden = sum(len(path) > depth for path in tree)
    if hidden:
        lead.append(f"{hidden} modules deeper than {depth} levels have no line; the modules above them include their figures.")
    children: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for path in tree:  # in the order of the forward
        if path and len(path) <= depth:
            children[path[:-1]].append(path)
    rows: Rows = [
        [
            ".".join(path) or record.model or "the model",
            *(size(f.nbytes[fate]) for fate in FATES),
            ms(f.forward_seconds),
            ms(f.rebuild_seconds),
            ms(f.copy_seconds),
            ms(f.codec_seconds),
        ]
        for path, f in tree.items()
        if len(path) <= depth
    ]
    columns = ("module", *FATES, "forward", "rebuilds", "copies", "codecs")
    table = Grid("modules-all", "All modules", columns, rows)
    levels = [n for n in range(depth + 1) if sum(len(path) <= n + 1 for path in tree) <= _UNFOLDED]
    unfolded = {path for path in tree if len(path) in (0, *levels)}
    root = _branch(_Drawn(graph, tree, children, unfolded), (), record.model or "the model")
    there = {fate for f in tree.values() for fate in FATES if f.tensors[fate]}
    legend = tuple((fate.replace(" ", "-"), f"{fate}: {_MEANINGS[fate]}") for fate in FATES if fate in there)
    return Section("modules", title, tuple(lead), legend=legend, tree=(root,), grids=(table,))


class _Drawn(NamedTuple):
    graph: Graph
    tree: dict[tuple[str, ...], Figures]
    children: dict[tuple[str, ...], list[tuple[str, ...]]]
    unfolded: set[tuple[str, ...]]


def _branch(drawn: _Drawn, path: tuple[str, ...], name: str) -> Branch:
    def made_by(t: int) -> str:
        return graph.producers[t].name if t in graph.producers else ""

    graph, f = drawn.graph, drawn.tree.get(path, Figures())
    below = tuple(_branch(drawn, child, child[-1]) for child in drawn.children.get(path, ()))
    whole = max(1, sum(drawn.tree.get((), Figures()).nbytes.values()))
    shares = tuple((fate.replace(" ", "-"), f.nbytes[fate] / whole) for fate in FATES)
    grids: tuple[Grid, ...] = ()
    if f.own:
        largest = sorted(f.own, key=lambda own: -graph.tensors[own[0]].nbytes)
        rows: Rows = [
            [graph.tensors[t].name, made_by(t), size(graph.tensors[t].nbytes), fate] for t, fate in largest[:_MOST_TENSORS]
        ]
        rest = [t for t, _ in largest[_MOST_TENSORS:]]
        if rest:
            rows.append([f"{len(rest)} smaller ones", "", size(sum(graph.tensors[t].nbytes for t in rest)), ""])
        own = "" if not below else " in the module itself"
        key = "module-" + "-".join(path) if path else "module"
        grids = (Grid(key, f"saved tensors{own}", ("tensor", "made by", "bytes", "fate"), rows, opened=not below),)
    return Branch(name, line(f), shares, bool(below) and path in drawn.unfolded, grids, below)


def line(f: Figures) -> str:
    """What the plan does with a module's saved tensors, in one line."""
    seconds = {"rebuilt": f.rebuild_seconds, "parked": f.copy_seconds + f.codec_seconds}
    said = []
    for fate in FATES:
        if f.tensors[fate]:
            takes = f", {ms(seconds[fate]).text}" if seconds.get(fate) else ""
            said.append(f"{fate} {format_nbytes(f.nbytes[fate])} ({f.tensors[fate]} tensor{'s'[: f.tensors[fate] > 1]}{takes})")
    if not f.tensors["rebuilt"] and f.rebuild_seconds:
        said.append(f"runs again for others, {ms(f.rebuild_seconds).text}")
    return "; ".join(said) or "saves nothing"
