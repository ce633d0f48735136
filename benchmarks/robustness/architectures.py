"""A sweep over `transformers` architectures: tiny, random weights, dropout on, trained for a few steps within a budget.

    python -m benchmarks architectures [names...] [--jobs 2] [--out DIR] [--docs FILE]

The budget leaves half of the activations: what is resident, and half of what the unmodified step has above it, by the
allocator. Every step's loss and gradients, and at the end parameters, buffers, optimizer state and generators must be
bit-equal to those of the unmodified run, and the measured peak of every planned step within the budget; or the run is
refused by name. Models run in processes of their own, with a time-out each. Writes architectures.json and the page
docs/supported_models.md; a part of the sweep leaves the other rows as they are.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.models.zoo import ZOO, Architecture
from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError, MemOptError
from lightning_memopt.session.resident import resident_nbytes, resident_tensors
from lightning_memopt.session.states import Running
from lightning_memopt.trace import metered_cpu

MIB = 2**20
SHARE = 0.5
OBSERVED, PLANNED = 3, 4
TIMEOUT = 240.0
Batch = dict[str, Any]


def _same(a: Any, b: Any) -> bool:
    """Equality of bits: NaN equals itself, 0.0 is not -0.0."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return bool(torch.equal(a, b))
    flat = lambda t: t.detach().contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return a.numel() == 0 or torch.equal(flat(a), flat(b))


def _generators() -> list[Any]:
    kind, keys, at, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), kind, list(keys), at, *rest, random.getstate()]


class Training:
    """One model and its optimizer from the same start as any other of this architecture."""

    def __init__(self, model: nn.Module, batch: Batch, adaptive: bool) -> None:
        self.model, self.batch = model, copy.deepcopy(batch)  # Whisper masks it in place
        parameters = [p for p in model.parameters() if p.requires_grad]
        adam, sgd = torch.optim.AdamW, torch.optim.SGD
        self.optimizer = adam(parameters, lr=1e-3) if adaptive else sgd(parameters, lr=1e-3, momentum=0.9)

    @staticmethod
    def seed() -> None:
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)

    def resident_nbytes(self) -> int:
        tensors = resident_tensors(self.model, [self.optimizer], self.batch)
        return resident_nbytes(tensors, torch.device("cpu"))

    def step(self, architecture: Architecture) -> list[Any]:
        """The loss, and the gradients that were updated by."""
        loss = architecture.loss(self.model(**self.batch))
        loss.backward()
        grads = [p.grad for p in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.detach(), *grads]

    def metered(self, architecture: Architecture) -> tuple[list[Any], int]:
        """A step, and its peak by the allocator with all that is resident."""
        resident = self.resident_nbytes()
        with metered_cpu() as events:
            found = self.step(architecture)
        return found, resident + events.peak_nbytes

    def state(self) -> dict[str, Any]:
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for i, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"optimizer {i}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
        return tensors


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    if one.keys() != other.keys():
        return ["names"]
    return [name for name, t in one.items() if not _same(t, other[name])]


def examine(name: str, planned: int = PLANNED) -> dict[str, Any]:
    """Train one architecture, unmodified and within the budget, and say what came of it."""
    architecture = ZOO[name]
    began = time.perf_counter()
    torch.manual_seed(0)
    model, batch = architecture.build()
    parameters = sum(p.numel() for p in model.parameters())
    twin = copy.deepcopy(model)
    plain = Training(model, batch, architecture.adaptive)
    plain.seed()
    expected, peaks, residents = [], [], []
    for _ in range(OBSERVED + planned):
        found, peak = plain.metered(architecture)
        expected.append(found)
        peaks.append(peak)
        residents.append(plain.resident_nbytes())
    generators = _generators()
    resident, unmodified = max(residents), max(peaks)
    budget = int(resident + SHARE * (unmodified - resident))
    row: dict[str, Any] = {
        "model": architecture.model,
        "family": architecture.family,
        "parameters": parameters,
        "resident": resident,
        "unmodified": unmodified,
        "unmodified_least": min(peaks[1:]),
        "budget": budget,
        "finite": all(bool(torch.isfinite(e[0])) for e in expected),
    }
    ours = Training(twin, batch, architecture.adaptive)
    beside = max(0, held_nbytes() - ours.resident_nbytes())
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row |= _planned(ours, architecture, budget, beside, expected)
            row["said"] = sorted({str(w.message)[:400] for w in caught if "MemOpt" in str(w.message)})
        if row["status"] == "planned":
            row["different"] += _differences(plain.state(), ours.state())
            row["different"] += ["generators"] * (_generators() != generators)
    except MemOptError as error:
        row |= {"status": "refused", "note": f"{type(error).__name__}: {error}"}
        smallest = getattr(error, "smallest_nbytes", None)
        if isinstance(error, InfeasibleError) and smallest is not None:
            row["smallest_share"] = (smallest - beside - resident) / (unmodified - resident)
    row["seconds"] = time.perf_counter() - began
    if row["status"] == "planned":
        if row["different"]:
            row["status"] = "wrong"
        elif row["measured"] > budget:
            row["status"] = "over"
    return row


