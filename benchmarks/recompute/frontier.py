"""The frontier of recomputation, executed: ours beside stock tools, on the same model in the same run.

    python -m benchmarks frontier [MODEL ...] [--rounds 15] [--compile] [--out DIR]
    python -m benchmarks frontier --table          # the tables of the README, from what was measured before

Per point: peak of the step by the allocator (MiB above resident), extra FLOPs, rebuilt bytes, median of paired and interleaved
step-time ratios against the unmodified step, and whether loss, gradients, buffers and the generator's state are bit-equal to
those of the unmodified step. Writes frontier.json and frontier.png; models measured in earlier runs stay in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import pictures, torch_budget
from benchmarks.lib.bench import MIB, Bench, Forward, Outcome, equal
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, resident_nbytes, unmodified_levels
from lightning_memopt.plan import Machine
from lightning_memopt.runtime import Program
from lightning_memopt.session.observe import costs
from lightning_memopt.solvers import planner

SHARES = (0.8, 0.6, 0.4, 0.25, 0.15)
Point = dict[str, Any]


class Measuring:
    """The points of one model, as they come in."""

    def __init__(self, name: str) -> None:
        self.bench = bench = Bench(name)
        for _ in range(2):
            bench.step()
        self.loss, self.reference = bench.step(), bench.outcome()
        self.flops, self.made_nbytes = bench.flops(), bench.made_nbytes()
        self.points: dict[str, Point] = {
            "unmodified": {"peak_mib": bench.peak(), "extra_flops": 0.0, "rebuilt_mib": 0.0, "equal": True}
        }
        self.forwards: dict[str, Forward | None] = {"unmodified": None}
        self.contexts: dict[str, Callable[[], Any]] = {}
        self.graph = bench.observe()
        self.resident = resident_nbytes(self.graph)

    def equal(self, loss: torch.Tensor, outcome: Outcome) -> bool:
        return torch.equal(self.loss, loss) and equal(self.reference, outcome)

    def per_block(self) -> int:
        """Checkpointing of every block; the bytes of its peak."""
        bench, label = self.bench, "per block"
        with bench.per_block():
            bench.step()
            self.points[label] = {
                "peak_mib": bench.peak(),
                "extra_flops": bench.flops() / self.flops - 1,
                "rebuilt_mib": (bench.made_nbytes() - self.made_nbytes) / MIB,
                "equal": self.equal(bench.step(), bench.outcome()),
                "predicted_ratio": 1 + self._block_seconds() / self.graph.step_seconds,
            }
        self.forwards[label], self.contexts[label] = None, bench.per_block
        return int(self.resident + self.points[label]["peak_mib"] * MIB)

    def _block_seconds(self) -> float:
        """What the forward ops inside of the blocks took: checkpointing runs about all of them once more."""
        names = {id(m): name for name, m in self.bench.model.named_modules()}
        inside = {names[id(block)] for block in self.bench.blocks(self.bench.model)}

        def within(scope: str) -> bool:
            parts = scope.partition("#")[0].split(".")
            return any(".".join(parts[:n]) in inside for n in range(1, len(parts) + 1))

        return sum(op.seconds for op in self.graph.forward if within(op.scope))

    def ours(self, label: str, frontier: planner.Frontier, budget: int) -> None:
        """The plan for a budget in bytes, executed."""
        try:
            plan = frontier.plan(budget)
        except InfeasibleError as error:
            assert error.smallest_nbytes is not None
            self.points[label] = {"infeasible": True, "smallest_mib": (error.smallest_nbytes - self.resident) / MIB}
            return
        forward = self.bench.planned(Program(self.graph, plan.lives))
        same = self.equal(self.bench.step(forward), self.bench.outcome())
        peak = self.bench.peak(forward) * MIB + self.resident
        self.points[label] = {
            "budget_mib": (budget - self.resident) / MIB,
            "predicted_mib": (plan.predicted_peak_nbytes - self.resident) / MIB,
            "peak_mib": (peak - self.resident) / MIB,
            "equal": same,
            "extra_flops": plan.predicted.extra_flops / self.flops,
            "rebuilt_mib": plan.predicted.rebuilt_nbytes / MIB,
            "predicted_ratio": 1 + plan.predicted.seconds / self.graph.step_seconds,
            "bound_ratio": 1 + plan.lower_bound_seconds / self.graph.step_seconds,
            "solver": plan.solver,
            "within_budget": peak <= budget,
            "prediction_error": peak / plan.predicted_peak_nbytes - 1,
        }
        self.forwards[label] = forward

    def stock_compiler(self, rounds: int) -> None:
        """torch's activation_memory_budget. A peer that fails is a result too."""
        bench = self.bench
        for budget in (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0):
            label = f"torch budget {budget}"
            forward, counted = torch_budget.compiled(bench, budget)
            try:
                bench.step(forward)
                counted["counting"] = 1
                bench.step(forward)
                counted["counting"] = 0
                values, generator = (bench.step(forward), bench.outcome())[1]
                self.points[label] = {
                    "peak_mib": bench.peak(forward),
                    "extra_flops": counted["total"] / self.flops - 1,
                    "equal": equal((self.reference[0], generator), (values, generator)),
                    "generator_equal": torch.equal(self.reference[1], generator),
                }
                self.points[label] |= bench.times({"unmodified": None, label: forward}, rounds, {})[label]
            except Exception as error:
                self.points[label] = {"failed": f"{type(error).__name__}: {error}"[:200]}


