"""Explain a plan as text: which tensors are rebuilt, which are kept and why.

Input: a plan and its graph. Needs no torch.
"""

from __future__ import annotations

from collections import Counter

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Plan, lower
from lightning_memopt.report.text import Table, render
from lightning_memopt.solvers.ordering import savings
from lightning_memopt.units import format_nbytes


def _operator(name: str) -> str:
    """`"aten::addmm.out"` -> `"addmm"`."""
    return name.partition("::")[2].partition(".")[0]


def rebuilt(graph: Graph, plan: Plan) -> list[tuple[str, int, int]]:
    """(operator, number of tensors, bytes) of the saved tensors that are rebuilt, most bytes first."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for life in plan.lives:
        if life.how == "rebuild" and graph.saves_of.get(life.tensor):
            name = _operator(graph.producers[life.tensor].name)
            count[name] += 1
            nbytes[name] += graph.tensors[life.tensor].nbytes
    return [(name, count[name], total) for name, total in nbytes.most_common()]


def kept(graph: Graph, plan: Plan) -> list[tuple[str, int, int]]:
    """(reason, number of tensors, bytes) of the saved tensors that the plan keeps, most bytes first."""
    dropped = {life.tensor for life in plan.lives if life.how != "original"}
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    any_recomputable = any(op.recomputable for op in graph.forward)  # false with recompute=False
    for tensor in graph.saves_of:
        op = graph.producers.get(tensor)
        if tensor in dropped or op is None:
            continue
        t = graph.tensors[tensor]
        if not any_recomputable:
            why = "no op of this step runs again"
        elif not op.recomputable:
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


def items(entries: list[tuple[str, int, int]], most: int = 4) -> str:
    """The first `most` entries of `rebuilt` or `kept` as one line."""
    return ", ".join(f"{name} x{n} ({format_nbytes(b)})" for name, n, b in entries[:most]) or "nothing"


def explain(plan: Plan, graph: Graph) -> str:
    """A table with one row for each saved tensor: its lives in the plan, or why it is kept."""
    schedule = lower(graph, plan.lives)
    lives: dict[int, list[str]] = {}
    for life in plan.lives:
        how = f"{life.how} from {life.form}" if life.form else life.how
        lives.setdefault(life.tensor, []).append(f"{how} {life.born_at}..{life.freed_at}")
    table = Table(
        title=f"Plan of {plan.solver}: peak {format_nbytes(plan.predicted_peak_nbytes)}, {len(schedule.rebuilt)} ops run again"
    )
    for column in ("tensor", "made by", "in", "size", "what becomes of it"):
        table.add_column(column)
    for tensor in sorted(set(lives) | set(graph.saves_of)):
        t = graph.tensors[tensor]
        if t.born_at == BEFORE:
            continue
        op = graph.producers[tensor]
        fate = "; ".join(lives.get(tensor, ["never read"]))
        if tensor in graph.anchors:
            fate += f" (kept: {_operator(op.name)} is not run again)"
        table.add_row(str(tensor), _operator(op.name), op.scope or "-", format_nbytes(t.nbytes), fate)
    return render(table, 140)


def another_order(graph: Graph) -> str:
    """One line: what another order of the ops of the unmodified step could save at most, and what updates in backward save."""
    worth = savings(graph)
    if worth is None:
        return "There is no op whose order could be another one."
    given, most = worth.given_nbytes, worth.most_nbytes
    early, apart = given - worth.early_nbytes, given - worth.apart_nbytes

    def share(nbytes: int) -> str:
        return f"{nbytes / given:.1%} ({format_nbytes(nbytes)})"

    line = f"Another order of ops could save at most {share(most)}" if most else "No other order of ops needs less memory"
    if most and 2 * early >= most:
        return f"{line}, {format_nbytes(early)} of it by updates in backward (`optimizer_in_backward`)."
    if apart > most:  # one op updates all parameters
        return f"{line}; updates of single parameters in backward (`optimizer_in_backward`) at most {share(apart)}."
    return f"{line}; eager code runs in its own order." if most else f"{line}."
