"""Models that their user compiles, within budgets: peaks, FLOPs that run again, and bits, beside torch's own memory budget.

    python -m benchmarks compiled [MODEL ...]            # writes results/compiled.json, a case at a time
    python -m benchmarks compiled gpt2 --cases 0.5 min
    python -m benchmarks compiled --table                # what is recorded, as Markdown

`torch.compile` with Inductor on the CPU, AdamW, one thread, dropout on where the model has it. A case is a budget: this share
of the bytes that the step of `torch 1.0` needs above those between steps. `torch 0.5`: trained without us, with
`activation_memory_budget=0.5`. `eager`: not compiled. `keep all` saves everything and runs nothing again; `min` is the smallest
plan. `gpt2/aot_eager`: compiled by this backend. Hashes are of all parameters, buffers and losses after the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch

from benchmarks.lib.compiled_steps import Row, as_torch, keep_all, planned
from benchmarks.lib.paths import RESULTS
from lightning_memopt.trace import count_all

FILE = RESULTS / "compiled.json"
COMPILED = ("gpt2", "llama", "bert", "vit", "resnet50", "t5", "gpt2/aot_eager")
SHARES = ("0.8", "0.7", "0.67", "0.65", "0.6", "0.4", "0.25", "0.15")
TORCH = ("torch 1.0", "torch 0.75", "torch 0.5", "torch 0.25", "torch 0.1")
CASES = ("eager", *TORCH, "keep all", *SHARES, "min")


def case(model: str, name: str, recorded: dict[str, Row]) -> Row:
    """A case. A share needs the row "torch 1.0"."""
    if name == "eager":
        return as_torch(f"{model.partition('/')[0]}/", 1.0)
    if name in TORCH:
        return as_torch(model, float(name.removeprefix("torch ")))
    if name == "keep all":
        return keep_all(model)
    if name == "min":
        return planned(model, "min")
    whole = recorded["torch 1.0"]
    resident = whole["resident_nbytes"]
    return planned(model, int(resident + float(name) * (whole["peak_nbytes"] - resident)))


def table(results: dict[str, dict[str, Row]]) -> str:
    """A row for each case; bytes are above those between steps."""
    lines = [
        "| model | case | budget, MiB | peak, MiB | predicted | extra FLOPs | step time | bits of *keep all* |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, cases in results.items():
        resident, seconds = cases["torch 1.0"]["resident_nbytes"], cases["torch 1.0"]["step_seconds"]
        for name in (name for name in CASES if name in cases):
            row = cases[name]
            if "hash" not in row:
                least = (row["smallest_nbytes"] - resident) / 2**20
                lines.append(f"| {model} | {name} | no plan: {least:.2f} is the least | | | | | |")
                continue
            above = {key: f"{(row[key] - resident) / 2**20:.2f}" for key in ("budget_nbytes", "peak_nbytes") if key in row}
            off = f"{100 * (row['predicted_nbytes'] / row['peak_nbytes'] - 1):+.2f} %" if "predicted_nbytes" in row else ""
            same = "yes" if row["hash"] == cases.get("keep all", row)["hash"] else "no"
            budget = above.get("budget_nbytes", "") if name in SHARES else ""
            if name in SHARES and row["peak_nbytes"] > row["budget_nbytes"]:
                budget += ", not kept"
            flops, time = f"{100 * row['extra_flops']:+.1f} %", f"x {row['step_seconds'] / seconds:.2f}"
            lines.append(f"| {model} | {name} | {budget} | {above['peak_nbytes']} | {off} | {flops} | {time} | {same} |")
    return "\n".join(lines)


def below(results: dict[str, dict[str, Row]]) -> str:
    """For each point of torch's budget: the lowest peak of ours that runs no more FLOPs again."""
    lines = ["| model | torch's budget | extra FLOPs | peak, MiB | ours | extra FLOPs |", "|---|---|---|---|---|---|"]
    for model, cases in results.items():
        ours = [cases[name] for name in ("keep all", *SHARES, "min") if "hash" in cases.get(name, {})]
        for name in (name for name in TORCH if name in cases):
            theirs, resident = cases[name], cases["torch 1.0"]["resident_nbytes"]
            no_more = [row for row in ours if row["extra_flops"] <= theirs["extra_flops"] + 1e-4]
            best = min(no_more, key=lambda row: row["peak_nbytes"], default=None)
            pair = [f"{100 * theirs['extra_flops']:+.1f} %", f"{(theirs['peak_nbytes'] - resident) / 2**20:.2f}", "", ""]
            if best is not None:
                pair[2:] = f"{(best['peak_nbytes'] - resident) / 2**20:.2f}", f"{100 * best['extra_flops']:+.1f} %"
            lines.append(f"| {model} | {name.removeprefix('torch ')} | {' | '.join(pair)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(COMPILED)}")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results: dict[str, dict[str, Row]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if not args.table:
        torch.set_num_threads(1)
        os.environ["MEMOPT_CACHE"] = "0"  # each case searches by itself
        count_all(print)
        for model in args.models or COMPILED:
            for name in args.cases:
                recorded = results.setdefault(model, {})
                recorded[name] = case(model, name, recorded)
                print(model, name, json.dumps(recorded[name]), flush=True)
                FILE.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    print()
    print(below(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
