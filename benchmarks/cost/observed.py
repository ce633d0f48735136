"""Steps that are observed, beside the same steps in eager mode: CPU time, paired rounds.

    python -m benchmarks observed [MODEL ...] [--rounds 5]   # models of the registry; writes results/observed.json
    python -m benchmarks observed --full [MODEL ...] [--batch 4]        # Echo's models at the source's widths and depths

The three kinds of step that a session observes (`planning`), and a verified step that evicts at 70 % of what the step takes
above its resident bytes. Medians of the ratios to the eager step of the same round, update included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from time import process_time
from typing import Any

import torch

from benchmarks.cost.planning import KINDS, eager_step, observed_step
from benchmarks.lib.paths import RESULTS
from benchmarks.models.full_size import SETUPS
from benchmarks.models.registry import MODELS
from lightning_memopt import jsonio
from lightning_memopt.graph import Graph, resident_nbytes, unmodified_levels
from lightning_memopt.runtime import install_native
from lightning_memopt.trace import count_all

FILE = RESULTS / "observed.json"
EVICTING = "evicting"
_SHARE = 0.7


class OfRegistry:
    """A model of the registry, at the sizes of the benchmarks, and AdamW."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.batch, _ = MODELS[name]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)


class OfFullSize:
    """One of Echo's models, and its optimizer."""

    def __init__(self, name: str, batch: int) -> None:
        torch.manual_seed(0)
        setup = SETUPS[name]
        self.model: Any = setup.build().train()
        self.batch = setup.data(batch)
        self.optimizer = setup.optimizer(self.model.parameters())


def limit_of(graph: Graph) -> int:
    resident = resident_nbytes(graph)
    return int(resident + _SHARE * (max(unmodified_levels(graph)) - resident))


def measured(training: Any, rounds: int) -> dict[str, Any]:
    def seconds(kind: str | None, **limit: int) -> tuple[float, Graph | None]:
        gc.collect()
        torch.manual_seed(3)
        began = process_time()
        graph = eager_step(training) if kind is None else observed_step(training, kind, **limit)
        return process_time() - began, graph

    for _ in range(2):
        seconds(None)
    _, graph = seconds("plain")
    assert graph is not None
    limit = limit_of(graph)
    ratios: dict[str, list[float]] = {kind: [] for kind in (*KINDS, EVICTING)}
    eager, added = [], []
    for _ in range(rounds):
        eager.append(seconds(None)[0])
        for kind in KINDS:
            took = seconds(kind)[0]
            ratios[kind].append(took / eager[-1])
            if kind == "plain":
                added.append(took - eager[-1])
        ratios[EVICTING].append(seconds("verified", limit_nbytes=limit)[0] / eager[-1])
    return {
        "rounds": rounds,
        "ops": len(graph.ops),
        "eager_ms": 1e3 * statistics.median(eager),
        "added_us_an_op": 1e6 * statistics.median(added) / len(graph.ops),
        "ratios": {kind: statistics.median(values) for kind, values in ratios.items()},
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        f"| model | ops | eager, ms | {' | '.join((*KINDS, EVICTING))} | plain: microseconds an op |",
        "|---|---|---|" + "---|" * (len(KINDS) + 2),
    ]
    for name, row in results.items():
        cells = " | ".join(f"x{ratio:.2f}" for ratio in row["ratios"].values())
        lines.append(f"| {name} | {row['ops']:,} | {row['eager_ms']:.0f} | {cells} | {row['added_us_an_op']:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = f"of {', '.join(MODELS)}; with --full of {', '.join(SETUPS)}"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=names)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="Echo's models at the source's widths and depths")
    parser.add_argument("--batch", type=int, default=4, help="with --full: samples")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results: dict[str, Any] = jsonio.read(FILE) if FILE.exists() else {}
    if not args.table:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        count_all(print)
        install_native(print)
        for name in args.models or (SETUPS if args.full else MODELS):
            training = OfFullSize(name, args.batch) if args.full else OfRegistry(name)
            label = f"{name}, full size, batch {args.batch}" if args.full else name
            results[label] = measured(training, args.rounds)
            print(table({label: results[label]}).splitlines()[-1], flush=True)
            jsonio.write(FILE, results, indent=1)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
