"""The frontier of recomputation, executed: ours beside stock tools, on the same model in the same run.

    python benchmarks/frontier.py [gpt2] [llama] [resnet50] [--rounds 15] [--compile]

Per point: peak of the step by the allocator (MiB above resident), extra FLOPs, rebuilt bytes, median of paired and interleaved
step-time ratios against the unmodified step, and whether loss, gradients, buffers and the generator's state are bit-equal to
those of the unmodified step. Writes benchmarks/results/frontier.json and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.models import MODELS
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.runtime import PlannedEngine, Program
from lightning_memopt.session import costs
from lightning_memopt.session.observation import Observation, smoothed
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers import planner
from lightning_memopt.trace import metered_cpu

SHARES = (0.8, 0.6, 0.4, 0.25, 0.15)
MIB = 2**20


class _Bytes(TorchDispatchMode):
    """Bytes of all new storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inside = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in inside:
                self.nbytes += t.untyped_storage().nbytes()
        return out


class Bench:
    """One model, one batch, and what is run on it."""

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, self.batch, self.blocks = MODELS[name]()
        self.buffers = {n: b.clone() for n, b in self.model.named_buffers()}

    def step(self, forward: Callable[[], Any] | None = None) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for n, b in self.model.named_buffers():
                b.copy_(self.buffers[n])
        torch.manual_seed(3)
        loss = (forward or self.forward)()
        loss.backward()
        return loss.detach()

    def forward(self) -> torch.Tensor:
        return self.model(**self.batch).loss

    def planned(self, program: Program) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            engine = PlannedEngine(program)
            with PlannedRecording(engine, self.model):
                return self.forward()

        return forward

    @contextlib.contextmanager
    def per_block(self) -> Iterator[None]:
        blocks = self.blocks(self.model)
        originals = [type(b).forward for b in blocks]
        for block, original in zip(blocks, originals, strict=True):
            block.forward = lambda *a, _b=block, _f=original, **k: checkpoint(_f, _b, *a, use_reentrant=False, **k)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    def observe(self, steps: int = 3) -> Any:
        graphs = []
        for i in range(steps):
            self.model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            observation = Observation(self.model, [], self.device, None, verify=i == 0, meter=i == steps - 1)
            with observation.begin_round(self.batch):
                loss = self.forward()
            observation.forward_ended()
            loss.backward()
            del loss
            graphs.append(observation.finish())
        if observation.opaque_ops:
            print("  opaque:", observation.opaque_ops)
        return smoothed(graphs)

    def outcome(self) -> tuple[list[Any], torch.Tensor]:
        values = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return values + [b.clone() for b in self.model.buffers()], torch.get_rng_state()

    def peak(self, forward: Callable[[], Any] | None = None) -> float:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with metered_cpu() as events:
            self.step(forward)
        return events.peak_nbytes / MIB


def _equal(a: tuple[list[Any], torch.Tensor], b: tuple[list[Any], torch.Tensor]) -> bool:
    same = all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a[0], b[0], strict=True))
    return same and torch.equal(a[1], b[1])


def _compiled(bench: Bench, budget: float) -> tuple[Callable[[], Any], dict[str, int]]:
    """torch's activation_memory_budget under AOTAutograd with the min-cut partitioner; counts its FLOPs while "counting"."""
    import torch._functorch.config as config
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    flops = {"total": 0, "counting": 0}

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def counted(*args: Any) -> Any:
            if not flops["counting"]:
                return gm.forward(*args)
            with FlopCounterMode(display=False) as counter:
                out = gm.forward(*args)
            flops["total"] += counter.get_total_flops()
            return out

        return make_boxed_func(counted)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    model = torch.compile(bench.model, backend=backend)

    def forward() -> Any:
        with config.patch(activation_memory_budget=budget):
            return model(**bench.batch).loss

    return forward, flops


