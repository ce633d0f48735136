"""A sweep over `transformers` architectures: tiny, random weights, dropout on, trained for a few steps within a budget.

    python -m benchmarks architectures [names...] [--jobs 2] [--out DIR] [--docs FILE]

The budget leaves half of the activations: what is resident, and half of what the unmodified step has above it, by a count of
torch's allocator that is not part of the package. Every step's loss and gradients, and at the end parameters, buffers,
optimizer state and generators must be bit-equal to those of the unmodified run, and the measured peak of every planned step
within the budget; or the run is refused by name. Models run in processes of their own, with a time-out each. Writes
architectures.json and the page docs/supported_models.md; a part of the sweep leaves the other rows as they are.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.digests import digest
from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.models.zoo import ZOO, Architecture
from benchmarks.robustness import loops_count
from benchmarks.robustness.loops_run import generators, rounds
from benchmarks.robustness.worker import Row, ask, work
from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError, MemOptError
from lightning_memopt.session.judge.states import Running, State

MIB = 2**20
SHARE = 0.5
OBSERVED, PLANNED = 3, 4
OPTIONS: dict[str, Any] = {"profile_steps": OBSERVED, "solver_seconds": 0.3, "verbose": False}
"""Bits and peaks are compared, not speed."""
TIMEOUT = 240.0
Batch = dict[str, Any]


@dataclass
class Step:
    """bits: a digest of the loss, and of the gradients that were updated by. began: bytes before it. peak: its own."""

    bits: Any
    finite: bool
    began: int
    peak: int


class Training:
    """One model and its optimizer from the same start as any other of this architecture.

    model_nbytes: those of the model. Steps have the bytes of the process beyond what is there now, and these.
    """

    def __init__(self, architecture: Architecture, model: nn.Module, model_nbytes: int, batch: Batch) -> None:
        self._base_nbytes = _live_nbytes() - model_nbytes
        self._loss = architecture.loss
        self.model, self.batch = model, copy.deepcopy(batch)  # Whisper masks it in place
        parameters = [p for p in model.parameters() if p.requires_grad]
        adam, sgd = torch.optim.AdamW, torch.optim.SGD
        self.optimizer = adam(parameters, lr=1e-3) if architecture.adaptive else sgd(parameters, lr=1e-3, momentum=0.9)
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)

    @property
    def nbytes(self) -> int:
        """What there is of it now."""
        return _live_nbytes() - self._base_nbytes

    def step(self) -> Step:
        began = self.nbytes
        loops_count.true_peak()
        loss = self._loss(self.model(**self.batch))
        loss.backward()
        grads = [p.grad for p in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        peak = (loops_count.true_peak() or 0) - self._base_nbytes
        return Step(digest([loss, grads]), bool(torch.isfinite(loss)), began, peak)

    def left(self) -> dict[str, Any]:
        """Digests of parameters, buffers, optimizer state and generators."""
        return digest(self.model) | {"optimizer": digest(self.optimizer), "generators": generators()}


def _live_nbytes() -> int:
    nbytes = loops_count.live_nbytes()
    assert nbytes is not None, "needs a compiler: nothing counts the allocator's bytes"
    return nbytes


def examine(name: str, planned: int = PLANNED) -> Row:
    """Train one architecture, unmodified and within the budget, and say what came of it. In a process that counts."""
    architecture = ZOO[name]
    began = time.perf_counter()
    torch.manual_seed(0)
    model, batch = architecture.build()
    parameters = sum(p.numel() for p in model.parameters())
    without = _live_nbytes()
    twin = copy.deepcopy(model)
    model_nbytes = _live_nbytes() - without
    third = copy.deepcopy(model)
    plain = Training(architecture, model, model_nbytes, batch)
    expected = [plain.step() for _ in range(OBSERVED + planned)]
    left = plain.left()
    del model, plain
    gc.collect()
    resident, unmodified = max(step.began for step in expected), max(step.peak for step in expected)
    budget = int(resident + SHARE * (unmodified - resident))
    row: Row = {
        "model": architecture.model,
        "family": architecture.family,
        "parameters": parameters,
        "resident": resident,
        "unmodified": unmodified,
        "budget": budget,
        "finite": all(step.finite for step in expected),
    }
    ours = Training(architecture, twin, model_nbytes, batch)
    beside = max(0, held_nbytes() - ours.nbytes)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row |= _planned(ours, budget, beside, expected)
            row["said"] = sorted({str(w.message)[:400] for w in caught if "MemOpt" in str(w.message)})
        if row["status"] == "planned":
            after = ours.left()
            row["different"] += [key for key in left if after[key] != left[key]]
    except MemOptError as error:
        row |= {"status": "refused", "note": f"{type(error).__name__}: {error}"}
        smallest = getattr(error, "smallest_nbytes", None)
        if isinstance(error, InfeasibleError) and smallest is not None:
            row["smallest_share"] = (smallest - beside - resident) / (unmodified - resident)
    del ours, twin
    gc.collect()
    row["observed_freely"] = _observed(Training(architecture, third, model_nbytes, batch), expected)
    row["seconds"] = time.perf_counter() - began
    if row["status"] == "planned":
        if row["different"]:
            row["status"] = "wrong"
        elif row["measured"] > budget:
            row["status"] = "over"
    return row


def _planned(ours: Training, budget: int, beside: int, expected: list[Step]) -> Row:
    """The run within the budget, and the bytes that the process holds `beside` the model."""
    different: list[str] = []
    observed: list[float] = []
    measured: list[int] = []
    states: list[State | None] = []
    with (
        optimize(ours.model, ours.optimizer, budget=budget + beside, **OPTIONS) as run,
        rounds(lambda: None, states.append),
    ):
        for i, reference in enumerate(expected):
            step = ours.step()
            if isinstance(states[-1], Running):
                measured.append(step.peak)
            else:
                observed.append(step.peak / reference.peak)
            if step.bits != reference.bits:
                different.append(f"step {i}")
        status = run.status()
    plan, graph = status.plan, status.graph
    row: Row = {"different": different, "observed": max(observed, default=None)}
    if status.phase == "unplanned":
        return row | {"status": "left", "note": status.reason}
    if plan is None or graph is None:
        return row | {"status": "never planned", "note": f"{status.phase}: {status.reason}"}
    return row | {
        "status": "planned",
        "predicted": plan.predicted_peak_nbytes - beside,
        "measured": max(measured),
        "measured_steps": measured,
        "replayed": plan.predicted.rebuilt_ops,
        "forward_ops": len(graph.forward),
        "opaque_ops": sorted({op.name for op in graph.forward if not op.recomputable}),
        "solver": plan.solver,
        "replanned": status.replans,
        "left_plan": status.deviates,
        "note": "",
    }


def _observed(ours: Training, expected: list[Step]) -> float:
    """The largest share of the unmodified peak that observed steps take where no budget bounds them."""
    with optimize(ours.model, ours.optimizer, budget="min", **OPTIONS):
        return max(ours.step().peak / expected[i].peak for i in range(2))


# -- what is printed and written --------------------------------------------------------------------------

_HEAD = ["architecture", "params", "activations", "observed", "budget", "predicted", "measured", "replayed", "equal", "note"]


def cells(row: Row) -> list[str]:
    """Bytes in MiB: activations above what is resident, the others with it."""
    mib = lambda key: f"{row[key] / MIB:.2f}" if key in row else ""  # noqa: E731
    activations = f"{(row['unmodified'] - row['resident']) / MIB:.2f}" if "unmodified" in row else ""
    replayed = f"{row['replayed']} of {row['forward_ops']}" if "replayed" in row else ""
    planned = row["status"] in ("planned", "over", "wrong")
    equal = ("no: " + ", ".join(row["different"][:3]) if row["different"] else "yes") if planned else ""
    note = "" if row["status"] == "planned" else f"{row['status']}: {row['note']}"
    if row["status"] == "over":
        note = "over the budget in some steps"
    if row["status"] == "refused" and "smallest_share" in row:
        note = f"refused: the smallest plan leaves {row['smallest_share']:.2f} of the activations"
    if row.get("left_plan"):
        note += "; forward varies" if note else "forward varies"
    if row.get("replanned"):
        note += f"; replanned {row['replanned']}x" if note else f"replanned {row['replanned']}x"
    name, parameters = row["name"], f"{row['parameters']:,}" if "parameters" in row else ""
    observed = f"{row['observed_freely']:.3f}" if "observed_freely" in row else ""
    return [name, parameters, activations, observed, mib("budget"), mib("predicted"), mib("measured"), replayed, equal, note]


def line_of(row: Row) -> str:
    name, parameters, *numbers, replayed, equal, note = cells(row)
    return f"{name:28} {parameters:>9} " + " ".join(f"{n:>8}" for n in numbers) + f" {replayed:>12} {equal:4} {note}"[:170]


def summary(rows: list[Row]) -> str:
    count: dict[str, int] = {}
    for row in rows:
        count[row["status"]] = count.get(row["status"], 0) + 1
    planned = count.get("planned", 0)
    parts = ", ".join(f"{n} {status}" for status, n in sorted(count.items(), key=lambda c: -c[1]))
    text = f"{len(rows)} architectures: {parts}; {100 * planned / max(1, len(rows)):.0f} % planned, equal and within the budget"
    observed = [row["observed_freely"] for row in rows if "observed_freely" in row]
    errors = [abs(row["measured"] / row["predicted"] - 1) for row in rows if "predicted" in row]
    if errors:
        wrong = sum(error > 0.01 for error in errors)
        text += f"; predictions are off by {statistics.median(errors):.2%} in the median, by more than 1 % in {wrong}"
    if observed:
        text += f"; an observed step takes at most {max(observed):.3f} of the unmodified one's peak"
    return text


def page(rows: list[Row]) -> str:
    """docs/supported_models.md"""
    lines = [
        "# Architectures",
        "",
        "Generated by `python -m benchmarks architectures`; do not edit. Tiny configurations of `transformers` "
        f"{_version()}, built from scratch with random weights, in training mode with dropout on, on the CPU (torch "
        f"{torch.__version__.partition('+')[0]}, fp32).",
        f"Each is trained for {OBSERVED + PLANNED} steps, the first {OBSERVED} observed, within what is resident (parameters, "
        "buffers, optimizer state, batch) and half of what the unmodified step has above it at its peak (*activations*).",
        "*Equal*: losses and gradients of every step, parameters, buffers, optimizer state and the states of torch's, "
        "numpy's and Python's generators at the end are bit-equal to the unmodified run's. *Observed*: the peak of an observed "
        "step under the smallest plan, where no budget bounds it, by that of the same unmodified step. *Measured*: the highest "
        "of the planned steps. Peaks are counted by a library that is not part of this package (preloaded around "
        "`c10::alloc_cpu`). MiB.",
        "",
        summary(rows) + ".",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|" + "---|" * len(_HEAD),
    ]
    lines += ["| " + " | ".join(c.replace("|", "/") for c in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures of benchmarks/models/zoo; all of them where none is given")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "supported_models.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(examine)
        return
    wanted = args.names or list(ZOO)
    by_name: dict[str, Row] = {}

    def done(name: str, row: Row) -> None:
        by_name[name] = {"name": name} | row
        print(line_of(by_name[name]), flush=True)

    ask("benchmarks.robustness.architectures", wanted, args.jobs, done, TIMEOUT)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "architectures.json"
    if args.names and path.exists():  # a part of the sweep: the other rows stay
        by_name = {row["name"]: row for row in json.loads(path.read_text())["architectures"]} | by_name
    rows = [by_name[name] for name in ZOO if name in by_name]
    results = {"torch": torch.__version__, "transformers": _version(), "share": SHARE, "architectures": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    if args.docs is not None:
        args.docs.write_text(page(rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
