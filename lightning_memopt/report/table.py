"""The table at the end of a run."""

from __future__ import annotations

from lightning_memopt.plan import Plan
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.report.explain import items, kept, rebuilt
from lightning_memopt.report.text import Table, render
from lightning_memopt.session import RunStatus, Transfers
from lightning_memopt.telemetry import Meter, Rates
from lightning_memopt.units import format_nbytes


def _away(plan: Plan, transfers: Transfers | None) -> str:
    """What moved, in which forms, and what a step waits for it: as measured where it was, beside what was predicted.

    A step is a planned forward and its backward.
    """
    tensors = {life.tensor: life.form for life in plan.lives if life.how == "fetch"}
    forms = ", ".join(f"{list(tensors.values()).count(form)} in {form}" for form in sorted(set(tensors.values())))
    p = plan.predicted
    moved, stall, overlap, codecs = ("not measured",) * 4
    if transfers is not None and transfers.forwards:
        moved = format_nbytes(transfers.moved_nbytes // transfers.forwards)
    if transfers is not None and transfers.timed:
        copied, waited = transfers.copied_seconds, transfers.waited_seconds
        stall = f"{1e3 * waited / transfers.timed:.1f} ms"
        overlap = f"{100 * max(0.0, 1 - waited / copied):.0f} %" if copied else overlap
        codecs = f"{1e3 * transfers.coded_seconds / transfers.timed:.1f} ms"
    parts = [forms]
    if p.moved_nbytes:
        parts += [
            f"moved {moved} a step, both ways (predicted {format_nbytes(p.moved_nbytes)}), "
            f"at most {format_nbytes(p.tier_nbytes)} in tiers (predicted)",
            f"stall {stall} a step (predicted {1e3 * p.stall_seconds:.1f})",
            f"overlap {overlap} of the copies' time behind compute (predicted {100 * p.overlap:.0f} %)",
        ]
    if any(codec_of(form) for form in tensors.values()):
        parts.append(f"codecs {codecs} a step (predicted {1e3 * p.codec_seconds:.1f})")
    return "; ".join(parts)


def _beside(after: float | None, before: float | None) -> str:
    """A figure, and what it was without a plan where that was measured: in a run of its own, never from observed steps, which
    recording slows down."""
    if after is None:
        return "not measured"
    return f"{after:.4g}" + (f"; before {before:.4g}, x{after / before:.3f}" if before else "; before: not measured")


def _gains(meter: Meter) -> list[tuple[str, str]]:
    """Rows of what the run came to, in planned steps only."""
    after = meter.rates()
    if after is None:
        return []
    before = meter.before or Rates(device="", steps=0)
    found = [
        ("batch, samples a step", _beside(after.samples_per_step, before.samples_per_step)),
        ("samples/s", _beside(after.samples_per_sec, before.samples_per_sec)),
    ]
    if after.joules_per_sample is not None:
        whole = "; the whole device, whoever uses it" + ", integrated from its power" * after.approximate
        found.append(("J/sample", _beside(after.joules_per_sample, before.joules_per_sample) + whole))
    return found


def summary(status: RunStatus, meter: Meter | None = None, transfers: Transfers | None = None) -> str:
    """The table of a run, with what a meter measured and what was moved; says what is missing where there is no plan."""
    if status.phase == "off":
        return "MemOpt: off (MEMOPT_DISABLE, or an untested torch); the run was the plain one."
    told = f" There is no plan yet, because {status.reason}. {status.remedy}." if status.remedy is not None else ""
    if status.phase == "waiting":
        return f"MemOpt: no training step was seen.{told}"
    if status.phase == "unplanned":
        return f"MemOpt: no plan: {status.reason}."
    if status.phase == "observing":
        return f"MemOpt: still observing ({status.observed_steps} of {status.profile_steps} steps).{told}"
    plan, graph = status.plan, status.graph
    assert plan is not None and graph is not None
    table = Table(title="MemOpt", show_header=False)
    table.add_column()
    table.add_column()
    budget = "min" if status.budget_nbytes is None else format_nbytes(status.budget_nbytes)
    table.add_row("budget", budget)
    table.add_row("predicted peak", format_nbytes(plan.predicted_peak_nbytes))
    needed = plan.predicted.needed_nbytes  # what is measured on this device
    if plan.predicted.reserved_nbytes:
        table.add_row("reserved at the peak, predicted", format_nbytes(needed))
    measured = status.measured_peak_nbytes
    table.add_row(
        "measured peak",
        "not measured"
        if measured is None
        else f"{format_nbytes(measured)} ({100 * (measured / needed - 1):+.2f} % of predicted)",
    )
    table.add_row("unmodified peak", format_nbytes(plan.unmodified_peak_nbytes))
    extra, step = plan.predicted.seconds, plan.step_seconds
    share = f" ({100 * extra / step:.1f} % of the step's ops)" if step else ""
    table.add_row(
        "extra time, predicted",
        f"{1e3 * extra:.1f} ms a step{share}, {1e3 * plan.predicted.overhead_seconds:.1f} of them for recording and rebuilding "
        f"itself; lower bound {1e3 * plan.lower_bound_seconds:.1f} ms",
    )
    table.add_row(
        "ops run again", f"{plan.predicted.rebuilt_ops}, {format_nbytes(plan.predicted.rebuilt_nbytes)} rebuilt a step"
    )
    if any(life.how == "fetch" for life in plan.lives):
        table.add_row("away", _away(plan, transfers))
    table.add_row("rebuilt", items(rebuilt(graph, plan)))
    table.add_row("kept", items(kept(graph, plan)))
    for row in _gains(meter) if meter is not None else ():
        table.add_row(*row)
    if status.compiled is not None:
        table.add_row("compiled", status.compiled)
    table.add_row("plan by", f"{plan.solver}, {plan.solve_seconds:.1f} s")
    return render(table)
