"""The order of the kernels that Inductor makes, executed: peaks by its own orders and by ours, and the proven bound.

    python -m benchmarks kernel_order [MODEL ...]       # writes results/kernel_order.json, a model at a time
    python -m benchmarks kernel_order --table           # what is recorded, as Markdown

Forward and backward of a model that is compiled whole, on the CPU with one thread, with `--batch` samples of at most 64 words.
Measured peaks are the allocator's, above what is there before the forward. Estimates, and the bound, are of Inductor's own
model: a buffer lives from the kernel that makes it to its last reader. Of forward and backward, the one with the higher peak
counts. `bits`: loss and gradients are equal.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import torch

from benchmarks.lib.digests import hashed
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import built
from lightning_memopt import jsonio
from lightning_memopt.compiled import asked_to_order
from lightning_memopt.record import listening_to
from lightning_memopt.session.regions.kernel_order import KernelOrder
from lightning_memopt.trace import count_all, metered_cpu

FILE = RESULTS / "kernel_order.json"
MODELS = ("resnet50", "vit", "bert", "gpt2", "t5", "densenet", "inception", "llama")
_KIB = 2**10


def trained(name: str, batch: int, ordering: KernelOrder | None) -> dict[str, Any]:
    """One compiled model's forward and backward; the second pass is measured."""
    torch._dynamo.reset()
    gc.collect()
    model, inputs = built(name, batch)
    call: Any = torch.compile(model)
    asking = listening_to([] if ordering is None else asked_to_order(ordering))
    with asking:
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(2)
            with metered_cpu() as events:
                loss = call(**inputs).loss
                loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"peak_nbytes": events.peak_nbytes, "hash": hashed([loss.detach(), *gradients])}


def measure(name: str, batch: int) -> dict[str, Any]:
    theirs, ordering = trained(name, batch, None), KernelOrder()
    ours = trained(name, batch, ordering)
    return {
        "model": name,
        "batch": batch,
        "theirs": theirs,
        "ours": ours,
        "graphs": [
            {
                "kernels": len(found.sequence), "given_nbytes": found.given_nbytes, "best_nbytes": found.peak_nbytes,
                "bound_nbytes": found.bound_nbytes, "by": found.by, "seconds": round(found.seconds, 3),
            }
            for found in ordering.orders
        ],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "model, batch", "kernels", "Inductor's order, KiB", "ours, KiB", "saved", "estimated", "no order more than", "bits",
        "seconds",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        theirs, ours = row["theirs"]["peak_nbytes"], row["ours"]["peak_nbytes"]
        bits = "equal" if row["theirs"]["hash"] == row["ours"]["hash"] else "differ"
        measured = f"{theirs / _KIB:,.1f}", f"{ours / _KIB:,.1f}", f"{100 * (1 - ours / theirs):.2f} %"
        if not row["graphs"]:
            lines.append(f"| {row['model']}, {row['batch']} | has convolutions | {' | '.join(measured)} | | | {bits} | |")
            continue
        highest = {key: max(graph[key] for graph in row["graphs"]) for key in ("given_nbytes", "best_nbytes", "bound_nbytes")}
        given = highest["given_nbytes"]
        cells = (
            f"{row['model']}, {row['batch']}", "+".join(str(graph["kernels"]) for graph in row["graphs"]),
            *measured,
            f"{100 * (1 - highest['best_nbytes'] / given):.2f} %", f"{100 * (1 - highest['bound_nbytes'] / given):.2f} %",
            bits,
            f"{sum(graph['seconds'] for graph in row['graphs']):.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = jsonio.read(FILE)["rows"] if FILE.exists() else []
    if not args.table:
        torch.set_num_threads(1)
        torch._inductor.config.fx_graph_cache = False  # both are compiled here; their kernels are compiled once
        count_all(print)
        for name in args.models or MODELS:
            rows = [r for r in rows if (r["model"], r["batch"]) != (name, args.batch)] + [measure(name, args.batch)]
            print(rows[-1], flush=True)
            jsonio.write(FILE, {"torch": torch.__version__, "rows": rows}, indent=1)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
