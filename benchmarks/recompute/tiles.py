"""Loss heads of language models in tiles: peaks, times and bits, beside what people write by hand.

    python -m benchmarks tiles                    # writes results/tiles.json, a case at a time
    python -m benchmarks tiles gpt2 --rounds 5 --ways "ours, room"    # only that row, beside the plain step
    python -m benchmarks tiles --long --rounds 1  # heads with up to 8,192 tokens: an hour of a core, 20 GiB of memory
    python -m benchmarks tiles --table            # what is recorded, as Markdown

A model is two blocks and a head with the vocabulary of a known model; the body is narrow, so that a CPU can train it. AdamW,
bytes by the counter around torch's allocator, above what is there when a step begins. Times are CPU times of steps by
turns, one thread: medians of ratios to the plain step.

    plain         the step as it is
    checkpoint    the head and its loss under torch.utils.checkpoint
    chunked loop  the head and its loss in 8 chunks of tokens, each under torch.utils.checkpoint: what people write
    linear_cross_entropy   torch's own, where it has one
    ours, whole   the smallest plan without tiles
    ours, tiles   the smallest plan with tile="exact"
    ours, half    a budget of half the bytes that the plain step takes above what is there when it begins, with tile="exact"
    ours, room    a budget with room for the plain step, with tile="exact": nothing runs in tiles
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.lib.paths import RESULTS
from lightning_memopt import optimize
from lightning_memopt.clocks import process_time
from lightning_memopt.native import counting
from lightning_memopt.plan import TiledHead

FILE = RESULTS / "tiles.json"
CHUNKS = 8
_SHARES = {"ours, half": 0.5, "ours, room": 1.1}
"""Budgets as a share of what the plain step takes above what is there when it begins."""
_WARM = 8
"""Steps before those that are timed: most of ours are observed, and one proves its plan."""


class Head(NamedTuple):
    """classes, width: of the head. tokens: of a batch. capped: logits are soft-capped. frozen: so is the head's weight.

    smoothing: of labels. picked: the loss reads log-probabilities of labels by `gather`, as preference and policy losses do.
    dtype: of the whole model.
    """

    classes: int
    width: int
    tokens: int
    capped: bool = False
    frozen: bool = False
    smoothing: float = 0.0
    picked: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def is_usual(self) -> bool:
        """Whether the loss is the cross-entropy of the product itself."""
        return not (self.capped or self.smoothing or self.picked)


HEADS = {
    "gpt2": Head(50_257, 128, 1024),
    "gpt2, frozen": Head(50_257, 128, 1024, frozen=True),
    "gpt2, padded": Head(50_304, 128, 1024),
    "llama 2": Head(32_000, 128, 2048),
    "llama 2, frozen": Head(32_000, 128, 2048, frozen=True),
    "llama 2, smoothed": Head(32_000, 128, 2048, smoothing=0.1),
    "llama 2, picked": Head(32_000, 128, 2048, picked=True),
    "llama 2, bfloat16": Head(32_000, 128, 2048, dtype=torch.bfloat16),
    "llama 3": Head(128_256, 128, 1024),
    "llama 3, frozen": Head(128_256, 128, 1024, frozen=True),
    "gemma": Head(256_000, 64, 1024, capped=True),
    "gemma, frozen": Head(256_000, 64, 1024, capped=True, frozen=True),
}
LONG = {
    f"{name}, long": HEADS[name]._replace(tokens=tokens)
    for name, tokens in {
        "gpt2": 8192,
        "gpt2, frozen": 8192,
        "llama 3": 8192,
        "llama 3, frozen": 8192,
        "gemma": 2048,  # plainly, 8,192 tokens take 50 GiB
        "gemma, frozen": 2048,
    }.items()
}
"""Heads with so many tokens that the usual run leaves them out."""
ALL = HEADS | LONG
Row = dict[str, Any]


class Model(nn.Module):
    """Two residual blocks and a head. of: its sizes, and its loss. `way`: how the loss is computed."""

    def __init__(self, head: Head, way: str) -> None:
        super().__init__()
        self.way = way
        self.of = head
        self.embedding = nn.Embedding(1024, head.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(head.width), nn.Linear(head.width, 256), nn.GELU(), nn.Linear(256, head.width))
            for _ in range(2)
        )
        self.head = nn.Linear(head.width, head.classes, bias=False)
        self.head.weight.requires_grad_(not head.frozen)

    def loss(self, x: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        logits = self.head(x)
        if self.of.capped:
            logits = torch.tanh(logits / 30.0) * 30.0
        if self.of.picked:
            scores = F.log_softmax(logits, -1).gather(-1, labels[:, None])
            return -scores.sum() if reduction == "sum" else -scores.mean()
        return F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=self.of.smoothing)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        if self.way == "checkpoint":
            return checkpoint(self.loss, x, labels, use_reentrant=False)  # type: ignore[no-any-return]
        if self.way == "chunked loop":
            parts = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
            sums = [checkpoint(self.loss, part, label, "sum", use_reentrant=False) for part, label in parts]
            return torch.stack(sums).sum() / self.of.tokens
        if self.way == "linear_cross_entropy":
            return F.linear_cross_entropy(x, self.head.weight, labels)  # type: ignore[attr-defined, no-any-return]
        return self.loss(x, labels)


def ways(head: Head) -> list[str]:
    """The ways in which this head can be trained here."""
    theirs = ["linear_cross_entropy"] if hasattr(F, "linear_cross_entropy") and head.is_usual else []
    return ["plain", "checkpoint", "chunked loop", *theirs, "ours, whole", "ours, tiles", "ours, half", "ours, room"]


def _live_nbytes() -> int:
    counts = counting.install()
    window = None if counts is None else counts.window()
    assert window is not None, "needs a compiler"
    live = window.reset()
    window.close()
    return live


class Training:
    """A model that is trained in one of the ways."""

    def __init__(self, head: Head, way: str, spare_nbytes: int | None = None) -> None:
        """`spare_nbytes`: the budget, without what is in memory before the first step; None: the smallest one."""
        torch.manual_seed(0)
        self.model = Model(head, way).to(head.dtype)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.data = torch.Generator().manual_seed(1)
        self.head, self.losses = head, list[float]()
        self.run: Any = None
        self._stack = contextlib.ExitStack()
        if way.startswith("ours"):
            tile = "off" if way == "ours, whole" else "exact"
            budget = "min" if spare_nbytes is None else _live_nbytes() + spare_nbytes
            self.run = self._stack.enter_context(optimize(self.model, self.optimizer, budget=budget, tile=tile, verbose=False))

    def step(self) -> tuple[float, int]:
        """Seconds of CPU time, and the most bytes above those that are there between steps."""
        ids = torch.randint(0, 1024, (self.head.tokens,), generator=self.data)
        labels = torch.randint(0, self.head.classes, (self.head.tokens,), generator=self.data)
        counts = counting.install()
        window = None if counts is None else counts.window()
        assert window is not None, "needs a compiler"
        before, began = window.reset(), process_time()
        loss = self.model(ids, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds, peak = process_time() - began, window.peak_nbytes - before
        window.close()
        self.losses.append(loss.item())
        return seconds, peak

    def state_nbytes(self) -> int:
        """Bytes of optimizer state."""
        states = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
        return sum(t.nbytes for t in states)

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]

    def close(self) -> None:
        self._stack.close()


def measured(head: Head, rounds: int, these: Sequence[str] = ()) -> dict[str, Row]:
    """A row for each way (of `these`, and for the plain one; all if there are none): they are trained by turns."""
    trainings = dict[str, Training]()
    peaks = dict[str, int]()
    try:
        for way in (way for way in ways(head) if not these or way in ("plain", *these)):
            spare = None
            if way in _SHARES:
                spare = int(_SHARES[way] * peaks["plain"]) + trainings["plain"].state_nbytes()
            trainings[way] = Training(head, way, spare)
            peaks[way] = max(trainings[way].step()[1] for _ in range(_WARM))
        steps = [{way: training.step() for way, training in trainings.items()} for _ in range(rounds)]
        plain = trainings["plain"]
        rows = {}
        for way, training in trainings.items():
            same = training.losses == plain.losses and all(map(torch.equal, training.parameters(), plain.parameters()))
            ratios = [step[way][0] / step["plain"][0] for step in steps]
            rows[way] = {
                "peak_nbytes": max(step[way][1] for step in steps),
                "time": statistics.median(ratios),
                "same_bits": same,
            }
            if training.run is not None:
                rows[way]["tiles"] = tiles_text(training.run.status().plan.tiles)
        return rows
    finally:
        for training in trainings.values():
            training.close()


def tiles_text(heads: Sequence[TiledHead]) -> str:
    """The sizes of tiles, and whether a gradient is whole."""
    texts = []
    for head in heads:
        columns = f", {head.columns:,} columns" if head.columns else ""
        whole = ", a whole gradient" if any("mm" in op for op in head.assembled) else ""
        texts.append(f"{head.rows:,} rows{columns}{whole}")
    return "; ".join(texts)


def table(results: dict[str, dict[str, Row]]) -> str:
    """A row for each head and way."""
    lines = [
        "| head | way | peak, MiB | time | bits of *plain* | tiles |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        head = ALL[name]
        title = f"{name}: {head.classes:,} x {head.width}, {head.tokens:,} tokens"
        for way, row in rows.items():
            peak = row["peak_nbytes"] / 2**20
            bits = "yes" if row["same_bits"] else "no"
            lines.append(f"| {title} | {way} | {peak:.1f} | x{row['time']:.2f} | {bits} | {row.get('tiles', '')} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiles", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("heads", nargs="*", metavar="HEAD", help=", ".join(ALL))
    parser.add_argument("--long", action="store_true", help="the heads with the most tokens")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed")
    parser.add_argument("--ways", nargs="*", default=(), metavar="WAY", help="measure only these, beside the plain step")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    if not args.table:
        torch.set_num_threads(1)
        for name in args.heads or (LONG if args.long else HEADS):
            rows = measured(ALL[name], args.rounds, args.ways)
            print(table({name: rows}), flush=True)
            results[name] = rows if not args.ways else results.get(name, {}) | {way: rows[way] for way in args.ways}
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    else:
        print(table({name: results[name] for name in ALL if name in results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
