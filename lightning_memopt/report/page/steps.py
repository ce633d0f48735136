"""Predicted against measured, step by step."""

from __future__ import annotations

from statistics import median

from lightning_memopt.report.page.parts import Cell, Grid, Picture, Section, count, ms, size
from lightning_memopt.report.record import RunRecord
from lightning_memopt.session.history import StepEntry
from lightning_memopt.units import format_nbytes


def usual_seconds(record: RunRecord) -> float | None:
    """The median wall time of planned steps without the first two (verification, warm-up); None if there are no others."""
    times = [s.seconds / s.steps for s in record.steps if s.kind == "planned" and s.seconds is not None]
    return median(times[2:]) if len(times) > 2 else None


def section(record: RunRecord) -> Section:
    title, steps = "Predicted and measured, step by step", record.steps
    if record.phase == "file":
        return Section("steps", title, ("A plan file has no measured steps: those are in the record of a run.",), absent=True)
    if not steps:
        return Section("steps", title, ("No step of this run has ended.",), absent=True)
    lead = ["Dots are the measured peaks, step by step; lines are the predicted ones."]
    pairs = [(s.measured_nbytes, s.predicted_nbytes) for s in steps if s.kind == "planned"]
    errors = [m / p - 1 for m, p in pairs if m is not None and p]
    if errors:
        worst = max(errors, key=abs)
        lead.append(f"The largest of {len(errors)} known differences between the two is {100 * worst:+.2f} %.")
    if any(s.kind == "observed" for s in steps):
        lead.append("Observed steps, from which the plan was made, have no prediction.")
    merged = sum(s.steps > 1 for s in steps)
    if merged:
        lead.append(f"{merged} dots and rows combine several steps: their peak is the largest, their time the mean.")
    lead.append("Times are wall time from the end of one step to the end of the next, including data loading and validation.")
    first, rows, data = 1, [], []
    for step in steps:
        seconds = None if step.seconds is None else step.seconds / step.steps
        rows.append([_named(first, step), step.kind, *_peaks(step), ms(seconds, "not known")])
        data.append([first, step.kind, step.predicted_nbytes, step.measured_nbytes, seconds])
        first += step.steps
    measured = [s.measured_nbytes for s in steps if s.measured_nbytes is not None]
    top = f"the largest measured peak is {format_nbytes(max(measured))}" if measured else "no peak was measured"
    picture = Picture("steps", title, f"{first - 1} steps; {top}", {"steps": data, "budget": record.budget_nbytes})
    columns = ("step", "kind", "peak, predicted", "peak, measured", "difference", "wall time a step, measured")
    table = Grid("steps-all", f"{first - 1} steps" + (f" in {len(steps)} rows" if merged else ""), columns, rows)
    return Section("steps", title, tuple(lead), pictures=(picture,), grids=(table,))


def _named(first: int, step: StepEntry) -> Cell:
    return count(first) if step.steps == 1 else Cell(f"{first} to {first + step.steps - 1}", first)


def _peaks(step: StepEntry) -> tuple[Cell, Cell, Cell]:
    predicted, measured = step.predicted_nbytes, step.measured_nbytes
    difference = Cell("")
    if predicted and measured is not None:
        difference = Cell(f"{100 * (measured / predicted - 1):+.2f} %", measured / predicted - 1)
    return size(predicted, "no plan"), size(measured), difference