def run(name: str, rounds: int, with_compile: bool) -> dict[str, Any]:
    """Everything about one model."""
    measuring = Measuring(name)
    graph, resident = measuring.graph, measuring.resident

    overhead = costs.overhead(graph)
    activations = max(unmodified_levels(graph)) - resident
    budgets = {f"f={f}": int(resident + f * activations) for f in SHARES} | {"at per-block peak": measuring.per_block()}
    frontiers = {
        "ours": planner.solve(graph, machine=Machine(overhead=overhead), budgets=budgets.values()),
        "fewest FLOPs": planner.solve(graph, objective="flops", machine=Machine(overhead=overhead), budgets=budgets.values()),
    }
    ours = frontiers["ours"]
    for who, frontier in frontiers.items():
        for label, budget in budgets.items():
            measuring.ours(f"{who} {label}", frontier, budget)
        if frontier is ours:
            measuring.ours("ours smallest", frontier, frontier.smallest_nbytes)
    if with_compile:
        measuring.stock_compiler(rounds)
    for label, ratios in measuring.bench.times(measuring.forwards, rounds, measuring.contexts).items():
        measuring.points[label] |= ratios
    return {
        "title": measuring.bench.title,
        "resident_mib": resident / MIB,
        "activation_share": activations / ours.unmodified_peak_nbytes,
        "step_flops": measuring.flops,
        "points": measuring.points,
        "frontier": [_priced(graph, c, measuring) for c in ours.candidates],
        "frontier_for_flops": [_priced(graph, c, measuring) for c in frontiers["fewest FLOPs"].candidates],
        "solve_seconds": ours.seconds,
        "ops": len(graph.ops),
    }


def _priced(graph: Graph, candidate: planner.Candidate, measuring: Measuring) -> dict[str, float]:
    predicted = candidate.predicted
    return {
        "peak_mib": (predicted.peak_nbytes - measuring.resident) / MIB,
        "extra_flops": predicted.extra_flops / measuring.flops,
        "extra_ratio": predicted.seconds / graph.step_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also torch's activation_memory_budget (slow to compile)")
    parser.add_argument("--table", action="store_true", help="measure nothing: print markdown tables of what was measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    path = args.out / "frontier.json"
    measured: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    if args.table:
        pictures.print_tables({name: measured[name] for name in args.models or measured})
        return
    torch.use_deterministic_algorithms(True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.models or MODELS:
        measured[name] = run(name, args.rounds, args.compile)
        pictures.print_points(name, measured[name])
        ordered = {n: measured[n] for n in [*MODELS, *measured] if n in measured}
        path.write_text(json.dumps({"torch": torch.__version__, "models": ordered}, indent=1) + "\n")
        pictures.plot(ordered, args.out / "frontier.png")


if __name__ == "__main__":
    main()
