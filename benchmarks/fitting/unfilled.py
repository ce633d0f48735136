"""Whether a step that is recorded without its bytes is the step that is recorded for real: ops, sizes, lives, peak.

python -m benchmarks unfilled [names...] [--jobs 2] [--out DIR]

Each of the fifteen models, and of the architectures of `transformers` (benchmarks/models/zoo), takes two training steps twice:
computed, and without computing a tensor. The graphs are compared on the CPU, so their operators are the CPU's. Writes
unfilled.json.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.lib.graphs import alone, computed, different, peak_nbytes
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS, WORDS
from benchmarks.models.zoo import ZOO
from benchmarks.robustness.worker import Row, ask, work
from lightning_memopt.bench import zoo
from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.recording import record
from lightning_memopt.graph import unmodified_levels

TIMEOUT = 240.0
_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""What is switched off, because ops that are not computed draw no random numbers, and so other layers are dropped."""


def _model(name: str) -> Training:
    _seed()
    return zoo.training(MODELS[name](batch=2, **WORDS.get(name, {})), torch.device("cpu"))


def _architecture(name: str) -> Training:
    _seed()
    architecture = ZOO[name]
    model, batch = architecture.build()
    for part in (*model.modules(), *(m.config for m in model.modules() if hasattr(m, "config"))):
        for name in filter(partial(hasattr, part), _RANDOM):
            setattr(part, name, 0.0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    optimizer = adam(parameters, lr=1e-3) if architecture.adaptive else sgd(parameters, lr=1e-3, momentum=0.9)

    def step() -> None:
        architecture.loss(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def _seed() -> None:
    import numpy as np

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def examine(name: str) -> Row:
    """Record one of the models, or of the architectures, in both ways, and compare."""
    kind, _, which = name.partition("/")
    build = partial({"models": _model, "architectures": _architecture}[kind], which)
    recorded, real = record(build), computed(build)
    said = different(recorded.graph, real)
    return {
        "status": "differs" if said else "equal",
        "ops": len(real.ops),
        "peak": peak_nbytes(recorded.graph),
        "computed_peak": peak_nbytes(real),
        "workspaces": max(unmodified_levels(real)) - max(unmodified_levels(replace(real, ops=alone(real).ops))),
        "note": said,
        "assumed": dict(recorded.assumed),
        "ran": dict(recorded.ran),
    }


def line_of(name: str, row: Row) -> str:
    if "ops" not in row:
        return f"{name:28} {row['status']}: {row['note']}"
    share = row["peak"] / row["computed_peak"] - 1
    said = "; ".join(filter(None, (row["note"], *(f"{n} x {op}" for op, n in (row["assumed"] | row["ran"]).items()))))
    return f"{name:28} {row['ops']:6} ops {row['computed_peak']:12} bytes {share:+8.3%} {row['status']:8} {said}"


def summary(rows: list[Row]) -> str:
    equal = [row for row in rows if row["status"] == "equal"]
    rest = [row for row in rows if "ops" in row and row["status"] != "equal"]
    errors = sorted(abs(row["peak"] / row["computed_peak"] - 1) for row in rest)
    same = sum(row["peak"] == row["computed_peak"] for row in rest)
    text = f"{len(equal)} of {len(rows)} graphs are equal"
    return text + (f"; of the others, {same} have the same peak, and the largest is {errors[-1]:.3%} off" if rest else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of models and architectures; all of them if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(examine)
        return
    every = [*(f"models/{name}" for name in MODELS), *(f"architectures/{name}" for name in ZOO)]
    wanted = [name for name in every if not args.names or name.partition("/")[2] in args.names]
    rows: dict[str, Row] = {}

    def done(name: str, row: Row) -> None:
        rows[name] = row
        print(line_of(name, row), flush=True)

    ask("benchmarks.fitting.unfilled", wanted, args.jobs, done, TIMEOUT)
    path = args.out / "unfilled.json"
    if args.names and path.exists():  # the other rows stay
        rows = json.loads(path.read_text())["models"] | rows
    results = {"torch": torch.__version__, "models": {name: rows[name] for name in sorted(rows)}}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(summary(list(rows.values())))


if __name__ == "__main__":
    main()
