"""Replay on a GPU, beside stock tools, on the same model in the same run: frontier, step time, overhead, predicted memory.

    python benchmarks/gpu.py replay [NAME ...] [--seconds 400] [--no-compile] [--smoke]

Per plan: peak of allocated and of reserved bytes, measured and predicted; median of interleaved step-time ratios to the
unmodified step, predicted and measured (CUDA events); what recording costs the host per op of the forward; whether loss,
gradients, buffers and the generator's state have the bits of the unmodified step. Beside it per-block checkpointing and torch's
activation_memory_budget. The time is shared out among the models; what does not fit in is left out, with the reason. Writes
gpu_replay.json to $OUT, else to benchmarks/results. `--smoke`: tiny models on the CPU, the same code.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins: matrix products in the same order every time

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import torch_budget
from benchmarks.bench import MIB, Bench
from benchmarks.gpu_models import MODELS, SMOKE, Build
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import resident_nbytes, unmodified_levels
from lightning_memopt.plan import reserved
from lightning_memopt.runtime import Program
from lightning_memopt.session import costs
from lightning_memopt.solvers import planner
from lightning_memopt.trace import metered_cpu

SHARES = (0.7, 0.5, 0.3)
COMPILED = (0.5, 0.2)
_RUNS = 5


class OutOfTime(Exception):
    """The model's share of the time is used up."""


