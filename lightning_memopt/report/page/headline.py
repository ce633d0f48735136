"""The most important figures, and the rates of the run. Each says whether it was predicted or measured."""

from __future__ import annotations

from collections import Counter

from lightning_memopt.report.explain import rebuilds_or_parks
from lightning_memopt.report.page.parts import Card, Cell, Grid, Section, count, ms, size
from lightning_memopt.report.page.steps import usual_seconds
from lightning_memopt.report.record import RunRecord
from lightning_memopt.units import format_nbytes

_WHY = {
    "off": "the package did nothing (MEMOPT_DISABLE, or a torch that was not tested): the run was the plain one",
    "waiting": "no training step was seen",
    "observing": "the run ended while steps were still observed",
    "unplanned": "there is no plan",
}

WORDS = {
    "step": "the forwards, the backwards and the update that end with one optimizer.step()",
    "budget": "the maximum bytes of the training device that a step may use, including weights and everything else",
    "peak": "the maximum bytes in memory at one moment of a step",
    "saved tensor": 'a tensor that autograd keeps in forward, because backward reads it; in the pictures "feature maps"',
    "plan": "the decision for every saved tensor: to keep, rebuild or park it. Losses and gradients do not change",
    "rebuild": "free a saved tensor in forward, and run its ops again just before backward reads it. That takes time",
    "park": "copy a saved tensor to the host or a disk, or compress it, and fetch it in backward",
    "op": "one operation of PyTorch, such as a matrix product",
    "point": "one event of a step: an op ran, or autograd asked for a saved tensor, or released it",
    "observed step": "a training step that was recorded, op by op. Plans and predictions are made from it",
    "predicted": "computed from the observed step",
    "measured": "read from the allocator, or from a clock",
    "proven": "a lower limit that no plan can beat, for the observed times",
}
"""Word -> what it means, as in docs/glossary.md."""


def summary(record: RunRecord) -> str:
    """The result of the run, in one sentence."""
    plan = record.plan
    if plan is None:
        why = f" {record.reason[:1].upper()}{record.reason[1:]}." if record.reason else ""
        remedy = f" {record.remedy}." if record.remedy else ""
        return f"{_WHY.get(record.phase, 'There is no plan').capitalize()}.{why}{remedy}"
    before, after = plan.unmodified_peak_nbytes, record.measured_peak_nbytes or plan.predicted.needed_nbytes
    how = "measured" if record.measured_peak_nbytes is not None else "predicted"
    if not (plan.parks or plan.predicted.rebuilt_ops):
        return f"The step fits as it is: it needs {format_nbytes(after)} of memory at its peak ({how}). Nothing runs again."
    saved = 100 * (1 - after / before) if before else 0.0
    share = 100 * plan.predicted.seconds / plan.step_seconds if plan.step_seconds else 0.0
    slower = f", {share:.1f} % of the time of the step's ops" if plan.step_seconds else ""
    return (
        f"With the plan, a step needs {format_nbytes(after)} of memory at its peak ({how}) instead of "
        f"{format_nbytes(before)} (predicted): {saved:.0f} % less. That adds {ms(plan.predicted.seconds).text} to a step "
        f"(predicted{slower})."
    )


def about(record: RunRecord) -> str:
    """What the page is about."""
    if record.phase == "file":
        return "This page shows what a plan file does to a training step."
    steps: Counter[str] = Counter()
    for step in record.steps:
        steps["without a plan" if step.kind == "unplanned" else step.kind] += step.steps
    said = [f"{n} {kind}" for kind, n in steps.items()]
    counted = f": {steps.total()} steps ({', '.join(said)})" if said else ""
    of_ranks = ""
    if record.ranks > 1:
        of_ranks = f" It shows rank {record.rank} of {record.ranks}; the other ranks have their own peaks, and no page."
    return f"This page shows what a memory budget did to one training run on {record.device or 'a device'}{counted}.{of_ranks}"


