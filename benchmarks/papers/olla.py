"""Another order and planned addresses for the steps of eleven networks, beside OLLA (Steiner et al., 2022, section 5).

    python -m benchmarks olla                                    # all networks, batch 1 and 32; 60 s at most for each solver
    python -m benchmarks olla --networks AlexNet ViT-B/16 --batches 1
    python -m benchmarks olla --networks GoogLeNet --batches 1 --optimizer adamw       # more ops; not in the tables
    python -m benchmarks olla --table                            # the tables of docs/measurements/olla.md, from the results

Each step is recorded from the real model under PyTorch's autograd, at full width and 224 pixels, with SGD, whose updates are
one op a parameter; the arithmetic is left out (benchmarks/lib/sizes.py). Bytes count everything: parameters, the batch,
gradients. `eager`: the most bytes of the recorded step. `given`: of the same order with each buffer freed after the last op
that uses it, which is what OLLA compares orders by. `early`: with updates as early as possible. `best`, `bound`: of
`solvers.ordering`. `reserved`: what the model of PyTorch's caching allocator takes for the eager step. `arena`: addresses of
`solvers.placement` for the eager step, `best_arena` for the best order. Shares are of `given` for orders, else of `reserved`.

Writes benchmarks/results/olla.json; rows of what was not run stay.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.lib.paths import RESULTS
from benchmarks.lib.sizes import record
from benchmarks.models import recurrent, vision
from benchmarks.papers.olla_steps import step_of
from benchmarks.papers.olla_updates import ordered
from benchmarks.papers.olla_validate import faults_in_step
from lightning_memopt import jsonio
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan.allocator import Allocator, requests
from lightning_memopt.solvers.ordering import Problem, faults
from lightning_memopt.solvers.placement import Buffer, Placement, buffers_of, place
from lightning_memopt.solvers.placement import faults as overlaps
from lightning_memopt.units import round_up

FILE = RESULTS / "olla.json"
PAPER = {
    1: {"order": 22.5, "fragmentation": 7.9, "all": 30.4},
    32: {"order": 10.1, "fragmentation": 26.1, "all": 36.1},
}
"""Means of the paper, in percent (5.3, 5.4, 5.7)."""
BLOCK_NBYTES = 512
MIB = 2**20
WORDS = 128
"""Tokens of a sample."""


def _vit(batch: int) -> Any:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=vision.CLASSES))
    labels = torch.randint(0, vision.CLASSES, (batch,))
    return model.train(), {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": labels}


def _transformer(batch: int) -> Any:
    words = {"source": torch.randint(0, 32000, (batch, WORDS)), "target": torch.randint(0, 32000, (batch, WORDS + 1))}
    return recurrent.Seq2Seq(32000, 512, 6, WORDS, heads=8).train(), words


def _xlmr(batch: int) -> Any:
    config = transformers.XLMRobertaConfig(vocab_size=250002, max_position_embeddings=514, type_vocab_size=1)
    x = torch.randint(5, 250002, (batch, WORDS))
    return transformers.XLMRobertaForMaskedLM(config).train(), {"input_ids": x, "labels": x}


NETWORKS: dict[str, Callable[[int], Any]] = {
    **{name: partial(vision.built, name) for name in vision.MODELS},
    "ViT-B/16": _vit,
    "Transformer, 6 + 6 layers": _transformer,
    "XLM-R base": _xlmr,
}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=False),
}


def step(name: str, batch: int, optimizer: str = "sgd") -> Graph:
    """The recorded step of a network."""
    torch.manual_seed(0)
    return record(lambda: NETWORKS[name](batch), OPTIMIZERS[optimizer])


def reserved(graph: Graph) -> tuple[int, int]:
    """Bytes that the model of the caching allocator reserves for two eager steps, and those requested when it first does."""
    allocator = Allocator()
    for t in _resident(graph):
        allocator.alloc(("resident", t), graph.tensors[t].nbytes)
    peak, requested = 0, 0
    for _ in range(2):
        names = []
        for name, nbytes in requests(graph):
            if nbytes < 0:
                allocator.free(name)
                continue
            allocator.alloc(name, nbytes)
            names.append(name)
            if allocator.reserved > peak:
                peak, requested = allocator.reserved, allocator.requested
            elif allocator.reserved == peak:
                requested = max(requested, allocator.requested)
        for name in names:
            allocator.free(name)
    return peak, requested


def _resident(graph: Graph) -> list[int]:
    last = len(graph.points) - 1
    return [t.id for t in graph.tensors if t.born_at < 0 and t.id == t.storage and _freed_at(graph, t.storage) == last]


def _freed_at(graph: Graph, storage: int) -> int:
    return max(t.freed_at for t in graph.tensors if t.storage == storage)


def buffers_of_order(problem: Problem, sequence: tuple[int, ...]) -> list[Buffer]:
    """The buffers of a sequence; the times are positions in it."""
    first, last = problem.lifetimes(sequence)
    sizes = zip(first.tolist(), last.tolist(), problem.nbytes, strict=True)
    found = [Buffer(str(i), lower, upper + 1, size) for i, (lower, upper, size) in enumerate(sizes) if size]
    place_of = {op: at for at, op in enumerate(sequence)}
    return found + [Buffer(f"w{op}", place_of[op], place_of[op] + 1, n) for op, n in enumerate(problem.workspace) if n]


def _placed(buffers: list[Buffer], seconds: float) -> Placement:
    placement = place(buffers, seconds=seconds, alignment=BLOCK_NBYTES)
    assert not overlaps(buffers, placement.offsets, placement.height_nbytes, BLOCK_NBYTES)
    return placement


def measure(name: str, batch: int, seconds: float, optimizer: str) -> dict[str, Any]:
    """The row of a network."""
    graph = step(name, batch, optimizer)
    eager = max(unmodified_levels(graph))
    whole = step_of(graph)
    best, early_nbytes = ordered(whole.problem, whole.updates, seconds)
    assert not faults(whole.problem, best.sequence, best.peak_nbytes)
    assert not faults_in_step(graph, whole.sequence(best.sequence))
    device, requested = reserved(graph)
    resident = sum(round_up(graph.tensors[t].nbytes, BLOCK_NBYTES) for t in _resident(graph))
    arena, best_arena = _placed(buffers_of(graph), seconds), _placed(buffers_of_order(whole.problem, best.sequence), seconds)
    return {
        "network": name,
        "batch": batch,
        "optimizer": optimizer,
        "ops": len(graph.ops),
        "buffers": len(whole.problem.makers),
        "nbytes": {
            "eager": eager, "given": best.given_nbytes, "early": early_nbytes, "best": best.peak_nbytes,
            "bound": best.bound_nbytes, "reserved": device, "arena": resident + arena.height_nbytes,
            "best_arena": resident + best_arena.height_nbytes,
        },
        "by": best.by,
        "gap": round(100 * best.gap, 4),
        "order_seconds": round(best.seconds, 2),
        "addresses_seconds": round(max(arena.seconds, best_arena.seconds), 2),
        "fragmentation": round(100 * (1 - requested / device), 2),
        "placed_fragmentation": round(100 * max(arena.fragmentation, best_arena.fragmentation), 4),
    }  # fmt: skip


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Reductions of a row, in percent: by order and the most that any order gives; by addresses; in all."""
    n = row["nbytes"]

    def less(small: str, large: str) -> float:
        return round(100 * (1 - n[small] / n[large]), 2)

    return {
        "order": less("best", "given"), "at_most": less("bound", "given"), "early": less("early", "given"),
        "addresses": less("arena", "reserved"), "all": less("best_arena", "reserved"),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The tables of docs/measurements/olla.md."""
    lines = []
    names = list(NETWORKS)
    rows = sorted((row for row in rows if row["optimizer"] == "sgd"), key=lambda row: names.index(row["network"]))
    for batch in sorted({row["batch"] for row in rows}):
        chosen = [row for row in rows if row["batch"] == batch]
        lines += [f"### Batch {batch}", ""]
        head = (
            "network", "ops", "PyTorch's order, MiB", "best order, MiB", "by order", "early updates alone",
            "no order more than", "allocator, MiB", "fragmentation", "by addresses", "in all", "seconds: order, addresses",
        )  # fmt: skip
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in chosen:
            n, s = row["nbytes"], shares(row)
            cells = (
                row["network"], row["ops"], f"{n['given'] / MIB:,.1f}", f"{n['best'] / MIB:,.1f}", f"{s['order']:.2f} %",
                f"{s['early']:.2f} %", f"{s['at_most']:.2f} %", f"{n['reserved'] / MIB:,.1f}", f"{row['fragmentation']:.1f} %",
                f"{s['addresses']:.1f} %", f"{s['all']:.1f} %", f"{row['order_seconds']:.2f}, {row['addresses_seconds']:.2f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
        mean = {key: statistics.mean(shares(row)[key] for row in chosen) for key in shares(chosen[0])}
        fragmentation = statistics.mean(row["fragmentation"] for row in chosen)
        cells = (
            "**mean**", "", "", "", f"**{mean['order']:.1f} %**", f"{mean['early']:.1f} %", f"**{mean['at_most']:.1f} %**", "",
            f"**{fragmentation:.1f} %**", f"{mean['addresses']:.1f} %", f"**{mean['all']:.1f} %**", "",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        if batch in PAPER:
            p = PAPER[batch]
            means = f"{p['order']} %", "", "", "", f"{p['fragmentation']} %", "", f"{p['all']} %"
            cells = ("the paper's mean", "", "", "", *means, "")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    for key, words in (("order_seconds", "order"), ("addresses_seconds", "addresses")):
        taken = [row[key] for row in rows]
        lines.append(f"Seconds for {words}: median {statistics.median(taken):.2f}, worst {max(taken):.2f}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of the order, and of each placement")
    parser.add_argument("--table", action="store_true", help="print the tables of the results, and measure nothing")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = jsonio.read(FILE)["rows"] if FILE.exists() else []
    if not args.table:
        for batch in args.batches:
            for name in args.networks:
                row = measure(name, batch, args.seconds, args.optimizer)
                said = {key: row[key] for key in ("network", "batch", "by", "order_seconds", "addresses_seconds", "gap")}
                print(said | shares(row), flush=True)
                same = (name, batch, args.optimizer)
                rows = [r for r in rows if (r["network"], r["batch"], r["optimizer"]) != same] + [row]
                paper = {str(b): means for b, means in PAPER.items()}
                jsonio.write(FILE, {"torch": torch.__version__, "paper": paper, "rows": rows}, indent=1)
    print(table(rows))


if __name__ == "__main__":
    main()
