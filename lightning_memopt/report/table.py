"""The table at the end of a run, and the explanation of a plan."""

from __future__ import annotations

import io
from collections import Counter

from rich.console import Console
from rich.table import Table

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Plan, lower
from lightning_memopt.session import Session
from lightning_memopt.session.buckets import Failed, Observing, Running
from lightning_memopt.units import format_nbytes


def _render(table: Table, width: int = 110) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(table)
    return out.getvalue().rstrip()


def _operator(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]


def rebuilt(graph: Graph, plan: Plan) -> list[tuple[str, int, int]]:
    """(operator, times, bytes) of what is dropped and made again, by bytes."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for life in plan.lives:
        if life.how == "replay" and graph.saves_of.get(life.tensor):
            name = _operator(graph.producers[life.tensor].name)
            count[name] += 1
            nbytes[name] += graph.tensors[life.tensor].nbytes
    return [(name, count[name], total) for name, total in nbytes.most_common()]


def kept(graph: Graph, plan: Plan) -> list[tuple[str, int, int]]:
    """(reason, tensors, bytes) of what autograd saves and the plan keeps, by bytes."""
    dropped = {life.tensor for life in plan.lives if life.how == "replay"}
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for tensor in graph.saves_of:
        op = graph.producers.get(tensor)
        if tensor in dropped or op is None:
            continue
        t = graph.tensors[tensor]
        if not op.recomputable:
            why = f"{_operator(op.name)} is not run again"
        elif t.freed_at > graph.backward_begins:
            why = "the user holds it anyway"
        elif op.heavy:
            why = "heavy to make again, or rebuilds start from it"
        else:
            why = "the budget has room for it"
        count[why] += 1
        nbytes[why] += t.nbytes
    return [(why, count[why], total) for why, total in nbytes.most_common()]


def _items(entries: list[tuple[str, int, int]], most: int = 4) -> str:
    return ", ".join(f"{name} x{n} ({format_nbytes(b)})" for name, n, b in entries[:most]) or "nothing"


def summary(session: Session) -> str:
    """The table of a session; says what is still missing where there is no plan."""
    state = session.main
    if not session.enabled:
        return "MemOpt: off (MEMOPT_DISABLE or recompute=False); the run was the plain one."
    if state is None:
        return "MemOpt: no training step was seen."
    if isinstance(state, Failed):
        return f"MemOpt: no plan: {state.reason}."
    if isinstance(state, Observing):
        return f"MemOpt: still observing ({len(state.graphs)} of {state.steps} steps)."
    assert isinstance(state, Running)
    plan, graph = state.plan, state.program.graph
    table = Table(title="MemOpt", show_header=False)
    table.add_column()
    table.add_column()
    budget = "min" if session.budget_nbytes is None else format_nbytes(session.budget_nbytes)
    table.add_row("budget", budget)
    table.add_row("predicted peak", format_nbytes(plan.predicted_peak_bytes))
    measured = state.measured_bytes
    table.add_row(
        "measured peak",
        "not measured"
        if measured is None
        else f"{format_nbytes(measured)} ({100 * (measured / plan.predicted_peak_bytes - 1):+.2f} % of predicted)",
    )
    table.add_row("unmodified peak", format_nbytes(plan.unmodified_peak_bytes))
    extra, step = plan.predicted.extra_seconds, plan.step_seconds
    share = f" ({100 * extra / step:.1f} % of the step's ops)" if step else ""
    table.add_row(
        "extra time, predicted",
        f"{1e3 * extra:.1f} ms a step{share}; lower bound {1e3 * plan.lower_bound_seconds:.1f} ms",
    )
    table.add_row(
        "ops run again", f"{plan.predicted.replayed_ops}, {format_nbytes(plan.predicted.rebuilt_bytes)} rebuilt a step"
    )
    table.add_row("rebuilt", _items(rebuilt(graph, plan)))
    table.add_row("kept", _items(kept(graph, plan)))
    table.add_row("plan by", f"{plan.solver}, {plan.solve_seconds:.1f} s")
    return _render(table)


def explain(plan: Plan, graph: Graph) -> str:
    """What the plan does with every saved tensor, and why what is kept is kept."""
    schedule = lower(graph, plan.lives)
    lives: dict[int, list[str]] = {}
    for life in plan.lives:
        lives.setdefault(life.tensor, []).append(f"{life.how} {life.born_at}..{life.freed_at}")
    table = Table(
        title=f"Plan of {plan.solver}: peak {format_nbytes(plan.predicted_peak_bytes)}, {len(schedule.replayed)} ops run again"
    )
    for column in ("tensor", "made by", "in", "size", "what becomes of it"):
        table.add_column(column)
    anchors = {t for op in graph.forward if not op.recomputable for t in op.outputs}
    for tensor in sorted(set(lives) | set(graph.saves_of)):
        t = graph.tensors[tensor]
        if t.born_at == BEFORE:
            continue
        op = graph.producers[tensor]
        what = "; ".join(lives.get(tensor, ["never read"]))
        if tensor in anchors:
            what += f" (kept: {_operator(op.name)} is not run again)"
        table.add_row(str(tensor), _operator(op.name), op.scope or "-", format_nbytes(t.nbytes), what)
    return _render(table, 140)