def section(record: RunRecord) -> Section:
    plan = record.plan
    lead, alarms = [summary(record), about(record)], []
    if record.error:
        alarms.append(f"The run was ended by {record.error}")
    if record.deviates:
        alarms.append("A forward deviated from the plan: tensors that did not match were kept.")
    if record.checkpointed:
        lead.append(f"The plan replaces the gradient checkpointing of {len(record.checkpointed)} layers.")
    if record.compiled:
        lead.append(f"Compiled: {record.compiled}.")
    budget = Cell('"min": the smallest plan') if record.budget_nbytes is None else size(record.budget_nbytes)
    rows: list[tuple[str, Cell, str]] = [("budget", budget, "given")]
    if plan is not None:
        least = f"no plan that {rebuilds_or_parks(plan)}"
        rows += [
            ("peak with the plan", size(plan.predicted_peak_nbytes), "predicted"),
            ("peak with the plan", size(record.measured_peak_nbytes), "measured"),
            ("peak without a plan", size(plan.unmodified_peak_nbytes), "predicted"),
            ("extra time a step", ms(plan.predicted.seconds), "predicted"),
            ("part of it that the package's own work takes", ms(plan.predicted.overhead_seconds), "predicted"),
            (f"{least} adds less than", ms(plan.lower_bound_seconds), "proven for these op times"),
            ("step without a plan", ms(plan.step_seconds), "measured: seconds of its ops"),
            ("wall time of a step", ms(usual_seconds(record)), "measured: median, data loading included"),
            ("ops run again a step", count(plan.predicted.rebuilt_ops), "predicted"),
            ("made by ops that run again, a step", size(plan.predicted.rebuilt_nbytes), "predicted"),
        ]
        if plan.predicted.reserved_nbytes:
            rows.insert(2, ("reserved by the allocator at the peak", size(plan.predicted.reserved_nbytes), "predicted"))
        limits = dict(plan.tier_limits)
        for tier, nbytes in plan.in_tiers.items():
            rows.append((f"taken in the {tier} tier", size(nbytes), "as planned"))
            if tier in limits:
                rows.append(("most that it may take there", size(limits[tier]), "given, or what the machine had left"))
        rows += _parked(record)
        rows.append(("plans put in force because of a measurement", count(record.replans), "counted"))
        rows.append(("plan by", Cell(f"{plan.solver}, {plan.solve_seconds:.1f} s"), ""))
    where = [f"{name} {value}" for name, value in (("device", record.device), ("torch", record.torch)) if value]
    if where:
        rows.append(("made on", Cell(", ".join(where)), ""))
    grid = Grid("figures", "All figures", ("figure", "value", "how it is known"), rows, printed=True)
    words = Grid("words", "The words of this page", ("word", "is"), [list(item) for item in WORDS.items()], printed=True)
    return Section("headline", "In short", tuple(lead), tuple(alarms), _cards(record, budget), grids=(words, grid))


def _cards(record: RunRecord, budget: Cell) -> tuple[Card, ...]:
    plan = record.plan
    if plan is None:
        return (Card("budget", budget, "given"),)
    measured, predicted = record.measured_peak_nbytes, size(plan.predicted.needed_nbytes)
    least = f"no plan that {rebuilds_or_parks(plan)}"
    peak = Card("peak with the plan", predicted, "predicted; no step was measured")
    if measured is not None:
        peak = Card("peak with the plan", size(measured), f"measured; predicted {predicted.text}")
    return (
        Card("budget", budget, "given"),
        Card("peak without a plan", size(plan.unmodified_peak_nbytes), "predicted"),
        peak,
        Card("extra time a step", ms(plan.predicted.seconds), "predicted"),
        Card("least extra time possible", ms(plan.lower_bound_seconds), f"proven: {least} adds less"),
    )


def _parked(record: RunRecord) -> list[tuple[str, Cell, str]]:
    plan, moved = record.plan, record.transfers
    assert plan is not None
    if not plan.parks and not plan.in_tiers:
        return []
    p = plan.predicted
    rows = [("moved by copies a step", size(p.moved_nbytes), "predicted"), ("stall a step", ms(p.stall_seconds), "predicted")]
    if moved is not None and moved.forwards:
        rows.append(("moved by copies a step", size(moved.moved_nbytes // moved.forwards), "measured"))
    if moved is not None and moved.timed:
        rows.append(("stall a step", ms(moved.waited_seconds / moved.timed), "measured"))
        rows.append(("codecs a step", ms(moved.coded_seconds / moved.timed), "measured"))
    return rows


def rates(record: RunRecord) -> Section:
    """Batch size, throughput and energy."""
    title, now, before = "Batch size, throughput, energy", record.throughput, record.before
    if record.phase == "file":
        return Section("rates", title, ("A plan file has no rates: those are in the record of a run.",), absent=True)
    if now is None:
        hint = "Samples were not counted: run.monitor() counts them, and in Lightning the callback MemOptMonitor."
        return Section("rates", title, (hint,), absent=True)
    figures = (
        ("batch, samples a step", "samples_per_step"),
        ("samples a second", "samples_per_sec"),
        ("joules a sample", "joules_per_sample"),
        ("maximum bytes reserved on the device", "peak_nbytes"),
        ("steps that were measured", "steps"),
    )
    rows = [(name, _rate(getattr(now, key), key), _rate(getattr(before, key, None), key)) for name, key in figures]
    lead = [f"Measured in steady planned steps on {now.device}, in which nothing is recorded or verified."]
    if now.joules_per_sample is None:
        lead.append("Energy was not measured, because there is no counter, or no steady stretch was long enough.")
    elif now.approximate:
        lead.append("Joules were integrated from samples of the device's power.")
    grid = Grid("rates-all", "Rates", ("figure", "this run, measured", "without a plan, measured before"), rows, opened=True)
    return Section("rates", title, tuple(lead), grids=(grid,))


def _rate(value: float | None, key: str) -> Cell:
    if value is None:
        return Cell("not measured")
    return size(int(value)) if key == "peak_nbytes" else Cell(f"{value:,.4g}", value)
