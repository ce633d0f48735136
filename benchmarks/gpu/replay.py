"""Recomputation beside stock tools, on the same model in the same run.

Per plan: peak of allocated and of reserved bytes, measured and predicted; median of interleaved step-time ratios to the
unmodified step, predicted and measured (CUDA events); what recording costs the host per op of the forward; whether loss,
gradients, buffers and the generator's state have the bits of the unmodified step. Beside it per-block checkpointing and torch's
activation_memory_budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.bench import GpuBench, against, in_time, observed, reference, times
from benchmarks.lib import torch_budget
from benchmarks.lib.bench import MIB
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, resident_nbytes, unmodified_levels
from lightning_memopt.plan import Machine
from lightning_memopt.runtime import Program
from lightning_memopt.solvers.rollout import keep_all

SHARES = (0.7, 0.5, 0.3)
COMPILED = (0.5, 0.2)
COLUMNS = {
    "budget": "budget_mib",
    "alloc": "allocated_mib",
    "pred.": "predicted_allocated_mib",
    "reserved": "reserved_mib",
    "pred. ": "predicted_reserved_mib",
    "time": "time_ratio",
    "pred.  ": "predicted_ratio",
    "us/op": "host_us_per_op",
}


def _budgets(graph: Graph) -> dict[str, int]:
    """Shares of what the unmodified step takes, or reserves."""
    reserve, resident = Machine().reserve(graph), resident_nbytes(graph)
    top = max(unmodified_levels(graph)) if reserve is None else reserve(keep_all(graph))
    return {f"ours f={f}": int(resident + f * (top - resident)) for f in SHARES}


def replay(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int) -> None:
    rows = result["rows"]
    loss, outcome = reference(bench, rows)
    graph, frontier = observed(bench, deadline, lambda graph: _budgets(graph).values())
    resident = resident_nbytes(graph)
    result |= {
        "ops": len(graph.ops),
        "plans": len(frontier.candidates),
        "solve_seconds": frontier.seconds,
        "resident_mib": resident / MIB,
        "ops_seconds": graph.step_seconds,
        "predicted_unmodified_mib": max(unmodified_levels(graph)) / MIB,
        "frontier": [(c.predicted.peak_nbytes / MIB, c.predicted.seconds / graph.step_seconds) for c in frontier.candidates],
    }
    forwards: dict[str, Callable[[], Any] | None] = {"unmodified": None}
    contexts: dict[str, Callable[[], Any]] = {}
    for label, budget in (_budgets(graph) | {"ours smallest": 0}).items():
        in_time(deadline, label)
        rows[label] = row = {"budget_mib": (budget or frontier.smallest_nbytes) / MIB}
        try:
            plan = frontier.plan(budget or frontier.smallest_nbytes)
        except InfeasibleError as error:
            row["smallest_mib"] = (error.smallest_nbytes or 0) / MIB
            continue
        forwards[label] = forward = bench.planned(Program(graph, plan.lives))
        bench.step(forward)
        got = bench.step(forward)
        row["equal"] = torch.equal(loss, got) and bench.equal(outcome)
        row |= bench.peaks(forward)
        against(bench, graph, plan, budget or frontier.smallest_nbytes, row)
    in_time(deadline, "per block")
    with bench.per_block():
        bench.step()
        bench.step()
        rows["per block"] = {"equal": bench.equal(outcome)} | bench.peaks()
    forwards["per block"], contexts["per block"] = None, bench.per_block
    ops = len(graph.forward)
    times(bench, rows, forwards, contexts, rounds, ops, deadline)
    for budget in COMPILED if bench.on_gpu else ():  # a CPU would compile for a minute
        label = f"torch budget {budget}"
        in_time(deadline, label)
        try:
            forward, _ = torch_budget.compiled(bench, budget)  # forgets what was compiled before, so it is timed at once
            bench.step(forward)
            bench.step(forward)
            rows[label] = {"equal": bench.equal(outcome)} | bench.peaks(forward)
            times(bench, rows, {"unmodified": None, label: forward}, {}, rounds, ops, deadline)
        except Exception as error:  # a peer that fails is a result too
            rows[label] = {"failed": f"{type(error).__name__}: {error}"[:160]}
