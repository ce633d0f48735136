"""The joint planner beside everything it may do alone: recomputation, offload, compression, and the policies of the sources.

    python -m benchmarks joint [--profile NAME] [--seconds 30] [--traces DIR] [--only NAME,NAME]

Suite: the networks of Dymem and FreeLunch (benchmarks/models/papers), and steps of `models.registry`, recorded on this CPU.
Every second is predicted, none measured: ops take what the roofline of the profile's card says of their FLOPs and bytes (views
take nothing), copies and codecs what its links and codecs do. Feature maps of floats may be encoded to 4 or 6 bits a value, as
FreeLunch does with any map. `--traces`: where recorded steps are kept between runs. Three budgets a network; for each, extra
seconds of every policy made to fit by waiting, of the best plan that only recomputes, only moves or only encodes, and of joint.
Writes benchmarks/results/joint.json, network by network.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.paths import RESULTS
from benchmarks.lib.tables import print_titled
from benchmarks.models.papers.networks import network
from benchmarks.papers.transfer_papers import EFFICIENCY, PROFILE, RUNS
from lightning_memopt import jsonio
from lightning_memopt.graph import Graph, Op, graph_from_json, graph_to_json, unmodified_levels
from lightning_memopt.plan import simulate
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.plan.rates import Device, MachineRates, profile
from lightning_memopt.solvers import joint, planner
from lightning_memopt.solvers.offload.policies import POLICIES
from lightning_memopt.solvers.offload.policy import carry_out

FILE = RESULTS / "joint.json"
PAPERS = (*((n, b) for n, b in RUNS["Dymem"] if (n, b) != ("VGG-16", 256)), ("ResNet-256", 24))
RECORDED = ("gpt2", "llama", "resnet50", "bert", "t5", "vit", "whisper", "mixtral", "unet", "densenet", "inception")
BUDGETS = (0.1, 0.4, 0.7)
"""Shares of what the unmodified step's peak is above the lowest that any policy, or recomputation alone, has."""
BITS = (4, 6)
_CLOSE = 1e-6


def recorded(name: str, traces: Path | None, device: Device) -> Graph:
    """A step of a model of `models.registry`, recorded on the CPU, with the times that the card's roofline gives its ops."""
    path = traces / f"{name}.json" if traces else None
    if path is not None and path.exists():
        graph = graph_from_json(jsonio.read(path))
    else:
        from benchmarks.lib.bench import Bench  # torch and transformers, where something is to be recorded

        graph = Bench(name).observe(steps=1)
        if path is not None:
            jsonio.write(path, graph_to_json(graph))

    def seconds(op: Op) -> float:
        read = sum(graph.tensors[t].nbytes for t in set(op.inputs))
        made = sum(graph.tensors[t].nbytes for t in op.outputs)
        return device.op_seconds(round(op.flops / EFFICIENCY), read + made) if op.outputs else 0.0

    ops = tuple(replace(op, seconds=seconds(op)) for op in graph.ops)
    return replace(graph, ops=ops, step_seconds=sum(op.seconds for op in ops))


