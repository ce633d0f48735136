"""Explain a plan as text: by block of the model, tensor by tensor, or for one operator or module.

Input: a plan and its graph. Needs no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lightning_memopt.errors import ConfigError
from lightning_memopt.graph import BEFORE, Graph, Op
from lightning_memopt.plan import Plan, early, lower, regions_text, states_text, tiers_text, tiles_text, weights_text
from lightning_memopt.plan.peak import layer_of
from lightning_memopt.report.blocks import WIDTH, blocks, by_block
from lightning_memopt.report.fates import Fate, fates, operator, runs_again
from lightning_memopt.report.text import Table, render
from lightning_memopt.units import format_nbytes


def rebuilds_or_parks(plan: Plan) -> str:
    """What the plans do for which the lower bound is proven."""
    return "rebuilds and parks" if plan.parks else "only rebuilds"


def head(plan: Plan) -> str:
    """The plan in two lines: its budget, peaks and price."""
    p = plan.predicted
    share = f" ({100 * p.seconds / plan.step_seconds:.1f} % of the step's ops)" if plan.step_seconds else ""
    reserved = f", {format_nbytes(p.reserved_nbytes)} reserved" if p.reserved_nbytes else ""
    parts = {"rebuilding": p.extra_seconds, "waiting for copies": p.stall_seconds}
    parts |= {"encoding and decoding": p.codec_seconds, "our own work": p.overhead_seconds}
    parts["updating parameters one by one"] = p.update_seconds
    shown = ", ".join(f"{1e3 * seconds:.2f} {what}" for what, seconds in parts.items() if seconds)
    return (
        f"Plan by {plan.solver} for {format_nbytes(plan.budget_nbytes)}: peak {format_nbytes(p.peak_nbytes)}{reserved}, "
        f"unmodified {format_nbytes(plan.unmodified_peak_nbytes)}.\n"
        f"Extra time {1e3 * p.seconds:.2f} ms a step{share}{f': {shown}' if shown else ''}. {p.rebuilt_ops} ops "
        f"run again. No plan that {rebuilds_or_parks(plan)} takes less than {1e3 * plan.lower_bound_seconds:.2f} ms."
    )


def explain(plan: Plan, graph: Graph) -> str:
    """The plan in two lines, and a table with one row for each block of the model."""
    lines = [head(plan), *([f"Updated in backward: {updates_text(plan, graph)}."] if graph.updates else [])]
    if plan.tiles:
        lines.append(f"In tiles: {tiles_text(plan.tiles)}.")
    if plan.states:
        lines.append(f"Parked between updates: {states_text(plan.states)}.")
    if plan.weights:
        lines.append(f"On the device only while their module runs: {weights_text(plan.weights)}.")
    if plan.in_tiers:
        lines.append(f"Taken beside the device: {tiers_text(plan)}.")
    if plan.addresses is not None:
        a = plan.addresses
        lines.append(
            f"Addresses: {a.planned} of {len(a.nbytes)} requests of a step in an arena of {format_nbytes(a.arena_nbytes)}; "
            f"no arena is smaller than {format_nbytes(a.max_live_nbytes)}."
        )
    if plan.regions:
        lines.append(f"{regions_text(plan.regions)}.")
    return "\n".join([*lines, by_block(blocks(graph, plan))])


def updates_text(plan: Plan, graph: Graph) -> str:
    """How many parameters the plan updates early, out of those that can be, and the bytes of gradients that this frees."""
    freed = sum(update.nbytes for update in graph.updates if update.parameter in plan.updates)
    return f"{len(plan.updates)} of {len(early(graph))} parameters, which frees {format_nbytes(freed)} of gradients"


def tensors(plan: Plan, graph: Graph) -> str:
    """A table with one row for each saved tensor: its lives in the plan, or why it is kept."""
    schedule = lower(graph, plan.lives)
    table = Table(
        title=f"Plan of {plan.solver}: peak {format_nbytes(plan.predicted_peak_nbytes)}, {len(schedule.rebuilt)} ops run again"
    )
    for column in ("tensor", "made by", "in", "size", "what happens to it"):
        table.add_column(column)
    for fate in fates(graph, plan):
        t, op = fate.tensor, fate.op
        if t.born_at == BEFORE:
            continue
        lives = (
            f"{life.how}{f' from {life.form}' if life.form else ''} {life.born_at}..{life.freed_at}" for life in fate.lives
        )
        text = "; ".join(lives) or "never read"
        if t.id in graph.anchors:
            again = "does not write all of it again" if op.recomputable else "is not run again"
            text += f" (kept: {operator(op.name)} {again})"
        table.add_row(str(t.id), operator(op.name), op.scope or "-", format_nbytes(t.nbytes), text)
    return render(table, WIDTH)


def of_operator(plan: Plan, graph: Graph, name: str) -> str:
    """What the plan does with the results of one operator (`gelu`, `aten::gelu`), module by module.

    Raises ConfigError, which names similar operators, if no forward op of the step has this one.
    """
    wanted = operator(name).lower()
    chosen = [op for op in graph.forward if operator(op.name).lower() == wanted]
    if not chosen:
        raise _nothing("operator", name, {operator(op.name) for op in graph.forward})
    return _about(plan, graph, chosen, f"{wanted}: {len(chosen)} in a forward")


def of_module(plan: Plan, graph: Graph, name: str) -> str:
    """What the plan does with the tensors of one module and those inside it. `*` matches any number: `h.*.mlp`.

    Raises ConfigError, which names similar modules, if no forward op of the step ran in this one.
    """
    paths = {op.id: op.scope.partition("#")[0] for op in graph.forward}

    def inside(path: str) -> bool:
        given = layer_of(path) if "*" in name else path
        return given == name or given.startswith(f"{name}.")

    chosen = [op for op in graph.forward if inside(paths[op.id])]
    if not chosen:
        parts = (path.split(".") for path in set(paths.values()) if path)
        raise _nothing("module", name, {".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)})
    return _about(plan, graph, chosen, f"{name}: {len(chosen)} ops in a forward")


def _nothing(kind: str, name: str, known: set[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, sorted(known), n=4, cutoff=0.4)
    shown = f"Similar names: {', '.join(nearest)}" if nearest else f"There are {', '.join(sorted(known)[:8]) or 'none'}"
    return ConfigError(f"no {kind} of this step is called {name!r}. {shown}: use one of them.")


def _about(plan: Plan, graph: Graph, ops: Iterable[Op], title: str) -> str:
    """A table of these ops, with equal ops of a module in one row."""
    of_op: dict[int, list[Fate]] = {}
    for fate in fates(graph, plan):
        of_op.setdefault(fate.op.id, []).append(fate)
    again = runs_again(graph, plan)
    rows: dict[tuple[str, ...], list[tuple[Op, int]]] = {}
    for op in ops:
        mine = of_op.get(op.id, [])
        path = op.scope.partition("#")[0] or "the model itself"
        for what, why in dict.fromkeys((f.what, f.why) for f in mine) or [("not saved", "autograd does not ask for it")]:
            nbytes = sum(f.tensor.nbytes for f in mine if (f.what, f.why) == (what, why))
            rows.setdefault((path, operator(op.name), what, why), []).append((op, nbytes))
    table = Table(title=title)
    for column in ("module", "operator", "what happens to its results", "why"):
        table.add_column(column)
    for column in ("times", "size", "ms", "runs again"):
        table.add_column(column, justify="right")
    for key, entries in rows.items():
        nbytes, seconds = sum(n for _, n in entries), sum(op.seconds for op, _ in entries)
        times = sum(again[op.id] for op, _ in entries)
        size = format_nbytes(nbytes) if nbytes else "-"
        table.add_row(*key, str(len(entries)), size, f"{1e3 * seconds:.2f}", str(times) if times else "-")
    return render(table, WIDTH)
