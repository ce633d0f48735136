"""Time, memory and quality of the chain solver: `python -m benchmarks chain [--small]`.

Prints a table and one line of JSON: wall and processor seconds and resident bytes of the two large solves, and the gap
between the memory-persistent optimum (what the solver finds) and the optimum over all schedules of small chains.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import statistics
import time

from benchmarks.lib.tables import print_table
from lightning_memopt.solvers.chain import Chain, Option, Stage, minimum_budget, simulate, solve_chain
from lightning_memopt.solvers.chain.by_numbers import chain_from_dict
from tests.solvers.chain_exhaustive import unrestricted_seconds

MIB = 1 << 20


def layers(length: int, seed: int = 1) -> Chain:
    """Heterogeneous stages of a network with four Pareto options each; about 240 MiB a stage when all is kept."""
    rng = random.Random(seed)
    sizes = [rng.randint(28 * MIB, 84 * MIB) for _ in range(length + 1)]
    stages = []
    for k in range(length):
        x, y = sizes[k], sizes[k + 1]
        forward_seconds = rng.uniform(5e-4, 2e-3)
        inner, workspace = rng.randint(70 * MIB, 280 * MIB), rng.randint(0, 42 * MIB)
        backward = inner + 2 * y + x + workspace
        options = tuple(
            Option(
                name=f"keep {share}",
                held_nbytes=int(inner * share),
                rerun_seconds=forward_seconds,
                rebuild_seconds=forward_seconds * (1 - share) * 0.6,
                forward_peak_nbytes=y + inner + workspace,
                backward_peak_nbytes=backward,
            )
            for share in (1.0, 0.6, 0.3, 0.1)
        )
        stages.append(
            Stage(
                name=f"layer {k}",
                input_nbytes=x,
                sweep_seconds=forward_seconds * 0.9,
                sweep_peak_nbytes=y + workspace,
                rebuild_seconds=forward_seconds,
                rebuild_peak_nbytes=backward,
                forward_base_nbytes=0,
                backward_base_nbytes=y,
                options=options,
            )
        )
    return Chain(tuple(stages))


def large(length: int, budget_nbytes: int, bucket_nbytes: int) -> dict[str, object]:
    """Solve one long chain in this process and say what it took."""
    chain = layers(length)
    start = time.perf_counter()
    smallest = minimum_budget(chain)
    minimum_seconds = time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    table = solve_chain(chain, budget_nbytes, bucket_nbytes=bucket_nbytes)
    wall_seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    extra_seconds, peak_nbytes = simulate(chain, table.tree(budget_nbytes))
    return {
        "stages": length,
        "columns": table.grid.columns,
        "dtype": str(table.dtype),
        "solve_wall_seconds": round(wall_seconds, 2),
        "solve_processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "resident_mib": after.ru_maxrss // 1024,
        "minimum_budget_seconds": round(minimum_seconds, 2),
        "backtrack_seconds": round(time.perf_counter() - start, 3),
        "smallest_mib": smallest // MIB,
        "budget_mib": budget_nbytes // MIB,
        "peak_mib": peak_nbytes // MIB,
        "extra_seconds": extra_seconds,
    }


def sequence(rng: random.Random, length: int) -> Chain:
    """A short sequence with small whole sizes, as in the tests."""
    sizes = [rng.randint(1, 9) for _ in range(length + 1)]
    rows = [
        {
            "forward_seconds": rng.randint(1, 9),
            "backward_seconds": 1,
            "input_nbytes": sizes[k],
            "output_nbytes": sizes[k + 1],
            "saved_nbytes": sizes[k + 1] + rng.randint(0, 20),
            "grad_nbytes": sizes[k + 1],
            "forward_workspace_nbytes": rng.randint(0, 2),
            "backward_workspace_nbytes": rng.randint(0, 2),
        }
        for k in range(length)
    ]
    return chain_from_dict({"stages": rows})


def gap(length: int, chains: int) -> dict[str, object]:
    """Persistent over unrestricted: total forward seconds (extra + one forward), at three budgets per chain."""
    rng = random.Random(length)
    gaps, unfit = [], 0
    for _ in range(chains):
        chain = sequence(rng, length)
        once = sum(stage.sweep_seconds for stage in chain.stages)
        smallest = minimum_budget(chain)
        for more in (-1, 0, rng.randint(1, 4), rng.randint(5, 12)):
            free = unrestricted_seconds(chain, smallest + more)
            if more < 0:
                unfit += free < math.inf
            else:
                gaps.append(
                    (solve_chain(chain, smallest + more, bucket_nbytes=1).seconds(smallest + more) + once) / (free + once) - 1
                )
    return {
        "stages": length,
        "cases": len(gaps),
        "differ": sum(g > 1e-9 for g in gaps),
        "mean_gap_percent": round(100 * statistics.fmean(gaps), 3),
        "max_gap_percent": round(100 * max(gaps), 2),
        "fit_below_smallest": unfit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the first large solve_chain and fewer small chains")
    small = parser.parse_args().small
    solves = [(121, 11 * 1024 * MIB, MIB), (400, 20 * 1024 * MIB, 5 * MIB)][: 1 if small else 2]
    results: dict[str, list[dict[str, object]]] = {"large": [], "gap": []}
    for arguments in solves:  # a process each: the resident size is the largest it ever was
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results["large"].append(pool.apply(large, arguments))
    for length in (3, 4, 5):
        results["gap"].append(gap(length, 10 if small else 40))
    for rows in results.values():
        print_table(rows)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
