"""Compute and copies over time, and the waits of compute: the three clocks of `plan/clocks.py`, as predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_memopt.errors import ConfigError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import lower, step_of
from lightning_memopt.plan.clocks import Interval, intervals
from lightning_memopt.report.page.parts import Grid, Picture, Rows, Section, count, ms, share
from lightning_memopt.report.record import RunRecord

MOST = 1500
"""Maximum number of intervals that are drawn."""
_LANES = {"compute": "compute", "out": "copies out", "in": "copies in"}
_MOST_WAITS = 20


def section(record: RunRecord) -> Section:
    title, graph, plan = "Compute and copies over time", record.graph, record.plan
    if graph is None or plan is None:
        return Section("timeline", title, ("There is no plan.",), absent=True)
    graph = step_of(graph, plan)  # its copies of what rests are those of the plan
    if plan.parks and record.rates is None:
        why = "The plan parks tensors. How long that takes is not known, because a plan file has no rates of copies and codecs."
        return Section("timeline", title, (why,), absent=True)
    try:
        log, moved = intervals(graph, plan.lives, lower(graph, plan.lives), record.rates)
    except ConfigError as error:  # rates of another machine
        why = f"The plan parks tensors, and their times are not known: {error}."
        return Section("timeline", title, (why,), absent=True)
    copies = plan.parks or graph.copies
    rates = " and the measured rates of copies and codecs" if copies else ""
    lead = [
        f"What the device does from the beginning to the end of a step, predicted from the observed times of the ops{rates}."
    ]
    if any(i.what == "rebuild" for i in log):
        lead.append("Compute that the plan adds is green: saved tensors are rebuilt, so their ops run a second time.")
    if not copies:
        lead.append("This plan parks nothing in forward and backward, so nothing is copied then, and nothing waits for a copy.")
    elif not moved.stall_seconds:
        lead.append("No op waits for a copy: all copies are hidden behind compute.")
    log = [interval for interval in log if interval.ends > interval.begins]
    drawn = merged(graph, log)
    hidden = len(log) - sum(n for _, n in drawn)
    if hidden:
        lead.append(f"{hidden} of the shortest intervals are not drawn; the seconds by kind count all of them.")
    whole = max((i.ends for i in log), default=0.0)
    data = {
        "lanes": [lane for key, lane in _LANES.items() if any(i.lane == key for i in log)],
        "spans": [[_LANES[i.lane], i.what, i.begins, i.ends, _says(graph, i, n)] for i, n in drawn],
        "seconds": whole,
    }
    totals: dict[tuple[str, str], list[float]] = {}
    for i in log:
        totals.setdefault((i.lane, i.what), []).append(i.ends - i.begins)
    rows: Rows = [
        [_LANES[lane], what, count(len(spans)), ms(sum(spans)), share(sum(spans), whole)]
        for (lane, what), spans in totals.items()
    ]
    grids = [Grid("timeline-totals", "Seconds by kind", ("lane", "what", "intervals", "time", "of the step"), rows)]
    waits = sorted((i for i in log if i.what == "wait"), key=lambda i: i.begins - i.ends)[:_MOST_WAITS]
    if waits:
        stalls: Rows = [[graph.tensors[i.tensor].name, ms(i.begins), ms(i.ends - i.begins)] for i in waits]
        grids.append(Grid("timeline-waits", "The longest waits for copies", ("tensor", "begins at", "waits"), stalls))
    every: Rows = [[_LANES[i.lane], i.what, _says(graph, i, n), ms(i.begins), ms(i.ends - i.begins)] for i, n in drawn]
    head = ("lane", "what", "of", "begins at", "takes")
    grids.append(Grid("timeline-intervals", f"All {len(drawn)} drawn intervals", head, every))
    label = f"{len(drawn)} intervals over {ms(whole).text}; compute waits {ms(moved.stall_seconds).text} for copies"
    return Section("timeline", title, tuple(lead), pictures=(Picture("lanes", title, label, data),), grids=tuple(grids))


def merged(graph: Graph, log: Sequence[Interval], most: int = MOST) -> list[tuple[Interval, int]]:
    """(interval, number of intervals merged into it), at most `most`. Neighbours of one module, then of one kind, are merged.
    If there are still too many, the shortest are left out.
    """

    def module(i: Interval) -> object:
        return graph.ops[i.op].scope if i.op >= 0 else i.tensor

    drawn = [(i, 1) for i in log]
    keys: tuple[Callable[[Interval], object], ...] = (module, lambda i: None)
    for key in keys:
        if len(drawn) > most:
            drawn = _joined(drawn, key)
    if len(drawn) > most:
        longest = sorted(drawn, key=lambda pair: pair[0].begins - pair[0].ends)[:most]
        drawn = sorted(longest, key=lambda pair: pair[0].begins)
    return drawn


def _joined(drawn: list[tuple[Interval, int]], key: Callable[[Interval], object]) -> list[tuple[Interval, int]]:
    """The intervals, with adjacent ones of the same lane, kind and key merged."""
    last: dict[str, int] = {}
    result: list[tuple[Interval, int]] = []
    for interval, n in drawn:
        at = last.get(interval.lane)
        if at is not None:
            before, m = result[at]
            same = before.what == interval.what and key(before) == key(interval)
            if same and interval.begins - before.ends <= 1e-9:
                result[at] = before._replace(ends=interval.ends), m + n
                continue
        last[interval.lane] = len(result)
        result.append((interval, n))
    return result


def _says(graph: Graph, i: Interval, n: int) -> str:
    if i.op >= 0:
        op = graph.ops[i.op]
        where = f" in {op.scope}" if op.scope else ""
        return f"{op.name}{f' and {n - 1} more' if n > 1 else ''}{where}"
    return graph.tensors[i.tensor].name if i.tensor >= 0 else ""
