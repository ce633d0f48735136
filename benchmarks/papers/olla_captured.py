"""What another order would save inside of compiled regions, whose order can be chosen: `python -m benchmarks olla_captured`.

The joint graphs of forward and backward of the benchmarks' models, as `torch.compile` hands them to a partitioner (ops of
aten, before Inductor fuses them), at batch 1 and 8. Updates are in no joint graph: gradients leave the region. Every order is
checked. Shares are of the bytes of the region, with and without those from before it (weights, the batch), in percent.

    python -m benchmarks olla_captured [--models gpt2 t5] [--table]

Writes benchmarks/results/olla_captured.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from functorch.compile import default_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import built
from lightning_memopt import jsonio
from lightning_memopt.compiled.joint import Joint
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.solvers.ordering import faults, faults_in_step, order, step_of

FILE = RESULTS / "olla_captured.json"
MODELS = ("gpt2", "llama", "bert", "vit", "t5", "resnet50", "inception", "densenet")
MIB = 2**20
_FEWEST_OPS = 50
"""Smaller regions (the loss) are left out."""


def captured(name: str, batch: int) -> list[Graph]:
    """The joint graphs of a model's regions."""
    graphs: list[Graph] = []

    def split(module: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(Joint(module).graph)
        options.pop("compiler", None)
        return default_partition(module, inputs, **options)

    torch._dynamo.reset()
    model, inputs = built(name, batch)
    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=split)
    torch.compile(model, backend=backend)(**inputs).loss.backward()
    return [graph for graph in graphs if len(graph.ops) >= _FEWEST_OPS]


def measure(name: str, batch: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for graph in captured(name, batch):
        whole = step_of(graph)
        result = order(whole.problem, seconds)
        assert not faults(whole.problem, result.sequence, result.peak_nbytes)
        assert not faults_in_step(graph, whole.sequence(result.sequence))
        rows.append(
            {
                "model": name, "batch": batch, "ops": len(graph.ops), "resident_nbytes": resident_nbytes(graph),
                "given_nbytes": result.given_nbytes, "best_nbytes": result.peak_nbytes, "bound_nbytes": result.bound_nbytes,
                "by": result.by, "seconds": round(result.seconds, 2),
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The last table of docs/measurements/olla.md."""
    head = (
        "model, batch", "ops", "torch's order, MiB", "best order, MiB", "saved", "of what the region makes",
        "no order more than", "seconds",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in sorted(rows, key=lambda row: (MODELS.index(row["model"]), row["batch"])):
        given, best, resident = row["given_nbytes"], row["best_nbytes"], row["resident_nbytes"]
        cells = (
            f"{row['model']}, {row['batch']}", row["ops"], f"{given / MIB:.1f}", f"{best / MIB:.1f}",
            f"{100 * (1 - best / given):.2f} %", f"{100 * (given - best) / (given - resident):.2f} %",
            f"{100 * (1 - row['bound_nbytes'] / given):.2f} %", row["seconds"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each order")
    parser.add_argument("--table", action="store_true", help="print the table of the results, and measure nothing")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = jsonio.read(FILE)["rows"] if FILE.exists() else []
    for name in () if args.table else args.models:
        for batch in (1, 8):
            rows = [r for r in rows if (r["model"], r["batch"]) != (name, batch)] + measure(name, batch, args.seconds)
            jsonio.write(FILE, {"torch": torch.__version__, "rows": rows}, indent=1)
    print(table(rows))


if __name__ == "__main__":
    main()