class GpuBench(Bench):
    """A model on a device, one batch, and what is run on it."""

    def __init__(self, name: str, build: Build, device: torch.device) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.model, self.batch, self.blocks = build(device)
        self.buffers = {n: b.clone() for n, b in self.model.named_buffers()}

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def outcome(self) -> tuple[list[Any], torch.Tensor]:
        """Gradients and buffers, on the host, and the generator's state."""
        values = [None if p.grad is None else p.grad.cpu() for p in self.model.parameters()]
        state = torch.cuda.get_rng_state(self.device) if self.on_gpu else torch.get_rng_state()
        return values + [b.cpu() for b in self.model.buffers()], state

    def equal(self, reference: tuple[list[Any], torch.Tensor]) -> bool:
        """Whether the last step left the bits of `reference`. Tensors are brought to the device one at a time."""
        now = [p.grad for p in self.model.parameters()] + list(self.model.buffers())
        state = torch.cuda.get_rng_state(self.device) if self.on_gpu else torch.get_rng_state()
        same = all(
            a is b if a is None or b is None else torch.equal(a.to(self.device), b)
            for a, b in zip(reference[0], now, strict=True)
        )
        return same and torch.equal(reference[1], state)

    def peaks(self, forward: Callable[[], Any] | None = None) -> dict[str, float]:
        """MiB at the peak of a step whose predecessor was the same: allocated, and reserved on a GPU."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if not self.on_gpu:
            params = sum(t.untyped_storage().nbytes() for t in [*self.model.parameters(), *self.model.buffers()])
            params += sum(t.untyped_storage().nbytes() for t in {id(t): t for t in self.batch.values()}.values())
            with metered_cpu() as events:
                self.step(forward)
            return {"allocated_mib": (params + events.peak_nbytes) / MIB}
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(2):
            self.step(forward)
        self.synchronize()
        found = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return {"allocated_mib": found[0] / MIB, "reserved_mib": found[1] / MIB}

    def seconds(self, forward: Callable[[], Any] | None) -> tuple[float, float]:
        """Of one step on the device, and of its forward on the host, which does not wait for the device."""
        took = [0.0]

        def timed() -> Any:
            began = time.perf_counter()
            loss = (forward or self.forward)()
            took[0] = time.perf_counter() - began
            return loss

        self.synchronize()
        if not self.on_gpu:
            began = time.perf_counter()
            self.step(timed)
            return time.perf_counter() - began, took[0]
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        self.step(timed)
        events[1].record()
        self.synchronize()
        return 1e-3 * events[0].elapsed_time(events[1]), took[0]


def run(name: str, build: Build, device: torch.device, seconds: float, rounds: int, with_compile: bool) -> dict[str, Any]:
    """One model within its share of the time; what was reached when that ended is reported."""
    deadline = time.perf_counter() + seconds
    result: dict[str, Any] = {"rows": {}}
    try:
        _run(GpuBench(name, build, device), result, deadline, rounds, with_compile)
    except OutOfTime as late:
        result["left_out"] = f"{late}: the model's share of {seconds:.0f} s was used up"
    except ImportError as error:
        result["left_out"] = f"{error}"
    except torch.OutOfMemoryError as error:
        result["left_out"] = str(error).splitlines()[0]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _run(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int, with_compile: bool) -> None:
    def in_time(what: str) -> None:
        if time.perf_counter() > deadline:
            raise OutOfTime(what)

    rows = result["rows"]
    bench.step()
    loss, reference = bench.step(), bench.outcome()
    again = bench.step()
    rows["unmodified"] = bench.peaks() | {"equal": torch.equal(loss, again) and bench.equal(reference)}
    in_time("observing")
    graph = bench.observe(steps=2)
    measured = costs.measured(graph.device)
    frontier = planner.solve(
        graph, limit_seconds=min(20.0, seconds_left(deadline) / 3), overhead=lambda lives: measured.of(Program(graph, lives))
    )
    resident = resident_nbytes(graph)
    top = frontier.unmodified_peak_bytes
    if frontier.reserve is not None:
        top = frontier.reserve(frontier.candidates[-1].lives)
    result |= {
        "ops": len(graph.ops),
        "plans": len(frontier.candidates),
        "solve_seconds": frontier.seconds,
        "resident_mib": resident / MIB,
        "ops_seconds": graph.step_seconds,
        "predicted_unmodified_mib": max(unmodified_levels(graph)) / MIB,
        "frontier": [(c.predicted.peak_bytes / MIB, c.predicted.seconds / graph.step_seconds) for c in frontier.candidates],
    }
    forwards: dict[str, Callable[[], Any] | None] = {"unmodified": None}
    contexts: dict[str, Callable[[], Any]] = {}
    for label, budget in [(f"ours f={f}", int(resident + f * (top - resident))) for f in SHARES] + [("ours smallest", 0)]:
        in_time(label)
        rows[label] = row = {"budget_mib": (budget or frontier.smallest_bytes) / MIB}
        try:
            plan = frontier.plan(budget or frontier.smallest_bytes)
        except InfeasibleError as error:
            row["smallest_mib"] = (error.smallest_nbytes or 0) / MIB
            continue
        forwards[label] = forward = bench.planned(Program(graph, plan.lives))
        bench.step(forward)
        got = bench.step(forward)
        row["equal"] = torch.equal(loss, got) and bench.equal(reference)
        row |= bench.peaks(forward)
        predicted = reserved(graph, plan.lives) if bench.on_gpu else None
        row["predicted_allocated_mib"] = (predicted.allocated_bytes if predicted else plan.predicted.peak_bytes) / MIB
        row["predicted_reserved_mib"] = plan.predicted.reserved_bytes / MIB
        row["within_budget"] = row.get("reserved_mib", row["allocated_mib"]) <= row["budget_mib"]
        row["predicted_ratio"] = 1 + plan.predicted.seconds / graph.step_seconds
        row["replayed_ops"] = plan.predicted.replayed_ops
        row["extra_flops"] = plan.predicted.extra_flops / max(1, sum(op.flops for op in graph.ops))
    in_time("per block")
    with bench.per_block():
        bench.step()
        bench.step()
        rows["per block"] = {"equal": bench.equal(reference)} | bench.peaks()
    forwards["per block"], contexts["per block"] = None, bench.per_block
    ops = len(graph.forward)
    _times(bench, rows, forwards, contexts, rounds, ops, deadline)
    for budget in COMPILED if with_compile else ():
        label = f"torch budget {budget}"
        in_time(label)
        try:
            forward, _ = torch_budget.compiled(bench, budget)  # forgets what was compiled before, so it is timed at once
            bench.step(forward)
            bench.step(forward)
            rows[label] = {"equal": bench.equal(reference)} | bench.peaks(forward)
            _times(bench, rows, {"unmodified": None, label: forward}, {}, rounds, ops, deadline)
        except Exception as error:  # a peer that fails is a result too
            rows[label] = {"failed": f"{type(error).__name__}: {error}"[:160]}


def seconds_left(deadline: float) -> float:
    return max(1.0, deadline - time.perf_counter())


def _times(
    bench: GpuBench,
    rows: dict[str, Any],
    forwards: dict[str, Callable[[], Any] | None],
    contexts: dict[str, Callable[[], Any]],
    rounds: int,
    ops: int,
    deadline: float,
) -> None:
    """Medians over interleaved rounds: ratios to the unmodified step of the same round, and the host's time per forward op
    above its. At least one round is run."""
    ratios: dict[str, list[float]] = {label: [] for label in forwards}
    hosts: dict[str, list[float]] = {label: [] for label in forwards}
    for turn in range(rounds):
        if turn and time.perf_counter() > deadline:
            break
        took: dict[str, tuple[float, float]] = {}
        for label, forward in forwards.items():
            with contexts.get(label, contextlib.nullcontext)():
                took[label] = bench.seconds(forward)
        for label, (device, host) in took.items():
            ratios[label].append(device / took["unmodified"][0])
            hosts[label].append((host - took["unmodified"][1]) / ops)
        rows["unmodified"]["step_seconds"] = took["unmodified"][0]
    for label in forwards:
        rows[label]["time_ratio"] = statistics.median(ratios[label])
        rows[label]["host_us_per_op"] = 1e6 * statistics.median(hosts[label])
        rows[label]["rounds"] = len(ratios[label])


_COLUMNS = {
    "budget": "budget_mib",
    "alloc": "allocated_mib",
    "pred.": "predicted_allocated_mib",
    "reserved": "reserved_mib",
    "pred. ": "predicted_reserved_mib",
    "time": "time_ratio",
    "pred.  ": "predicted_ratio",
    "us/op": "host_us_per_op",
}


def table(results: dict[str, Any]) -> str:
    """One line a row, in MiB, ratios and microseconds."""
    lines = [f"{'model':14}{'':18}" + "".join(f"{name.strip():>10}" for name in _COLUMNS) + "  equal"]
    for model, result in results.items():
        for label, row in result["rows"].items():
            cells = ""
            for key in _COLUMNS.values():
                value = row.get(key)
                digits = 2 if key.endswith(("ratio", "op")) else 0 if (value or 0) >= 1000 else 1
                shown = value is not None and (value or key == "host_us_per_op")
                cells += f"{value:>10.{digits}f}" if shown else f"{'':>10}"
            note = "" if "equal" not in row else "  yes" if row["equal"] else "  NO"
            note += "" if row.get("within_budget", True) else "  ABOVE THE BUDGET"
            note += f"  failed: {row['failed']}" if "failed" in row else ""
            note += f"  refused: smallest {row['smallest_mib']:.1f}" if "smallest_mib" in row else ""
            lines.append(f"{model:14}{label:18}{cells}{note}")
        if "left_out" in result:
            lines.append(f"{model:14}left out: {result['left_out']}")
    return "\n".join(lines)


def replay(names: list[str], smoke: bool, seconds: float, rounds: int, with_compile: bool) -> dict[str, Any]:
    """All models, each within an equal share of the time that is left."""
    device = torch.device("cpu") if smoke else torch.device("cuda", 0)
    models = SMOKE if smoke else MODELS
    chosen = names or list(models)
    end = time.perf_counter() + seconds
    results: dict[str, Any] = {}
    for i, name in enumerate(chosen):
        share = (end - time.perf_counter()) / (len(chosen) - i)
        results[name] = run(name, models[name], device, share, rounds, with_compile)
        print(f"{name}: {results[name].get('left_out', 'done')}", flush=True)
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["replay"])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--seconds", type=float, default=400.0, help="for all models together")
    parser.add_argument("--rounds", type=int, default=_RUNS)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_intermixed_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: there is no CUDA device here; --smoke runs the same code on the CPU")
    unknown = set(args.names) - set(SMOKE if args.smoke else MODELS)
    if unknown:
        sys.exit(f"benchmarks/gpu.py: unknown {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        results = replay(args.names, args.smoke, args.seconds, args.rounds, args.compile)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
    out = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name(0) if not args.smoke else "cpu"
    report = {"torch": torch.__version__, "device": where, "smoke": args.smoke, "models": results}
    path = out / ("gpu_replay_smoke.json" if args.smoke else "gpu_replay.json")
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
