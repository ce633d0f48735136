"""The smallest plans with AdamW where its state is parked between updates, beside those where it stays, and the bits of both.

    python -m benchmarks states                 # writes results/states.json, a model at a time: a quarter of an hour
    python -m benchmarks states gpt2 unet
    python -m benchmarks states --table         # what is recorded, as Markdown

The models of `frontier`, with two samples a batch, so that weights and state are a large part of a step. Each is trained
plainly, by its smallest plan with `offload="none"`, and by that with `offload="disk"`, without and with early updates. Bytes
are those of the counter around torch's allocator, above what the process holds beside the step. float32, dropout on.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import sys
import warnings
from typing import Any

import torch

from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS, built
from lightning_memopt import optimize
from lightning_memopt.units import format_nbytes

FILE = RESULTS / "states.json"
STEPS = 6
"""The first three are observed."""
WAYS: dict[str, dict[str, Any]] = {
    "stays": {"offload": "none", "optimizer_in_backward": "never"},
    "stays, early updates": {"offload": "none", "optimizer_in_backward": "always"},
    "parked": {"offload": "disk", "optimizer_in_backward": "never"},
    "parked, early updates": {"offload": "disk", "optimizer_in_backward": "always"},
}
Row = dict[str, Any]


def trained(name: str, options: dict[str, Any] | None) -> tuple[Any, list[torch.Tensor], int]:
    """A training by the smallest plan with these options, without a plan for None: the run's status, weights and state, and the
    bytes of the state.
    """
    model, batch = built(name, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    status = None
    early = options is not None and options["optimizer_in_backward"] == "always"
    with contextlib.ExitStack() as stack:
        run: Any = None
        if options is not None:
            run = stack.enter_context(optimize(model, optimizer, budget="min", max_slowdown=math.inf, verbose=False, **options))
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch).loss
            with run.last_backward() if early else contextlib.nullcontext():
                loss.backward()
            del loss
            optimizer.step()
        status = None if run is None else run.status()
    states = [t for state in optimizer.state.values() for t in state.values()]
    return status, [p.detach() for p in model.parameters()] + states, sum(t.nbytes for t in states)


def row(name: str) -> Row:
    """What is recorded of a model."""
    _, plain, state_nbytes = trained(name, None)
    found: Row = {"state_nbytes": state_nbytes, "ways": {}}
    held = sum(t.nbytes for t in plain)  # beside each step that is measured: the plain result
    for way, options in WAYS.items():
        gc.collect()
        status, ours, _ = trained(name, options)
        plan = status.plan
        found["ways"][way] = {
            "smallest_nbytes": plan.predicted_peak_nbytes - held,
            "unmodified_nbytes": plan.unmodified_peak_nbytes - held,
            "measured_nbytes": status.measured_peak_nbytes - held,
            "parked_nbytes": sum(state.nbytes for state in plan.states),
            "equal": len(ours) == len(plain) and all(map(torch.equal, plain, ours)),
        }
        del ours
        print(f"{name}, {way}: {found['ways'][way]}", flush=True)
    return found


def table(rows: dict[str, Row]) -> str:
    """The rows as Markdown."""
    columns = ["model", "state", "unmodified", *WAYS, "measured above predicted, at most"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, found in rows.items():
        ways = found["ways"]
        cells = [format_nbytes(ways[way]["smallest_nbytes"]) for way in WAYS]
        above = max(each["measured_nbytes"] - each["smallest_nbytes"] for each in ways.values())
        unmodified = format_nbytes(ways["stays"]["unmodified_nbytes"])
        lines.append(f"| {name} | {format_nbytes(found['state_nbytes'])} | {unmodified} | {' | '.join(cells)} | {above} B |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; none: all")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    rows: dict[str, Row] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if args.table:
        print(table(rows))
        return 0
    warnings.simplefilter("ignore")
    for name in args.models or MODELS:
        rows[name] = row(name)
        FILE.write_text(json.dumps({n: rows[n] for n in MODELS if n in rows}, indent=1) + "\n")
    print(table(rows))
    return int(not all(each["equal"] for found in rows.values() for each in found["ways"].values()))


if __name__ == "__main__":
    sys.exit(main())