def run(name: str, rounds: int, with_compile: bool) -> dict[str, Any]:
    bench = Bench(name)
    bench.step()
    bench.step()
    loss, reference = bench.step(), bench.outcome()
    with FlopCounterMode(display=False) as counter:
        bench.step()
    flops = counter.get_total_flops()
    with _Bytes() as made:
        bench.step()
    unmodified = bench.peak()
    graph = bench.observe()
    overhead = lambda lives: costs.measured().of(Program(graph, lives))  # noqa: E731
    frontier = planner.solve(graph, overhead=overhead)
    fewest_flops = planner.solve(graph, objective="flops", overhead=overhead)
    resident = resident_nbytes(graph)
    activations = frontier.unmodified_peak_bytes - resident
    share = activations / frontier.unmodified_peak_bytes
    print(
        f"\n{name}: unmodified {unmodified:.1f} MiB above resident ({100 * share:.0f} % of the peak), {len(graph.ops)} ops, "
        f"{len(frontier.candidates)} plans in {frontier.seconds:.1f} s"
    )
    points: dict[str, dict[str, Any]] = {
        "unmodified": {"peak_mib": unmodified, "extra_flops": 0.0, "rebuilt_mib": 0.0, "equal": True}
    }
    forwards: dict[str, Callable[[], Any] | None] = {"unmodified": None}
    contexts: dict[str, Callable[[], Any]] = {}
    with bench.per_block():
        bench.step()
        with FlopCounterMode(display=False) as counter:
            bench.step()
        with _Bytes() as block_made:
            bench.step()
        bench.step()
        points["per block"] = {
            "peak_mib": bench.peak(),
            "extra_flops": counter.get_total_flops() / flops - 1,
            "rebuilt_mib": (block_made.nbytes - made.nbytes) / MIB,
            "equal": _equal(reference, bench.outcome()),
        }
    contexts["per block"] = bench.per_block
    forwards["per block"] = None
    at_block = int(resident + points["per block"]["peak_mib"] * MIB)
    budgets = [(f"ours f={f}", frontier, int(resident + f * activations)) for f in SHARES]
    budgets.append(("ours smallest", frontier, frontier.smallest_bytes))
    budgets.append(("ours at per-block peak", frontier, at_block))
    budgets += [(f"fewest FLOPs f={f}", fewest_flops, int(resident + f * activations)) for f in SHARES]
    budgets.append(("fewest FLOPs at per-block peak", fewest_flops, at_block))
    for label, plans, budget in budgets:
        try:
            plan = plans.plan(budget)
        except InfeasibleError as error:
            points[label] = {"infeasible": True, "smallest_mib": (error.smallest_nbytes - resident) / MIB}
            continue
        program = Program(graph, plan.lives)
        forward = bench.planned(program)
        got = bench.step(forward)
        equal = torch.equal(loss, got) and _equal(reference, bench.outcome())
        points[label] = {
            "budget_mib": (budget - resident) / MIB,
            "predicted_mib": (plan.predicted_peak_bytes - resident) / MIB,
            "peak_mib": bench.peak(forward),
            "equal": equal,
            "extra_flops": plan.predicted.extra_flops / flops,
            "rebuilt_mib": plan.predicted.rebuilt_bytes / MIB,
            "predicted_ratio": 1 + plan.predicted.seconds / graph.step_seconds,
            "bound_ratio": 1 + plan.lower_bound_seconds / graph.step_seconds,
            "solver": plan.solver,
            "within_budget": None,
            "prediction_error": None,
        }
        point = points[label]
        point["within_budget"] = point["peak_mib"] <= point["budget_mib"]
        point["prediction_error"] = (point["peak_mib"] + resident / MIB) / (point["predicted_mib"] + resident / MIB) - 1
        forwards[label] = forward
    if with_compile:
        for budget in (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0):
            label = f"torch budget {budget}"
            forward, counted = _compiled(bench, budget)
            try:
                bench.step(forward)
                counted["counting"] = 1
                bench.step(forward)
                counted["counting"] = 0
                values, generator = (bench.step(forward), bench.outcome())[1]
                points[label] = {
                    "peak_mib": bench.peak(forward),
                    "extra_flops": counted["total"] / flops - 1,
                    "equal": _equal((reference[0], generator), (values, generator)),
                    "generator_equal": torch.equal(reference[1], generator),
                }
                ratios = _times(bench, {"unmodified": None, label: forward}, {}, rounds)
                points[label] |= ratios[label]
            except Exception as error:  # a peer that fails is a result too
                points[label] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    for label, measured in _times(bench, forwards, contexts, rounds).items():
        points[label] |= measured
    for label, point in points.items():
        print(f"  {label:24} " + "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in point.items()))
    rows = [
        {
            "peak_mib": (c.predicted.peak_bytes - resident) / MIB,
            "extra_flops": c.predicted.extra_flops / flops,
            "extra_ratio": c.predicted.seconds / graph.step_seconds,
        }
        for c in frontier.candidates
    ]
    for_flops = [((c.predicted.peak_bytes - resident) / MIB, c.predicted.extra_flops / flops) for c in fewest_flops.candidates]
    return {
        "resident_mib": resident / MIB,
        "activation_share": share,
        "step_flops": flops,
        "points": points,
        "frontier": rows,
        "frontier_for_flops": for_flops,
        "solve_seconds": frontier.seconds,
        "ops": len(graph.ops),
    }


def _times(bench: Bench, forwards: dict[str, Any], contexts: dict[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of the ratios to the unmodified step of the same round: wall clock, and CPU time of the process.

    On a machine with neighbours the second is the steadier one.
    """
    ratios: dict[str, list[tuple[float, float]]] = {label: [] for label in forwards}
    for _ in range(rounds):
        took = {}
        for label, forward in forwards.items():
            with contexts.get(label, contextlib.nullcontext)():
                wall, cpu = time.perf_counter(), time.process_time()
                bench.step(forward)
                took[label] = time.perf_counter() - wall, time.process_time() - cpu
        for label, (wall, cpu) in took.items():
            ratios[label].append((wall / took["unmodified"][0], cpu / took["unmodified"][1]))
    return {
        label: {"time_ratio": statistics.median(w for w, _ in values), "cpu_ratio": statistics.median(c for _, c in values)}
        for label, values in ratios.items()
    }


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(results), figsize=(5.2 * len(results), 8), squeeze=False)
    for column, (name, result) in enumerate(results.items()):
        for row, (key, label) in enumerate(
            (("time_ratio", "step time / unmodified"), ("extra_flops", "extra FLOPs / step FLOPs"))
        ):
            ax = axes[row][column]
            groups = {"ours": "o-", "fewest FLOPs": "v:", "per block": "s", "torch budget": "^", "unmodified": "k*"}
            for group, style in groups.items():
                xy = sorted((p["peak_mib"], p[key]) for n, p in result["points"].items() if n.startswith(group) and key in p)
                if xy:
                    ax.plot(*zip(*xy, strict=True), style, label=group)
            ax.set(title=name, xlabel="peak above resident (MiB), measured", ylabel=label)
            ax.grid(alpha=0.3)
            ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also torch's activation_memory_budget (slow to compile)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    args.out.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, args.rounds, args.compile) for name in args.models or list(MODELS)}
    (args.out / "frontier.json").write_text(json.dumps({"torch": torch.__version__, "models": results}, indent=1) + "\n")
    plot(results, args.out / "frontier.png")


if __name__ == "__main__":
    main()
