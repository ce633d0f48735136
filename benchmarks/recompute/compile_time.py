"""CPU seconds to compile a model with a plan, beside those of torch's own compilation.

    python -m benchmarks compile_time [MODEL] [--share 0.7] [--rounds 3]     # writes results/compile_time.json

Inductor on the CPU, no cache of torch, the C++ compiler counted. Both are the first step less the last one. With a plan: a
first run has searched it; the second run reads it from a file, and reads, rewrites and splits the joint graph. Also: seconds
to solve for the plans of the largest region.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config

from benchmarks.lib.compiled_steps import Training
from benchmarks.lib.paths import RESULTS
from lightning_memopt import optimize
from lightning_memopt.session.regions import region_choice, remembered
from lightning_memopt.solvers import planner
from lightning_memopt.trace import count_all

FILE = RESULTS / "compile_time.json"


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in used)


def steps(name: str, budget: int | None, n: int, cached: bool) -> list[float]:
    """CPU seconds of each step."""
    torch._inductor.config.force_disable_caches = not cached
    training, seconds = Training(name), []
    with contextlib.ExitStack() as stack:
        if budget is not None:
            options: Any = {"profile_steps": 1, "solver_seconds": 10, "verbose": False}
            stack.enter_context(optimize(training.model, training.optimizer, budget=budget, **options))
        for _ in range(n):
            began = cpu_seconds()
            training.step()
            seconds.append(cpu_seconds() - began)
    return seconds


def budget_of(name: str, share: float) -> int:
    training = Training(name)
    for _ in range(2):
        held, above = training.metered_step()
    return int(held + share * above)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="gpt2")
    parser.add_argument("--share", type=float, default=0.7, help="budget: this share of what a step takes above what is held")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count_all(print)
    solved: list[dict[str, Any]] = []
    solve = planner.solve

    def timed(graph: Any, **options: Any) -> Any:
        began = time.thread_time()
        frontier = solve(graph, **options)
        if "beside" in options:  # a region's, not that of the eager step around it
            taken = {"ops": len(graph.ops), "plans": len(frontier.candidates), "seconds": time.thread_time() - began}
            solved.append(taken)
        return frontier

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(remembered, "cache", lambda: Path(folder)):
        budget = budget_of(args.model, args.share)
        with mock.patch.object(region_choice.planner, "solve", timed):
            steps(args.model, budget, 14, cached=True)
        pairs = []
        for _ in range(args.rounds):
            with_plan, alone = (steps(args.model, b, 4, cached=False) for b in (budget, None))
            pairs.append((with_plan[0] - with_plan[-1], alone[0] - alone[-1]))
            print(f"with a plan {pairs[-1][0]:.1f} s, torch's own {pairs[-1][1]:.1f} s", flush=True)
    result = {
        "with_plan_seconds": [a for a, _ in pairs],
        "torch_seconds": [b for _, b in pairs],
        "ratio": statistics.median(a / b for a, b in pairs),
        "solved": max(solved, key=lambda s: s["ops"]),
    }
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(results | {args.model: result}, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
