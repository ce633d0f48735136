"""Echo's evaluation (ISCA 2020, VI) on this machine: bytes, extra FLOPs and time of Baseline, Mirror, Echo and our planner.

    python -m benchmarks echo_table [nmt] [deepspeech2] [transformer] [resnet152] [--rounds 15] [--breakdown] [--depth]

Bytes are what the allocator measured above what is resident, beside the prediction. *Footprint* is the whole peak, weights
included, as in the source; factors are Baseline's over the policy's. Gradients, buffers and generator state are compared with
those of the unmodified step, bit by bit. `--breakdown` draws figs. 4, 16, 21 and 23, `--depth` makes Table IV: the deepest
model within a fixed budget. Prints its table last; writes benchmarks/results/echo_table.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lib.baselines import all_light
from benchmarks.lib.bench import MIB, Bench
from benchmarks.lib.bench import equal as same_bits
from benchmarks.lib.paths import RESULTS
from benchmarks.lib.tables import print_table
from benchmarks.models import recurrent
from benchmarks.models.registry import MODELS
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life, Machine, Prediction, simulate
from lightning_memopt.report import breakdown
from lightning_memopt.runtime import Program
from lightning_memopt.session.observe import costs
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import mirror
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.rollout import keep_all

PAPER = {"nmt": 3.13, "deepspeech2": 1.56, "transformer": 1.59, "resnet152": 2.13}
"""Echo's footprint reduction over Baseline, section I (4). Of Mirror it gives 1.35 for NMT and 2.13 / 1.57 for ResNet-152."""
_MARGIN_NBYTES = 4096
"""What a planner budget leaves free, beyond a peak that is to be kept."""
Lives = tuple[Life, ...]
Step = Callable[[], Any] | None


def layer_type(scope: str) -> str:
    """The source's layer types, by the names of our models."""
    path = scope.partition("#")[0]
    types = {
        "RNN": ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "recurrent", "norms"),
        "attention": ("attention", "key"),
        "output": ("output", "classifier"),
        "embedding": ("source", "target", "positions"),
    }
    if path.startswith(("body.", "resnet.", "convolutions")):
        leaf = path.rpartition(".")[2]
        names = {"self_attn": "attention", "multihead_attn": "attention", "convolution": "convolution", "out_proj": "attention"}
        if path.startswith("convolutions"):
            return {"0": "convolution", "3": "convolution"}.get(leaf, "norm and ReLU")
        if path.startswith("resnet."):
            return names.get(leaf, "norm and ReLU")
        return names.get(leaf, "feed-forward, norm, dropout")
    return next((t for t, starts in types.items() if path.startswith(starts)), path or "the model itself")


