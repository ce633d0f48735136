"""The planned pool, executed: steps of ten models within a budget, served from one arena: `python -m benchmarks pool`.

    python -m benchmarks pool [NAME...] [--rounds N]     # writes benchmarks/results/pool.json
    python -m benchmarks pool --long                     # 500 steps: does memory grow?
    python -m benchmarks pool --process [NAME...]        # the resident memory of the process, with and without (Linux)
    python -m benchmarks pool --crossing [NAME...]       # gradients live through the next forward, as in Lightning
    python -m benchmarks pool --table                    # what is recorded, as Markdown

Two copies of a model train within the same budget, with the same plan and the same seeds: one in the planned pool, one with the
ordinary allocator. After every step their losses, and at the end their weights and the generator, are compared bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import counter, pool
from lightning_memopt.runtime.pool import PoolStatus
from lightning_memopt.trace.living import count_all

NAMES = ("gpt2", "llama", "bert", "vit", "t5", "whisper", "resnet50", "inception", "mixtral", "nmt")
SHARE = 0.5
"""The budget: so far from the smallest plan to the unmodified step."""
STEPS = 4
"""Steps of a round that are timed. One more, before them, makes the arena and is not."""
KINDS = ("pool", "ordinary", "trimmed")
MIB = 2**20
FILE = RESULTS / "pool.json"


class Training:
    """A model that trains on one batch. `plan`: a file; None: the step is observed and planned. `crossing`: gradients are freed
    between the next forward and its backward, not after the update.
    """

    def __init__(self, name: str, budget: int | str, plan: str | None, in_pool: bool, crossing: bool = False) -> None:
        self.crossing = crossing
        torch.manual_seed(0)
        self.model, self.batch, _ = MODELS[name]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.steps = 0
        self._opened = optimize(
            self.model, self.optimizer, budget=budget, plan=plan, pool="planned" if in_pool else None, verbose=False
        )
        self.run: Run = self._opened.__enter__()

    def step(self) -> torch.Tensor:
        torch.manual_seed(self.steps)
        self.steps += 1
        loss: torch.Tensor = self.model(**self.batch).loss
        if self.crossing:
            self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if not self.crossing:
            self.optimizer.zero_grad()
        return loss.detach().clone()

    def timed(self, steps: int) -> tuple[float, float]:
        """Seconds and CPU seconds of a step, after one that is not timed."""
        self.step()
        took = []
        for _ in range(steps):
            wall, cpu = time.perf_counter(), time.process_time()
            self.step()
            took.append((time.perf_counter() - wall, time.process_time() - cpu))
        return statistics.median(w for w, _ in took), statistics.median(c for _, c in took)

    def rests(self) -> None:
        """Another one trains now, whose requests are not requests of this one's step."""
        self.run.session.pool.rests()

    def pool(self) -> PoolStatus:
        status = self.run.status().pool
        assert status is not None
        return status

    def state(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in self.model.state_dict().values()]

    def close(self) -> None:
        self._opened.__exit__(None, None, None)


