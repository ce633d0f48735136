"""Planning time of the dataflow analysis: `python -m benchmarks echo [--small] [--recorded]`.

Synthetic LSTM with attention of 15.9K ops (the paper's largest model, planned there in less than 300 ms) and of 100K,
forward and backward together; `--recorded`: also a step of the NMT of `models.recurrent`, unrolled to 15.9K ops (needs torch).
Prints a table and one line of JSON: the analysis alone, and the plan with its lives and simulations, each the best of a few
runs in processor milliseconds; and what the plan is predicted to cost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from benchmarks.lib.tables import print_table
from lightning_memopt.graph import Graph
from lightning_memopt.plan import simulate
from lightning_memopt.solvers.recompute.echo import echo, recomputation
from lightning_memopt.solvers.rollout import keep_all
from tests.null.graphs import lstm_steps, training_step


def best_ms(run: Callable[[], object], times: int) -> float:
    """Least processor milliseconds of `times` runs."""
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - began))
    return min(found)


def generated(ops: int) -> Graph:
    return training_step(lstm_steps(ops // 2), inputs={"input": 1})


def recorded(time: int = 50) -> Graph:
    """A real step of the LSTM translation with attention; a word more is 320 ops more."""
    from benchmarks.lib.bench import Bench
    from benchmarks.models.recurrent import nmt
    from benchmarks.models.registry import MODELS

    MODELS["recorded"] = lambda: nmt(time=time, batch=8, width=64)
    graph: Graph = Bench("recorded").observe(steps=1)
    return graph


def measure(source: str, graph: Graph, times: int) -> dict[str, object]:
    graph.producers, graph.saves_of  # noqa: B018  what every solver shares
    analysis, plan = (best_ms(lambda f=f: f(graph), times) for f in (recomputation, echo))
    after, before = simulate(graph, echo(graph)).predicted, simulate(graph, keep_all(graph)).predicted
    return {
        "graph": source,
        "ops": len(graph.ops),
        "analysis_ms": round(analysis),
        "plan_ms": round(plan),
        "peak_percent": round(100 * after.peak_nbytes / before.peak_nbytes, 1),
        "extra_percent_of_forward": round(100 * after.extra_seconds / sum(op.seconds for op in graph.forward), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the graphs of 15.9K ops")
    parser.add_argument("--recorded", action="store_true", help="also a real step (takes minutes to observe)")
    args = parser.parse_args()
    rows = [measure("generated", generated(15_900), 4)]
    if not args.small:
        rows.append(measure("generated", generated(100_000), 2))
    if args.recorded:
        rows.append(measure("NMT, recorded", recorded(), 4))
    print_table(rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