class Evaluation:
    """One model observed, and the plans that are compared on it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.step()
        bench.step()
        self.loss, self.reference = bench.step(), bench.outcome()
        with FlopCounterMode(display=False) as counter:
            bench.step()
        self.flops = counter.get_total_flops()
        self.graph: Graph = bench.observe(steps=2)
        self.resident = resident_nbytes(self.graph)
        self.echo = echo(self.graph)
        self.at_echo = simulate(self.graph, self.echo).predicted.peak_nbytes + _MARGIN_NBYTES
        self.frontier = planner.solve(self.graph, machine=Machine(overhead=costs.overhead(self.graph)), budgets=[self.at_echo])

    def policies(self) -> dict[str, Lives]:
        """Baseline first."""
        graph = self.graph
        policies = {"Baseline": keep_all(graph), "Mirror": mirror(graph), "all light": all_light(graph), "Echo": self.echo}
        if self.at_echo >= self.frontier.smallest_nbytes:
            policies["ours at Echo's peak"] = self.frontier.plan(self.at_echo).lives
        policies["ours, smallest"] = self.frontier.plan(self.frontier.smallest_nbytes).lives
        return policies

    def measure(self, lives: Lives) -> tuple[dict[str, Any], Step]:
        """Prediction and measurement of a plan, and how to run it again."""
        program = Program(self.graph, lives)
        forward = None if program.empty else self.bench.planned(program)
        got = self.bench.step(forward)
        equal = torch.equal(got, self.loss) and same_bits(self.reference, self.bench.outcome())
        predicted: Prediction = simulate(self.graph, lives).predicted
        kept = breakdown.saved(self.graph, lives).by(1)
        row = {
            "predicted_mib": (predicted.peak_nbytes - self.resident) / MIB,
            "measured_mib": self.bench.peak(forward),
            "held_mib": (kept["held"] + kept["there anyway"]) / MIB,
            "extra_flops": predicted.extra_flops / self.flops,
            "rebuilt_mib": predicted.rebuilt_nbytes / MIB,
            "replayed_ops": predicted.rebuilt_ops,
            "equal": equal,
        }
        return row, forward


def evaluate(name: str, rounds: int, pictures: Path | None) -> dict[str, Any]:
    """All policies on one model."""
    model = Evaluation(Bench(name))
    resident = model.resident / MIB
    print(
        f"{name}: {len(model.graph.ops)} ops, resident {resident:.1f} MiB, planned in {model.frontier.seconds:.1f} s",
        flush=True,
    )
    rows: dict[str, dict[str, Any]] = {}
    forwards: dict[str, Step] = {}
    parts = {}
    for label, lives in model.policies().items():
        rows[label], forwards[label] = model.measure(lives)
        base, row = rows["Baseline"], rows[label]
        row["footprint_factor"] = (base["measured_mib"] + resident) / (row["measured_mib"] + resident)
        row["activation_factor"] = base["measured_mib"] / row["measured_mib"]
        row["held_factor"] = base["held_mib"] / row["held_mib"] if row["held_mib"] else None
        parts[label] = breakdown.at_peak(model.graph, lives, layer_type)
        row["at_peak"] = {"by_layer": dict(parts[label].by(0)), "by_structure": dict(parts[label].by(1))}
        print(f"  {label}: {row}", flush=True)
    if rounds:
        forwards = {"unmodified": None} | {k: v for k, v in forwards.items() if k != "Baseline"}
        for label, ratios in model.bench.times(forwards, rounds, {}).items():
            rows["Baseline" if label == "unmodified" else label] |= ratios
    if pictures is not None:
        shown = {label: parts[label] for label in ("Baseline", "Mirror", "Echo", "ours, smallest")}
        for axis in (1, 0):
            print(breakdown.compared(shown, axis, f"{name}: in memory at the peak"))
        breakdown.plot(shown, pictures / f"echo_{name}.png", name)
    return {"resident_mib": resident, "ops": len(model.graph.ops), "paper_factor": PAPER.get(name), "policies": rows}


def table(results: dict[str, Any]) -> None:
    """One row for every model and policy."""
    rows = []
    for name, result in results.items():
        for label, row in result["policies"].items():
            rows.append(
                {
                    "model": name,
                    "policy": label,
                    "predicted": f"{row['predicted_mib']:.1f}",
                    "measured": f"{row['measured_mib']:.1f}",
                    "held": f"{row['held_mib']:.1f}",
                    "footprint": f"x{row['footprint_factor']:.2f}",
                    "paper": f"x{result['paper_factor']}" if label == "Echo" and result["paper_factor"] else "",
                    "activations": f"x{row['activation_factor']:.2f}",
                    "extra FLOPs": f"{100 * row['extra_flops']:.1f} %",
                    "rebuilt": f"{row['rebuilt_mib']:.1f}",
                    "bits": "equal" if row["equal"] else "DIFFER",
                    "time": f"x{row['time_ratio']:.2f}" if "time_ratio" in row else "",
                }
            )
    print_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(recurrent.MODELS))
    parser.add_argument("--rounds", type=int, default=0, help="paired, interleaved rounds of timing (default: none)")
    parser.add_argument("--breakdown", action="store_true", help="print and draw what is in memory at the peak")
    parser.add_argument("--depth", action="store_true", help="only the largest number of layers within a fixed budget")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    for name, build in (recurrent.MODELS | recurrent.FUSED).items():
        MODELS.setdefault(name, build)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "echo_table.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found["torch"] = torch.__version__
    if args.depth:
        from benchmarks.papers.echo_depth import deepest, print_depths

        found["depth"] = deepest()
        print_depths(found["depth"])
    else:
        results = found.setdefault("models", {})
        for name in args.models or list(recurrent.MODELS):
            results[name] = evaluate(name, args.rounds, args.out if args.breakdown else None)
            gc.collect()
        table(results)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
