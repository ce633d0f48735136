"""The table that a run logs at its end: budget, peaks, times and what the plan does."""

from __future__ import annotations

from lightning_memopt.graph import Graph
from lightning_memopt.plan import LoweringError, Machine, Plan, simulate, tiers_text
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.report.explain import updates_text
from lightning_memopt.report.fates import items, kept, rebuilt
from lightning_memopt.report.text import Table, render
from lightning_memopt.runtime.pool import PoolStatus
from lightning_memopt.session import RunStatus, Transfers
from lightning_memopt.solvers.recompute.baselines import per_layer
from lightning_memopt.telemetry import Meter, Throughput
from lightning_memopt.units import format_nbytes


def parked_text(plan: Plan, transfers: Transfers | None) -> str:
    """One line about parked tensors: forms, moved bytes and waiting time a step, measured and predicted.

    A step is a planned forward and its backward.
    """
    tensors = {life.tensor: life.form for life in plan.lives if life.how == "fetch"}
    forms = ", ".join(f"{list(tensors.values()).count(form)} in {form}" for form in sorted(set(tensors.values())))
    predicted = plan.predicted
    moved = stall = overlap = codecs = "not measured"
    if transfers is not None and transfers.forwards:
        moved = format_nbytes(transfers.moved_nbytes // transfers.forwards)
    if transfers is not None and transfers.timed:
        copied, waited = transfers.copied_seconds, transfers.waited_seconds
        stall = f"{1e3 * waited / transfers.timed:.1f} ms"
        overlap = f"{100 * max(0.0, 1 - waited / copied):.0f} %" if copied else overlap
        codecs = f"{1e3 * transfers.coded_seconds / transfers.timed:.1f} ms"
    parts = [forms] if forms else []
    if predicted.moved_nbytes:
        parts += [
            f"moved {moved} a step, both ways (predicted {format_nbytes(predicted.moved_nbytes)}), "
            f"at most {format_nbytes(predicted.tier_nbytes)} at one time (predicted)",
            f"stall {stall} a step (predicted {1e3 * predicted.stall_seconds:.1f})",
            f"overlap {overlap} of the copies' time behind compute (predicted {100 * predicted.overlap:.0f} %)",
        ]
    if any(codec_of(form) for form in tensors.values()):
        parts.append(f"codecs {codecs} a step (predicted {1e3 * predicted.codec_seconds:.1f})")
    return "; ".join(parts)


def checkpointing_text(graph: Graph, plan: Plan, layers: tuple[str, ...]) -> str:
    """One line about the gradient checkpointing of these layers, which the plan replaces: its predicted cost."""
    try:
        lives = per_layer(graph, layers)
        cost = simulate(graph, lives).predicted
    except (LoweringError, ValueError):  # no plan could run such a layer again
        return f"of {len(layers)} layers, replaced by the plan; its cost cannot be predicted for this step"
    reserve = Machine().reserve(graph)
    peak = cost.peak_nbytes if reserve is None else reserve(lives)
    return (
        f"of {len(layers)} layers, replaced by the plan. It would take (predicted): peak {format_nbytes(peak)}, "
        f"{1e3 * cost.extra_seconds:.1f} ms and {cost.extra_flops / 1e9:.3g} GFLOP extra a step. This plan: "
        f"{1e3 * plan.predicted.extra_seconds:.1f} ms and {plan.predicted.extra_flops / 1e9:.3g} GFLOP"
    )


def pool_text(pool: PoolStatus) -> str:
    """One line about the planned pool: its arena, and the number of requests that it has served."""
    if pool.reason is not None:
        return f"none: {pool.reason}"
    if pool.addresses is None:
        return "none yet: the requests of a step are being logged"
    a, last = pool.addresses, pool.last
    return (
        f"arena {format_nbytes(a.arena_nbytes)}, max-live {format_nbytes(a.max_live_nbytes)}, fragmentation "
        f"{100 * a.fragmentation:.2f} %; {a.planned} of {len(a.nbytes)} requests of a step have an address; in the last of "
        f"{pool.steps} steps {last.served} were served from the arena, {last.fallen} fell through "
        f"({format_nbytes(last.fallen_nbytes)}); {pool.deviating} steps differed; the arena and all other memory took at "
        f"most {format_nbytes(pool.reserved_nbytes)}"
    )


def _compared(after: float | None, before: float | None) -> str:
    """A figure next to the same figure of a run without a plan. Observed steps do not count as such a run: they are slower."""
    if after is None:
        return "not measured"
    if not before:
        return f"{after:.4g}; before: not measured"
    return f"{after:.4g}; before {before:.4g}, x{after / before:.3f}"


def _measured_rows(meter: Meter) -> list[tuple[str, str]]:
    """(name, text) of samples a step, samples a second and joules a sample, measured in planned steps only."""
    after = meter.rates()
    if after is None:
        return []
    before = meter.before or Throughput(device="", steps=0)
    rows = [
        ("batch, samples a step", _compared(after.samples_per_step, before.samples_per_step)),
        ("samples/s", _compared(after.samples_per_sec, before.samples_per_sec)),
    ]
    if after.joules_per_sample is not None:
        joules = _compared(after.joules_per_sample, before.joules_per_sample)
        how = ", integrated from its power" if after.approximate else ""
        rows.append(("J/sample", f"{joules}; the whole device, other programs included{how}"))
    return rows


def summary(status: RunStatus, meter: Meter | None = None, transfers: Transfers | None = None) -> str:
    """The table of a run as text or, without a plan, one line that says why there is none.

    `meter`: adds its throughput and energy. `transfers`: adds the measured times of parked tensors.
    """
    if status.phase == "off":
        return "MemOpt: off (MEMOPT_DISABLE, or an untested torch); the run was the plain one."
    advice = f" There is no plan yet, because {status.reason}. {status.remedy}." if status.remedy is not None else ""
    if status.phase == "waiting":
        return f"MemOpt: no training step was seen.{advice}"
    if status.phase == "unplanned":
        return f"MemOpt: no plan: {status.reason}."
    if status.phase == "observing":
        return f"MemOpt: still observing ({status.observed_steps} of {status.profile_steps} steps).{advice}"
    plan, graph = status.plan, status.graph
    assert plan is not None and graph is not None
    table = Table(title="MemOpt", show_header=False)
    table.add_column()
    table.add_column()
    budget = "min" if status.budget_nbytes is None else format_nbytes(status.budget_nbytes)
    table.add_row("budget", budget)
    table.add_row("predicted peak", format_nbytes(plan.predicted_peak_nbytes))
    needed = plan.predicted.needed_nbytes  # comparable with the measured peak of this device
    if plan.predicted.reserved_nbytes:
        table.add_row("reserved at the peak, predicted", format_nbytes(needed))
    measured_text = "not measured"
    if status.measured_peak_nbytes is not None:
        measured = status.measured_peak_nbytes
        measured_text = f"{format_nbytes(measured)} ({100 * (measured / needed - 1):+.2f} % of predicted)"
    table.add_row("measured peak", measured_text)
    table.add_row("unmodified peak", format_nbytes(plan.unmodified_peak_nbytes))
    extra, step = plan.predicted.seconds, plan.step_seconds
    share = f" ({100 * extra / step:.1f} % of the step's ops)" if step else ""
    table.add_row(
        "extra time, predicted",
        f"{1e3 * extra:.1f} ms a step{share}, of which {1e3 * plan.predicted.overhead_seconds:.1f} are the package's own work; "
        f"lower bound {1e3 * plan.lower_bound_seconds:.1f} ms",
    )
    table.add_row(
        "ops run again", f"{plan.predicted.rebuilt_ops}, {format_nbytes(plan.predicted.rebuilt_nbytes)} rebuilt a step"
    )
    if plan.parks or plan.in_tiers:
        table.add_row("parked", parked_text(plan, transfers))
    if plan.in_tiers:
        table.add_row("taken there", tiers_text(plan))
    if status.checkpointed:
        table.add_row("gradient checkpointing", checkpointing_text(graph, plan, status.checkpointed))
    if status.pool is not None:
        table.add_row("planned pool", pool_text(status.pool))
    if graph.updates:
        table.add_row("updated in backward", updates_text(plan, graph))
    table.add_row("rebuilt", items(rebuilt(graph, plan)))
    table.add_row("kept", items(kept(graph, plan)))
    if meter is not None:
        for row in _measured_rows(meter):
            table.add_row(*row)
    if status.compiled is not None:
        table.add_row("compiled", status.compiled)
    table.add_row("solved in", f"{plan.solve_seconds:.1f} s")
    return render(table)