def planned(name: str, folder: str, crossing: bool = False) -> tuple[str, int, int]:
    """A plan file for the budget; the budget and the unmodified peak in bytes."""
    training = Training(name, "100%", None, False, crossing)
    while training.run.plan is None:
        training.step()
    frontier, plan = training.run.status().frontier, training.run.plan
    assert frontier is not None
    least, most = frontier.smallest_nbytes, plan.unmodified_peak_nbytes
    training.close()
    budget = int(least + SHARE * (most - least))
    held = counter().live_nbytes  # type: ignore[union-attr]
    training = Training(name, budget, None, False, crossing)
    while training.run.plan is None:
        training.step()
    path = os.path.join(folder, f"{name}.json")
    training.run.save_plan(path)
    training.close()
    return path, budget + held, most


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One row: the arena, what is outside, what fell through, bits and time."""
    count_all(print)
    with tempfile.TemporaryDirectory() as folder:
        path, budget, unmodified = planned(name, folder)
        gc.collect()
        pair = {kind: Training(name, "100%", path, kind == "pool") for kind in ("pool", "ordinary")}
    in_pool = pair["pool"]
    losses: dict[str, list[torch.Tensor]] = {}
    for kind, training in pair.items():
        losses[kind] = [training.step() for _ in range(6)]
        training.rests()
    equal = all(torch.equal(a, b) for a, b in zip(*losses.values(), strict=True))
    outside = _outside(in_pool)
    in_pool.rests()
    while pair["ordinary"].steps < in_pool.steps:
        pair["ordinary"].step()
    ratios = []
    for _ in range(rounds):
        took = {}
        for kind, training in pair.items():
            took[kind] = training.timed(STEPS)
            training.rests()
        ratios.append([p / o for p, o in zip(took["pool"], took["ordinary"], strict=True)])
    equal = equal and all(torch.equal(a, b) for a, b in zip(in_pool.state(), pair["ordinary"].state(), strict=True))
    status = in_pool.pool()
    if status.addresses is None:
        raise SystemExit(f"{name}: no planned pool: {status.reason}")
    row = {
        "model": name,
        "budget_MiB": round(budget / MIB, 1),
        "unmodified_MiB": round(unmodified / MIB, 1),
        "requests": len(status.addresses.nbytes),
        "with_address": status.addresses.planned,
        "arena_MiB": round(status.addresses.arena_nbytes / MIB, 3),
        "max_live_MiB": round(status.addresses.max_live_nbytes / MIB, 3),
        "fragmentation_percent": round(100 * status.addresses.fragmentation, 4),
        "outside_MiB": round(outside / MIB, 3),
        "steps": status.steps,
        "fallen": status.total.fallen,
        "deviating_steps": status.deviating,
        "equal_bits": equal,
        "time_ratio": round(statistics.median(wall for wall, _ in ratios), 3),
        "cpu_ratio": round(statistics.median(cpu for _, cpu in ratios), 3),
        "rounds": rounds,
    }
    for training in pair.values():
        training.close()
    return row


def _outside(training: Training) -> int:
    """The most bytes that a step in the arena has outside of it, beyond those from before the step, by the native meter: of
    three steps.
    """
    counts, native = counter(), pool()
    assert counts is not None and native is not None
    window = counts.window(outside=True)
    assert window is not None
    rises = []
    while len(rises) < 3:
        began = window.reset()
        training.step()
        if native.arenas_nbytes()[0]:  # else the step was logged
            rises.append(window.peak_nbytes - began)
    window.close()
    return max(rises)


def crossing(name: str) -> dict[str, Any]:
    """A row: the arena where gradients live through the next forward, and all memory of the process beside the budget."""
    count_all(print)
    with tempfile.TemporaryDirectory() as folder:
        path, budget, _ = planned(name, folder, crossing=True)
        gc.collect()
        training = Training(name, budget, path, True, crossing=True)
    for _ in range(10):
        training.step()
    status = training.pool()
    training.close()
    if status.addresses is None:
        raise SystemExit(f"{name}: no planned pool: {status.reason}")
    return {
        "model": name,
        "with_address": status.addresses.planned,
        "arena_MiB": round(status.addresses.arena_nbytes / MIB, 3),
        "fragmentation_percent": round(100 * status.addresses.fragmentation, 4),
        "fallen": status.total.fallen,
        "steps": status.steps,
        "reserved_MiB": round(status.reserved_nbytes / MIB, 2),
        "budget_MiB": round(budget / MIB, 2),
    }


def long(name: str = "inception", steps: int = 500) -> dict[str, Any]:
    """Live bytes, bytes in arenas and resident pages of the process, early and late."""
    count_all(print)
    training = Training(name, "100%", None, in_pool=True)
    seen = []
    for step in range(steps):
        training.step()
        if step + 1 in (20, steps):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            seen.append({"step": step + 1, "live": counter().live_nbytes, "arenas": pool().arenas_nbytes()[0], "rss": pages})  # type: ignore[union-attr]
    status = training.pool()
    training.close()
    return {"model": name, "seen": seen, "fallen": status.total.fallen, "steps": status.steps}


def resident(name: str, kind: str) -> float:
    """MiB by which the resident memory of this process rises in four steps above what it was before the model was built."""
    count_all(print)
    before = _of_process("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        training = Training(name, "100%", planned(name, folder)[0], kind == "pool")
    gc.collect()
    for _ in range(6):
        training.step()
    if kind == "trimmed":
        ctypes.CDLL(None).malloc_trim(0)  # as the pool does when it makes its arena
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(4):
        training.step()
    assert kind != "pool" or training.pool().last.served, training.pool().reason
    return _of_process("VmHWM") - before


def _of_process(figure: str) -> float:
    """A figure of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(figure))


def processes(name: str) -> dict[str, Any]:
    """A row: `resident` in a process with the pool, in one without, and in one without that gives back what it does not use."""
    row: dict[str, Any] = {"model": name}
    for kind in KINDS:
        child = [sys.executable, "-m", "benchmarks.placement.pool", "--child", kind, name]
        row[kind] = round(float(subprocess.run(child, check=True, capture_output=True, text=True).stdout.split()[-1]), 1)
    return row


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown."""
    head = ("model", "requests", "with an address", "arena, MiB", "max-live", "fragmentation, %", "outside, MiB")
    head += ("fell through", "of steps", "bits", "time", "CPU time")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in results["models"].values():
        cells = [
            row["model"], row["requests"], row["with_address"], row["arena_MiB"], row["max_live_MiB"],
            row["fragmentation_percent"], row["outside_MiB"], row["fallen"], row["steps"],
            "equal" if row["equal_bits"] else "DIFFER", f"x{row['time_ratio']:.3f}", f"x{row['cpu_ratio']:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| model | in the pool, MiB | without | without, trimmed |", "|---|---|---|---|"]
    for row in results.get("processes", {}).values():
        lines.append(f"| {row['model']} | {' | '.join(str(row[kind]) for kind in KINDS)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="default: ten of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", action="store_true", help="500 steps of one model")
    parser.add_argument("--crossing", action="store_true", help="gradients live through the next forward")
    parser.add_argument("--process", action="store_true", help="resident memory of processes with and without the pool")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results = json.loads(FILE.read_text()) if FILE.exists() else {"models": {}}
    torch.set_num_threads(1)
    if args.child:
        print(resident(args.models[0], args.child))
        return 0
    if args.crossing:
        for name in args.models or ("bert", "resnet50"):
            results.setdefault("crossing", {})[name] = row = crossing(name)
            print(row, flush=True)
    elif args.process:
        for name in args.models or ("whisper", "bert", "resnet50", "nmt"):
            results.setdefault("processes", {})[name] = row = processes(name)
            print(row, flush=True)
    elif args.long:
        results["long"] = long()
        print(results["long"])
    elif not args.table:
        for name in args.models or NAMES:
            results["models"][name] = row = measured(name, args.rounds)
            print(row, flush=True)
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    FILE.write_text(json.dumps(results, indent=1) + "\n")
    if args.table:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
