"""Budgets kept with recomputation, a disk and lossless codecs together: executed, bit-equal, measured by the allocator.

    python -m benchmarks offload [MODEL ...] [--seconds 15]
    python -m benchmarks offload --table           # the table of the README, from what was measured before

The models of `frontier`, each within shares of what it allocates above what is resident, and at the smallest plan.
Per budget: the plan that a session would take with `offload="disk", compress="lossless"`, what it moves, encodes and runs
again, the peak that it was predicted and measured to have, and whether loss, gradients, buffers and generator are those of
the unmodified step. Bytes only: what the plans take in time is predicted, from rates of this machine's disk. Writes
results/offload.json, model by model.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch

from benchmarks.lib.bench import MIB, Bench, equal
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.plan import Machine, lower, validate
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.runtime import Program
from lightning_memopt.session.observe import costs
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.solvers import planner

FILE = RESULTS / "offload.json"
SHARES = (0.5, 0.25, 0.15)


def run(name: str, seconds: float) -> dict[str, Any]:
    """One model within every budget."""
    bench = Bench(name)
    bench.step()
    loss, reference = bench.step(), bench.outcome()
    graph = bench.observe(steps=2)
    resident, unmodified = resident_nbytes(graph), bench.peak()
    config = MemOptConfig(budget="min", offload="disk", compress="lossless", solver_seconds=seconds)
    offloading = Offloading(bench.device, config)
    alone = planner.solve(graph, limit_seconds=seconds, machine=Machine(overhead=costs.overhead(graph)))
    frontier = offloading.widened(alone)
    row: dict[str, Any] = {
        "title": bench.title,
        "unmodified_mib": unmodified,
        "smallest_alone_mib": (alone.smallest_nbytes - resident) / MIB,
        "smallest_mib": (frontier.smallest_nbytes - resident) / MIB,
        "budgets": [],
    }
    budgets = {f"{share:g}": int(resident + share * unmodified * MIB) for share in SHARES} | {
        "smallest": frontier.smallest_nbytes
    }
    for label, budget in budgets.items():
        point: dict[str, Any] = {"budget": label, "budget_mib": (budget - resident) / MIB}
        row["budgets"].append(point)
        try:
            plan = frontier.plan(budget)
        except InfeasibleError:
            point["infeasible"] = True
            continue
        report = validate(graph, plan.lives, lower(graph, plan.lives))
        assert report.ok, report.problems[:3]
        forward = bench.planned(Program(graph, plan.lives), offloading.depot_of(plan))
        same = torch.equal(bench.step(forward), loss) and equal(bench.outcome(), reference)
        peak = bench.peak(forward) * MIB + resident
        away = [life for life in plan.lives if life.how == "fetch"]
        point |= {
            "solver": plan.solver,
            "equal": same,
            "within_budget": peak <= budget,
            "peak_mib": (peak - resident) / MIB,
            "prediction_error": peak / plan.predicted_peak_nbytes - 1,
            "replayed_ops": plan.predicted.rebuilt_ops,
            "moved": sum(bool(tier_of(life.form)) for life in away),
            "moved_mib": sum(life.parked_nbytes for life in away if tier_of(life.form)) / MIB,
            "encoded": sum(bool(codec_of(life.form)) for life in away),
            "predicted_seconds": plan.predicted.seconds,
            "bound_seconds": plan.lower_bound_seconds,
            "predicted_seconds_alone": None if budget < alone.smallest_nbytes else alone.plan(budget).predicted.seconds,
        }
        print(name, json.dumps(point), flush=True)
    offloading.close()
    return row


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: MiB above what is resident."""
    lines = [
        "| model | unmodified | smallest, recomputed alone | smallest | moved and encoded there | bit-equal, within budget | "
        "predicted within |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        ran = [point for point in row["budgets"] if "infeasible" not in point]
        least = ran[-1]
        kept = sum(point["equal"] and point["within_budget"] for point in ran)
        lines.append(
            f"| {row['title']} | {row['unmodified_mib']:.1f} | {row['smallest_alone_mib']:.1f} | {row['smallest_mib']:.1f} | "
            f"{least['moved']} ({least['moved_mib']:.1f} MiB), {least['encoded']} | {kept} of {len(ran)} | "
            f"{100 * max(abs(point['prediction_error']) for point in ran):.2f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="all, where left out")
    parser.add_argument("--seconds", type=float, default=15.0, help="time limit of each solver")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = json.loads(FILE.read_text())["models"] if FILE.exists() else {}
    torch.use_deterministic_algorithms(True)
    for name in () if args.table else args.models or list(MODELS):
        rows[name] = run(name, args.seconds)
        rows = {of: rows[of] for of in MODELS if of in rows}
        FILE.write_text(
            json.dumps({"torch": torch.__version__, "solver_seconds": args.seconds, "models": rows}, indent=1) + "\n"
        )
        gc.collect()
    print(table(rows))


if __name__ == "__main__":
    main()