def _planned(
    ours: Training, architecture: Architecture, budget: int, beside: int, expected: list[list[Any]]
) -> dict[str, Any]:
    """The run within the budget, and the bytes that the process holds `beside` the model.

    The session meters the planned steps that it judges, we meter the others.
    """
    different: list[str] = []
    measured: list[int] = []
    ours.seed()
    with optimize(ours.model, ours.optimizer, budget=budget + beside, profile_steps=OBSERVED, verbose=False) as run:
        for i, reference in enumerate(expected):
            state = run.session._current
            if isinstance(state, Running) and not state.measures:
                found, peak = ours.metered(architecture)
                measured.append(peak)
            else:
                found = ours.step(architecture)
                after = run.session._current
                if isinstance(state, Running) and isinstance(after, Running) and after.measured_nbytes is not None:
                    measured.append(after.measured_nbytes - beside)
            if not all(map(_same, found, reference)):
                different.append(f"step {i}")
            del found
        status = run.status()
    plan, graph = status.plan, status.graph
    if status.phase == "unplanned":
        return {"status": "left", "note": status.reason, "different": different}
    if plan is None or graph is None:
        return {"status": "never planned", "note": f"{status.phase}: {status.reason}", "different": different}
    return {
        "status": "planned",
        "different": different,
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


# -- processes ------------------------------------------------------------------------------------------


def work() -> None:
    """Read names, answer each with a line of JSON."""
    torch.set_num_threads(1)
    gc.freeze()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models that print do not disturb
    for line in sys.stdin:
        name = line.strip()
        try:
            row = examine(name)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            row = {"status": "crashed", "note": note[:600], "traceback": traceback.format_exc()[-3000:]}
        print(json.dumps({"name": name} | row), file=out, flush=True)
        gc.collect()


class Worker(threading.Thread):
    """Feeds a process with names; starts another where one hangs or dies."""

    def __init__(self, names: queue.SimpleQueue[str], rows: dict[str, dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self.names, self.rows = names, rows
        self.process: subprocess.Popen[str] | None = None

    def ask(self, name: str) -> dict[str, Any]:
        if self.process is None:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.robustness.architectures", "--worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(TIMEOUT, process.kill)
        late.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.process = None
        code = process.wait()
        hung = late.finished.is_set() and code == -9
        return {"name": name, "status": "timeout" if hung else "crashed", "note": f"the process ended with {code}"}

    def run(self) -> None:
        while True:
            try:
                name = self.names.get_nowait()
            except queue.Empty:
                break
            self.rows[name] = self.ask(name)
            print(line_of(self.rows[name]), flush=True)
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


# -- what is printed and written --------------------------------------------------------------------------

_HEAD = ["architecture", "params", "activations", "budget", "predicted", "measured", "replayed", "equal", "note"]


def cells(row: dict[str, Any]) -> list[str]:
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
    return [name, parameters, activations, mib("budget"), mib("predicted"), mib("measured"), replayed, equal, note]


def line_of(row: dict[str, Any]) -> str:
    name, parameters, *numbers, replayed, equal, note = cells(row)
    return f"{name:28} {parameters:>9} " + " ".join(f"{n:>8}" for n in numbers) + f" {replayed:>12} {equal:4} {note}"[:170]


def summary(rows: list[dict[str, Any]]) -> str:
    count: dict[str, int] = {}
    for row in rows:
        count[row["status"]] = count.get(row["status"], 0) + 1
    planned = count.get("planned", 0)
    parts = ", ".join(f"{n} {status}" for status, n in sorted(count.items(), key=lambda c: -c[1]))
    return f"{len(rows)} architectures: {parts}; {100 * planned / max(1, len(rows)):.0f} % planned, equal and within the budget"


def page(rows: list[dict[str, Any]]) -> str:
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
        "numpy's and Python's generators at the end are bit-equal to the unmodified run's. *Measured*: the highest of the "
        "planned steps, by the allocator. MiB.",
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
        work()
        return
    wanted = args.names or list(ZOO)
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in wanted:
        names.put(name)
    found: dict[str, dict[str, Any]] = {}
    workers = [Worker(names, found) for _ in range(args.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "architectures.json"
    if args.names and path.exists():  # a part of the sweep: the other rows stay
        found = {row["name"]: row for row in json.loads(path.read_text())["architectures"]} | found
    rows = [found[name] for name in ZOO if name in found]
    results = {"torch": torch.__version__, "transformers": _version(), "share": SHARE, "architectures": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    if args.docs is not None:
        args.docs.write_text(page(rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
