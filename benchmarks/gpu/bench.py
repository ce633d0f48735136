"""What the benchmarks of `python -m benchmarks gpu` share: a model on a device, its deadline, interleaved times, a table."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.lib.bench import MIB, Bench, held_nbytes
from benchmarks.models.gpu import Build
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Machine, Plan, reserved
from lightning_memopt.runtime import install_native
from lightning_memopt.session.observe import costs
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.planner import Frontier
from lightning_memopt.trace import metered_cpu


class OutOfTime(Exception):
    """The time for the model is used up."""


class GpuBench(Bench):
    """A model on a device, one batch, and what is run on it."""

    def __init__(self, name: str, build: Build, device: torch.device) -> None:
        install_native(print)
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
            before = held_nbytes() or params
            with metered_cpu() as events:
                self.step(forward)
            return {"allocated_mib": (before + events.peak_nbytes) / MIB}
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


Body = Callable[[GpuBench, dict[str, Any], float, int], None]
"""What a benchmark does with a model: fills the rows of a result until the deadline, in that many rounds."""
Write = Callable[[dict[str, Any]], None]


class Rows(dict[str, Any]):
    """Rows by their labels. `write` is told of those there are whenever another one begins."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def __setitem__(self, label: str, row: dict[str, Any]) -> None:
        if self and label not in self:
            self._write({"rows": self})
        super().__setitem__(label, row)


def run(
    name: str, build: Build, device: torch.device, seconds: float, rounds: int, body: Body, write: Write = lambda _: None
) -> dict[str, Any]:
    """One model within its time; what was reached when that ended is reported. `write`: see `Rows`."""
    deadline = time.perf_counter() + seconds
    result: dict[str, Any] = {"rows": Rows(write)}
    try:
        body(GpuBench(name, build, device), result, deadline, rounds)
    except OutOfTime as late:
        result["left_out"] = f"{late}: the time for this model, {seconds:.0f} s, was used up"
    except ModuleNotFoundError as error:
        result["left_out"] = f"{error.name} is not installed"
    except ImportError as error:
        result["left_out"] = f"{error}"
    except torch.OutOfMemoryError as error:
        result["left_out"] = str(error).splitlines()[0]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def in_time(deadline: float, what: str) -> None:
    """Raise OutOfTime where `what` would begin too late."""
    if time.perf_counter() > deadline:
        raise OutOfTime(what)


def seconds_left(deadline: float) -> float:
    return max(1.0, deadline - time.perf_counter())


def reference(bench: GpuBench, rows: dict[str, Any]) -> tuple[torch.Tensor, tuple[list[Any], torch.Tensor]]:
    """Loss and outcome of the unmodified step, run twice; its row."""
    bench.step()
    loss, outcome = bench.step(), bench.outcome()
    again = bench.step()
    rows["unmodified"] = bench.peaks() | {"equal": torch.equal(loss, again) and bench.equal(outcome)}
    return loss, outcome


def observed(bench: GpuBench, deadline: float, budgets: Callable[[Graph], Iterable[int]]) -> tuple[Graph, Frontier]:
    """The step as it was observed, and what recomputation can do for it. `budgets`: those that plans are made for."""
    in_time(deadline, "observing")
    graph = bench.observe(steps=2)
    limit = min(20.0, seconds_left(deadline) / 3)
    return graph, planner.solve(
        graph, limit_seconds=limit, machine=Machine(overhead=costs.overhead(graph)), budgets=budgets(graph)
    )


def against(bench: GpuBench, graph: Graph, plan: Plan, budget: int, row: dict[str, Any]) -> None:
    """What a plan was predicted to do, and whether the peaks in its row keep the budget."""
    predicted = reserved(graph, plan.lives) if bench.on_gpu else None
    row["predicted_allocated_mib"] = (predicted.allocated_nbytes if predicted else plan.predicted.peak_nbytes) / MIB
    row["predicted_reserved_mib"] = plan.predicted.reserved_nbytes / MIB
    row["within_budget"] = row.get("reserved_mib", row["allocated_mib"]) <= budget / MIB
    row["predicted_ratio"] = 1 + plan.predicted.seconds / graph.step_seconds
    row["replayed_ops"] = plan.predicted.rebuilt_ops
    row["extra_flops"] = plan.predicted.extra_flops / max(1, sum(op.flops for op in graph.ops))


def times(
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


def table(results: dict[str, Any], columns: dict[str, str]) -> str:
    """One line a row. `columns`: title -> key, whose ending says the unit: `_mib`, `_ratio`, `_ms`, `_share`, per op."""
    lines = [f"{'model':14}{'':25}" + "".join(f"{name.strip():>10}" for name in columns) + "  equal"]
    for model, result in results.items():
        for label, row in result["rows"].items():
            cells = ""
            for key in columns.values():
                value = row.get(key)
                whole = isinstance(value, int) or (value or 0) >= 1000
                digits = 2 if key.endswith(("ratio", "op", "share")) else 0 if whole else 1
                shown = value is not None and (value or not key.endswith("mib"))
                cells += f"{value:>10.{digits}f}" if shown else f"{'':>10}"
            note = "" if "equal" not in row else "  yes" if row["equal"] else f"  {row.get('unequal', 'NO')}"
            note += "" if row.get("within_budget", True) else "  ABOVE THE BUDGET"
            note += f"  failed: {row['failed']}" if "failed" in row else ""
            note += f"  refused: smallest {row['smallest_mib']:.1f}" if "smallest_mib" in row else ""
            lines.append(f"{model:14}{label:25}{cells}{note}".rstrip())
        if "left_out" in result:
            lines.append(f"{model:14}left out: {result['left_out']}")
    return "\n".join(lines)
