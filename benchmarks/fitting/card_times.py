"""How far times that are predicted from a card's profile are from measured ones: steps, and what plans cost. On this machine.

python -m benchmarks card_times [models...] [--share 0.5] [--seconds 5] [--out DIR]

`memopt profile` measures this machine. Each of the fifteen models is observed for real, so each of its ops has a measured time.
Then its ops get the times that the profile predicts, and the planner solves the step with either: half of the activations have
to go. "slowdown" is the time of the plan as a multiple of the unmodified step, in the times that it was solved with. "priced"
is that of the plan that was solved with predicted times, in measured times. Writes card_times.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.graphs import computed
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS, WORDS
from lightning_memopt.bench import zoo
from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.cards import Card
from lightning_memopt.fitting.profiling import measured
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, simulate
from lightning_memopt.solvers import planner


def _budget(graph: Graph, share: float) -> int:
    """Bytes of a step that keeps this share of what it has at its peak beyond what it begins with."""
    levels = unmodified_levels(graph)
    return int(levels[0] + share * (max(levels) - levels[0]))


def _solved(graph: Graph, budget: int, seconds: float) -> tuple[Life, ...]:
    frontier = planner.solve(graph, search_seconds=seconds, limit_seconds=4 * seconds, budgets=(budget,), keep_nbytes=budget)
    return frontier.plan(max(budget, frontier.smallest_nbytes)).lives  # a share may be below the smallest plan


def _slowdown(graph: Graph, lives: tuple[Life, ...]) -> float:
    return 1 + simulate(graph, lives).predicted.seconds / sum(op.seconds for op in graph.ops)


def row(name: str, card: Card, share: float, seconds: float) -> dict[str, Any]:
    def build() -> Training:
        torch.manual_seed(0)
        return zoo.training(MODELS[name](batch=4, **WORDS.get(name, {})), torch.device("cpu"))

    real = computed(build)
    timed = card.timed(real)
    budget = _budget(real, share)
    plan, predicted = _solved(real, budget, seconds), _solved(timed, budget, seconds)
    return {
        "model": name,
        "step_seconds": sum(op.seconds for op in real.ops),
        "predicted_step_seconds": timed.step_seconds,
        "slowdown": _slowdown(real, plan),
        "predicted_slowdown": _slowdown(timed, predicted),
        "priced_slowdown": _slowdown(real, predicted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="all of them if none is given")
    parser.add_argument("--share", type=float, default=0.5, help="of the activations that a plan may keep")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the search for a plan")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates = measured(torch.device("cpu"), "this machine")
    assert rates.device is not None
    card, rows = Card(rates.name, rates.device), []
    print("| model | step | predicted | ratio | slowdown | predicted | priced |\n|---|---|---|---|---|---|---|")
    for name in args.models or MODELS:
        rows.append(r := row(name, card, args.share, args.seconds))
        step, predicted = r["step_seconds"], r["predicted_step_seconds"]
        print(
            f"| {name} | {1e3 * step:.1f} ms | {1e3 * predicted:.1f} ms | x{predicted / step:.2f} | x{r['slowdown']:.3f} "
            f"| x{r['predicted_slowdown']:.3f} | x{r['priced_slowdown']:.3f} |",
            flush=True,
        )
    ratios = [r["predicted_step_seconds"] / r["step_seconds"] for r in rows]
    errors = [abs(r["predicted_slowdown"] - r["priced_slowdown"]) for r in rows]
    lost = [r["priced_slowdown"] - r["slowdown"] for r in rows]
    print(
        f"steps x{statistics.median(ratios):.2f} (x{min(ratios):.2f} to x{max(ratios):.2f}); slowdowns off by "
        f"{statistics.median(errors):.3f} (at most {max(errors):.3f}); plans solved with predicted times cost "
        f"{statistics.median(lost):.3f} more of a step (at most {max(lost):.3f})"
    )
    results = {"torch": torch.__version__, "share": args.share, "card": rates.to_json(), "models": rows}
    (args.out / "card_times.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
