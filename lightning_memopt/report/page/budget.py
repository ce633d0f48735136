"""Budget against time: all plans that were found, this run's plan among them, and what a tenth more budget would save."""

from __future__ import annotations

from lightning_memopt.report.explain import rebuilds_or_parks
from lightning_memopt.report.frontier import Row
from lightning_memopt.report.page.parts import Grid, Picture, Section, count, ms, size
from lightning_memopt.report.record import RunRecord
from lightning_memopt.units import format_nbytes

_MORE = 0.1
"""The larger budget that is looked up, as a multiple of this one."""


def next_row(rows: tuple[Row, ...], budget_nbytes: int) -> Row | None:
    """The fastest plan within `_MORE` times the budget; None if there is none."""
    within = [row for row in rows if row.peak_nbytes <= budget_nbytes * (1 + _MORE)]
    return min(within, key=lambda row: (row.extra_seconds, row.peak_nbytes), default=None)


def section(record: RunRecord) -> Section:
    title, plan, rows = "Budget against time", record.plan, record.frontier
    if plan is None:
        return Section("frontier", title, ("There is no plan.",), absent=True)
    if not rows:
        why = "The plan came from a file, which has no other plans; memopt report with --solver-seconds above 0 finds them."
        return Section("frontier", title, (why,), absent=True)
    lead = [
        "What would another budget cost? Each point of the line is a plan that was found: the memory that it needs (to the "
        "right), and the time that it adds to a step (upwards), both predicted. The red point is this plan. The triangle is a "
        f"proven limit: no plan within the budget that {rebuilds_or_parks(plan)} adds less time."
    ]
    if plan.parks:
        lead.append("Plans on the line only rebuild. This plan also parks tensors, so it may lie below the line.")
    elif any(row.peak_nbytes <= plan.predicted_peak_nbytes and row.extra_seconds > plan.predicted.seconds for row in rows):
        lead.append("This plan may lie a little below the line, because it was searched for with only this budget.")
    budget = record.budget_nbytes
    if budget is None:
        lead.append('The budget is "min", the smallest plan, so a tenth more is not looked up.')
    else:
        lead.append(_sentence(record, rows, budget))
    point = {"nbytes": plan.predicted_peak_nbytes, "seconds": plan.predicted.seconds}
    data = {
        "plans": [[row.peak_nbytes, row.extra_seconds, row.solver] for row in rows],
        "run": point,
        "bound": plan.lower_bound_seconds,
        "budget": budget,
        "unmodified": plan.unmodified_peak_nbytes,
        "measured": record.measured_peak_nbytes,
    }
    label = (
        f"{len(rows)} plans from {format_nbytes(rows[0].peak_nbytes)} to {format_nbytes(rows[-1].peak_nbytes)}; this run's "
        f"needs {format_nbytes(plan.predicted_peak_nbytes)} and adds {ms(plan.predicted.seconds).text} a step"
    )
    table = Grid(
        "frontier-plans",
        f"{len(rows)} plans",
        ("peak, predicted", "extra time a step, predicted", "extra FLOPs", "rebuilt", "found by"),
        [[size(r.peak_nbytes), ms(r.extra_seconds), count(r.extra_flops), size(r.rebuilt_nbytes), r.solver] for r in rows],
    )
    return Section("frontier", title, tuple(lead), pictures=(Picture("frontier", title, label, data),), grids=(table,))


def _sentence(record: RunRecord, rows: tuple[Row, ...], budget: int) -> str:
    plan = record.plan
    assert plan is not None
    beside = plan.predicted.needed_nbytes - plan.predicted_peak_nbytes  # what the allocator reserves above the peak
    more = next_row(rows, budget - beside)
    larger = int(budget * (1 + _MORE))
    if more is None or more.extra_seconds >= plan.predicted.seconds:
        if plan.parks:
            return f"No plan that only rebuilds within 10 % more budget ({format_nbytes(larger)}) is faster than this one."
        return f"10 % more budget ({format_nbytes(larger)}) would save no time: no plan found within it is faster."
    gain = plan.predicted.seconds - more.extra_seconds
    return (
        f"10 % more budget ({format_nbytes(larger)}) would save {ms(gain).text} a step: {ms(more.extra_seconds).text} extra "
        f"instead of {ms(plan.predicted.seconds).text}, at a peak of {format_nbytes(more.peak_nbytes)}."
    )
