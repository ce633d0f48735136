"""One benchmark of a part of `python -m benchmarks gpu`, for one model: the process that the part is.

Writes the rows after each one, and which of them have other bits or are above their budgets. `--device cpu --small` runs the
same code on a CPU, with a disk instead of page-locked memory.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins: matrix products in the same order every time

import torch

from benchmarks.gpu import away, batch, codecs, lines, replay
from benchmarks.gpu.bench import Body, run, table
from benchmarks.models.gpu import MODELS, SMOKE

BODIES: dict[str, tuple[Body, dict[str, str]]] = {
    "replay": (replay.replay, replay.COLUMNS),
    "offload": (away.offload, away.COLUMNS),
    "compress": (away.compress, away.COLUMNS),
    "batch": (batch.batch, batch.COLUMNS),
}
"""Command -> what it runs, and the columns of its table."""
PEERS = ("per block", "save_on_cpu", "torch budget")
"""Rows, or the beginnings of their labels, whose bits are somebody else's."""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["codecs", *BODIES])
    parser.add_argument("model", nargs="?", choices=[*MODELS, *SMOKE])
    parser.add_argument("--lines", type=Path, required=True, help="the file of results")
    parser.add_argument("--part", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models")
    args = parser.parse_args(words)
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", 0)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        _measured(args, device, partial(lines.append, args.lines, part=args.part))
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _measured(args: argparse.Namespace, device: torch.device, write: Callable[..., None]) -> None:
    columns, name = codecs.COLUMNS, args.model or "GB/s"

    def write_numbers(result: dict[str, Any]) -> None:
        write(kind="numbers", command=args.command, model=args.model, small=args.small, result=result)

    if args.command == "codecs":
        result = {"rows": codecs.codecs(device, codecs.SMALL if args.small else codecs.LARGE)}
    else:
        body, columns = BODIES[args.command]
        build = (SMOKE if args.small else MODELS)[args.model]
        result = run(args.model, build, device, args.seconds, args.rounds, body, write_numbers)
    write_numbers(result)
    for label, row in result["rows"].items():
        failed = wrong(label, row)
        write(kind="test", test=f"{name}: {label}", outcome="failed" if failed else "passed", message=failed)
    if "left_out" in result:
        write(kind="test", test=f"{name}: the rest", outcome="skipped", message=result["left_out"])
    print(table({name: result}, columns))


def wrong(label: str, row: dict[str, Any]) -> str:
    """What a row of ours says that ought not to be; "" where all is well. Lossy plans are known to have other gradients."""
    found = []
    if not row.get("equal", True) and not label.startswith(("lossy", *PEERS)):
        found.append("other bits")
    if not row.get("within_budget", True):
        more = row.get("reserved_mib", row.get("allocated_mib", 0.0)) - row.get("budget_mib", 0.0)
        found.append(f"above the budget by {more:.2f} MiB" if row.get("budget_mib") else "above the budget")
    return " and ".join(found)