def forms(graph: Graph) -> dict[int, list[joint.Form]]:
    """The host for every map, 4 or 6 bits a value for those of floats, one bit for masks; both."""
    found: dict[int, list[joint.Form]] = {}
    for op in graph.forward:
        for t in op.outputs:
            tensor = graph.tensors[t]
            codes = [(f"block{bits}", -(-tensor.nbytes * bits // 32)) for bits in BITS] if tensor.dtype == "float32" else []
            codes += [("bools", -(-tensor.nbytes // 8))] if tensor.dtype == "bool" else []
            found[t] = [("host", tensor.nbytes), *codes, *((f"{code}@host", nbytes) for code, nbytes in codes)]
    return found


def others(
    graph: Graph, budget: int, frontier: planner.Frontier, rates: MachineRates, limit_seconds: float
) -> dict[str, float]:
    """Extra seconds of everything that fits the budget, by name."""
    found = {}
    for label, policy in POLICIES.items():
        lives, fits = carry_out(policy, graph, rates, budget_nbytes=budget)
        if fits:
            found[label] = simulate(graph, lives, rates=rates).predicted.seconds
    fitting = [c.predicted.seconds for c in frontier.candidates if c.predicted.peak_nbytes <= budget]
    if fitting:
        found["recomputation alone"] = min(fitting)
    all_forms = forms(graph)
    for label, kept in (("offload alone", lambda f: not codec_of(f)), ("compression alone", lambda f: not tier_of(f))):
        mine = {t: [form for form in these if kept(form[0])] for t, these in all_forms.items()}
        alone = joint.solve_joint(
            graph,
            budget,
            rates=rates,
            forms=mine,
            recompute=False,
            limit_seconds=joint.ALONE_SHARE * limit_seconds,
            clock=time.process_time,
        )
        if alone is not None:
            found[label] = alone.predicted.seconds
    return found


def pairs(make: Callable[[], Graph], name: str, kind: str, rates: MachineRates, limit_seconds: float) -> list[dict[str, Any]]:
    """One network within every budget."""
    graph = make()
    frontier = planner.solve(graph, limit_seconds=120.0)
    peaks = [simulate(graph, carry_out(policy, graph, rates)[0]).predicted.peak_nbytes for policy in POLICIES.values()]
    least, most = min(*peaks, frontier.smallest_nbytes), max(unmodified_levels(graph))
    plans = [(c.solver, c.lives) for c in frontier.candidates]
    found = []
    for share in BUDGETS:
        budget = int(least + share * (most - least))
        rows = others(graph, budget, frontier, rates, limit_seconds)
        wall, cpu = time.perf_counter(), time.process_time()
        ours = joint.solve_joint(
            graph, budget, rates=rates, forms=forms(graph), plans=plans, limit_seconds=limit_seconds, clock=time.process_time
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        best = min(rows, key=rows.__getitem__) if rows else None
        away = Counter(_kind(life.form) for life in ours.lives if life.how == "fetch") if ours is not None else {}
        found.append(
            {
                "network": name,
                "kind": kind,
                "share": share,
                "budget_bytes": budget,
                "step_seconds": graph.step_seconds,
                "best_other": best,
                "best_other_seconds": None if best is None else rows[best],
                "joint_seconds": None if ours is None else ours.predicted.seconds,
                "joint": None if ours is None else ours.solver,
                "away": dict(away),
                "bound_seconds": None if ours is None else ours.bound_seconds,
                "gap": None if ours is None else ours.gap,
                "solve_cpu_seconds": round(cpu, 1),
                "solve_wall_seconds": round(wall, 1),
                "others": rows,
            }
        )
        print(f"  {name} {share}: {best} {found[-1]['best_other_seconds']}, joint {found[-1]['joint_seconds']}", flush=True)
    return found


def _kind(form: str) -> str:
    return {(False, True): "offloaded", (True, False): "compressed", (True, True): "both"}[
        bool(codec_of(form)), bool(tier_of(form))
    ]


def counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """How often joint is better and worse than the best of the others, and what it took."""
    fit = [p for p in found if p["best_other_seconds"] is not None]

    def beats(p: dict[str, Any], sign: int) -> bool:
        return sign * p["joint_seconds"] < sign * p["best_other_seconds"] * (1 - sign * _CLOSE)

    return {
        "pairs": len(fit),
        "better": sum(beats(p, 1) for p in fit if p["joint_seconds"] is not None),
        "worse": sum(p["joint_seconds"] is None or beats(p, -1) for p in fit),
        "fits_where_no_other_does": sum(p["best_other"] is None and p["joint_seconds"] is not None for p in found),
        "bound_above_zero": sum((p["bound_seconds"] or 0) > 0 for p in found),
        "offloaded_and_compressed": sum("both" in p["away"] for p in found),
        "most_cpu_seconds": max(p["solve_cpu_seconds"] for p in found),
        "most_wall_seconds": max(p["solve_wall_seconds"] for p in found),
    }


def show(name: str, found: list[dict[str, Any]]) -> None:
    rows = []
    for p in found:
        keys = ("best_other_seconds", "joint_seconds", "bound_seconds")
        seconds = ["none fits" if p[k] is None else f"{1e3 * p[k]:.2f}" for k in keys]
        rows.append(
            (
                f"{p['network']}: {p['share']:g}",
                f"{p['budget_bytes'] / 1e6:.0f}",
                p["best_other"] or "-",
                *seconds,
                p["joint"] or "-",
            )
        )
    head = ("network: share", "budget MB", "best other", "ms", "joint ms", "bound ms", "joint's plan")
    print_titled(f"{name}: extra milliseconds within a budget, predicted", head, rows)
    print(json.dumps(counts(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=PROFILE, help="the card and link")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of joint, in CPU seconds")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--only", help="names, separated by commas")
    args = parser.parse_args()
    rates = profile(args.profile)
    assert rates.device is not None
    suite: list[tuple[str, str, Callable[[], Graph]]] = [
        *((f"{n}, {b}", "paper", partial(network, n, b, rates.device, EFFICIENCY)) for n, b in PAPERS),
        *((n, "recorded on the CPU", partial(recorded, n, args.traces, rates.device)) for n in RECORDED),
    ]
    for name, kind, make in suite:
        if args.only and name.partition(",")[0] not in args.only.split(","):
            continue
        found = pairs(make, name, kind, rates, args.seconds)
        results = json.loads(FILE.read_text()) if FILE.exists() else {}
        results |= {"predicted": True, "efficiency": EFFICIENCY, "limit_cpu_seconds": args.seconds}
        mine = results.setdefault("profiles", {}).setdefault(args.profile, {"pairs": []})
        mine["pairs"] = [p for p in mine["pairs"] if p["network"] != name] + found
        mine["counts"] = counts(mine["pairs"])
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    show(args.profile, json.loads(FILE.read_text())["profiles"][args.profile]["pairs"])


if __name__ == "__main__":
    main()
