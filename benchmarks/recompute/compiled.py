"""A GPT-2 that its user compiles, within budgets: peaks beside their predictions, FLOPs that run again, and bits.

    python -m benchmarks compiled            # writes results/compiled.json, a case at a time
    python -m benchmarks compiled --cases 0.5
    python -m benchmarks compiled --table    # what is recorded, as Markdown

8 layers, width 256, batch 8, 256 tokens, dropout 0.1, AdamW, `torch.compile` with Inductor on the CPU, one thread. A case is a
budget: this share of what torch's own split takes above the smallest plan. `keep all` saves everything and runs nothing again;
`min` is the smallest plan; `torch` trains without us. Hashes are of all parameters and losses after the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.digests import hashed
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt import optimize
from lightning_memopt.session import compiled_regions
from lightning_memopt.trace import count_all, metered_cpu

FILE = RESULTS / "compiled.json"
SHARES = ("0.75", "0.5", "0.25")
CASES = ("torch", "keep all", *SHARES, "min")
KEYS = ("budget_nbytes", "peak_nbytes", "predicted_nbytes")
STEPS = 12


class Trained(nn.Module):
    """Logits and loss in one graph: the loss function of transformers would break it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=words).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def train(budget: str | int | None) -> dict[str, Any]:
    """What a training comes to. `budget`: None trains without us."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model, batch, _ = MODELS["gpt2"]()
    trained = Trained(model)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    call = torch.compile(trained)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses, seconds, peaks = [], [], []
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"profile_steps": 1, "solver_seconds": 10, "verbose": False}
        run = None if budget is None else stack.enter_context(optimize(trained, optimizer, budget=budget, **options))
        for _ in range(STEPS):
            words = torch.randint(0, 1024, batch["input_ids"].shape, generator=generator)
            held = held_nbytes()
            with metered_cpu() if run is None else contextlib.nullcontext() as events:
                began = time.perf_counter()
                loss = call(words)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - began)
            peaks.append(held + events.peak_nbytes if events is not None else 0)
            losses.append(loss.item())
            del loss
        status = None if run is None else run.status()
    row: dict[str, Any] = {
        "peak_nbytes": peaks[-1],
        "hash": hashed([*trained.parameters(), torch.tensor(losses, dtype=torch.float64)]),
        "step_seconds": statistics.median(seconds[-3:]),
    }
    if status is not None:
        assert status.plan is not None
        row |= {
            "peak_nbytes": status.measured_peak_nbytes,
            "budget_nbytes": status.plan.budget_nbytes,
            "predicted_nbytes": status.plan.predicted.peak_nbytes,
            "said": status.compiled,
        }
    return row


def case(name: str, results: dict[str, Any]) -> dict[str, Any]:
    """A case. A share of the bytes above the smallest plan needs the rows "torch" and "min"."""
    if name in SHARES:
        least, most = results["min"]["peak_nbytes"], results["torch"]["peak_nbytes"]
        return train(int(least + float(name) * (most - least)))
    if name != "keep all":
        return train({"torch": None}.get(name, name))
    with mock.patch.object(compiled_regions, "_cheapest", lambda step, stages, target: [0] * len(stages)):
        return train("min")


def table(results: dict[str, Any]) -> str:
    """A row for each case."""
    lines = ["| case | budget | peak | predicted | bits of *keep all* | compiled code |", "|---|---|---|---|---|---|"]
    for name in (name for name in CASES if name in results):
        row = results[name]
        same = "yes" if row["hash"] == results.get("keep all", row)["hash"] else "no"
        nbytes = [f"{row[key] / 2**20:.2f} MiB" if key in row else "" for key in KEYS]
        lines.append(f"| {name} | {' | '.join(nbytes)} | {same} | {row.get('said', 'as torch splits it')} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    if not args.table:
        torch.set_num_threads(1)
        count_all(print)
        for name in sorted(args.cases, key=lambda name: name in SHARES):
            results[name] = case(name, results)
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
