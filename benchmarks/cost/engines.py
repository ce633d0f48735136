"""Step times at the peak of per-block checkpointing: the native engine, the Python engine, and per-block checkpointing.

    python -m benchmarks engines [MODEL ...] [--rounds 25]      # writes results/engines.json, a model at a time
    python -m benchmarks engines --table                        # what is recorded, as Markdown

Paired and interleaved; medians of the ratios to the unmodified step, of CPU time and wall time. Both engines carry out the same
plan, the one whose peak is not above that of per-block checkpointing.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks.lib.bench import Forward
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from benchmarks.recompute.frontier import Measuring
from lightning_memopt import jsonio
from lightning_memopt.native import engine
from lightning_memopt.plan import Machine
from lightning_memopt.runtime import Program
from lightning_memopt.session.observe import costs
from lightning_memopt.solvers import planner

FILE = RESULTS / "engines.json"
WITH = ("per block", "Python", "native")


def by_python(forward: Forward) -> Forward:
    """The forward, recorded and rebuilt by the Python engine."""

    def run() -> torch.Tensor:
        with engine.without():
            return forward()

    return run


def measured(name: str, rounds: int) -> dict[str, Any]:
    measuring = Measuring(name)
    bench, graph = measuring.bench, measuring.graph
    budget = measuring.per_block()
    plan = planner.solve(graph, machine=Machine(overhead=costs.overhead(graph)), budgets=[budget]).plan(budget)
    program = Program(graph, plan.lives)
    forwards: dict[str, Forward | None] = {
        "unmodified": None,
        "per block": None,
        "Python": by_python(bench.planned(program)),
        "native": bench.planned(program),
    }
    same = {}
    for label in ("Python", "native"):
        bench.step(forwards[label])  # the templates of a plan are learned in its first step
        same[label] = measuring.equal(bench.step(forwards[label]), bench.outcome())
    times = bench.times(forwards, rounds, measuring.contexts)
    return {
        "rounds": rounds,
        "ops": len(graph.ops),
        "rebuilt_ops": plan.predicted.rebuilt_ops,
        "predicted_ratio": 1 + plan.predicted.seconds / graph.step_seconds,
        "equal": same,
        "ratios": {label: times[label] for label in WITH},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | ops | run again | per block | Python engine | native engine | predicted | bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        ratios = (row["ratios"][label] for label in WITH)
        cells = " | ".join(f"x{each['cpu_ratio']:.2f} (x{each['time_ratio']:.2f})" for each in ratios)
        bits = "equal" if all(row["equal"].values()) else "differ"
        lines.append(f"| {name} | {row['ops']:,} | {row['rebuilt_ops']:,} | {cells} | x{row['predicted_ratio']:.2f} | {bits} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = jsonio.read(FILE) if FILE.exists() else {}
    if not args.table:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        for name in args.models or MODELS:
            results[name] = measured(name, args.rounds)
            print(table({name: results[name]}).splitlines()[-1], flush=True)
            jsonio.write(FILE, results, indent=1)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
