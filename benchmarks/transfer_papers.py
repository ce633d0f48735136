"""Dymem's and FreeLunch's comparisons, simulated: their networks, their card and link, their policies, beside what they report.

    python benchmarks/transfer_papers.py [--joint [SECONDS] [--profile NAME]]

Every number of ours is simulated: networks as graphs (benchmarks/papers), ops priced by the roofline of the card, copies by its
link (`pcie3-12gb`), policies by `plan.simulate`, on which `plan.validate` agrees. `--joint` also lets the planner decide within
budgets, against every policy (made to fit by waiting for copies), on the papers' card or another; it takes up to `SECONDS`
(30) for each of them.
Writes benchmarks/results/transfer_papers.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.papers.claims import CLAIMS, Claim
from benchmarks.papers.networks import network
from lightning_memopt.graph import Graph, resident_nbytes, unmodified_levels
from lightning_memopt.plan import Life, Prediction, lower, simulate, validate
from lightning_memopt.plan.rates import Rates, profile
from lightning_memopt.solvers import joint, planner
from lightning_memopt.solvers.transfer import carry_out
from lightning_memopt.solvers.transfer_baselines import POLICIES

RESULTS = Path(__file__).parent / "results" / "transfer_papers.json"
PROFILE = "pcie3-12gb"
EFFICIENCY = 0.7
"""Of the card's peak FLOP rate. Dymem's table 1 has 76 ms of compute for 68 ms of copy in a 3x3 convolution, 25 for 66 in a 1x1
one. With 64 channels in (and 4 x 64 out of the latter) that is 258 and 338 FLOPs per byte of link; the card's peak is 413."""
MB = 1e6
RUNS = {
    "Dymem": (
        ("AlexNet", 256),
        ("VGG-16", 64),
        ("VGG-16", 256),
        ("ResNet-32", 100),
        ("ResNet-32, no norm", 100),
        ("ResNet-50", 100),
        ("ResNet-101", 100),
        ("ResNet-152", 100),
        ("Inception V4", 128),
    ),
    "FreeLunch": (
        ("ResNet-32, 32x32", 128),
        ("AlexNet", 128),
        ("VGG-16", 24),
        ("ResNet-152", 24),
        ("ResNet-152", 44),
        ("ResNet-256", 24),
    ),
}
JOINT = (*((n, b) for n, b in RUNS["Dymem"] if (n, b) != ("VGG-16", 256)), ("ResNet-256", 24))
BUDGETS = (0.1, 0.4, 0.7)
"""Shares of what the unmodified step's peak is above the lowest that any policy, or recomputation alone, has."""
CAPPED = "Dymem in vDNN's bytes"


def row(graph: Graph, lives: tuple[Life, ...], rates: Rates, batch: int) -> dict[str, float]:
    """What a plan costs. Raises RuntimeError where the validator disagrees with the simulator."""
    schedule = lower(graph, lives)
    report = validate(graph, lives, schedule)
    p: Prediction = simulate(graph, lives, schedule, rates=rates).predicted
    if not report.ok or report.peak_bytes != p.peak_bytes:
        raise RuntimeError(f"not valid: {report.problems[:1]}, {report.peak_bytes} and {p.peak_bytes} bytes")
    step = graph.step_seconds + p.seconds
    return {
        "peak_mb": p.peak_bytes / MB,
        "images_per_second": batch / step,
        "images_per_second_if_codec_hidden": batch / (step - p.codec_seconds),
        "step_seconds": step,
        "stall_seconds": p.stall_seconds,
        "codec_seconds": p.codec_seconds,
        "recompute_seconds": p.extra_seconds,
        "copy_seconds": p.copy_seconds,
        "overlap": p.overlap,
        "overlapped_share_of_step": (p.copy_seconds - p.stall_seconds) / step,
    }


def simulated(name: str, batch: int, rates: Rates) -> dict[str, Any]:
    """All policies on one network."""
    assert rates.device is not None
    graph = network(name, batch, rates.device, EFFICIENCY)
    rows = {label: row(graph, carry_out(policy, graph, rates)[0], rates, batch) for label, policy in POLICIES.items()}
    most = round(rows["vDNN (all)"]["peak_mb"] * MB)
    lives, fits = carry_out(POLICIES["Dymem"], graph, rates, budget_nbytes=most)
    if fits:
        rows[CAPPED] = row(graph, lives, rates, batch)
    maps = {op.name: 0 for op in graph.forward}
    for op in graph.forward:
        maps[op.name] += graph.tensors[op.outputs[0]].nbytes
    return {
        "maps_mb": sum(maps.values()) / MB,
        "maps_mb_relu_in_place": sum(n for name, n in maps.items() if name != "aten::relu") / MB,
        "resident_mb": resident_nbytes(graph) / MB,
        "unmodified_seconds": graph.step_seconds,
        "policies": rows,
    }


def forms(graph: Graph) -> dict[int, list[joint.Form]]:
    """The host for every map, and the rates of compression that FreeLunch uses for those of floats."""
    found: dict[int, list[joint.Form]] = {}
    for op in graph.forward:
        for t in op.outputs:
            nbytes = graph.tensors[t].nbytes
            codes = (
                [(f"block{bits}", -(-nbytes * bits // 32)) for bits in (4, 6)] if graph.tensors[t].dtype == "float32" else []
            )
            found[t] = [("host", nbytes), *codes, *((f"{code}@host", size) for code, size in codes)]
    return found


def jointly(name: str, batch: int, rates: Rates, limit_seconds: float) -> list[dict[str, Any]]:
    """The planner within budgets, and the best of every policy and of recomputation within the same ones."""
    assert rates.device is not None
    graph = network(name, batch, rates.device, EFFICIENCY)
    frontier = planner.solve(graph)
    peaks = [simulate(graph, carry_out(policy, graph, rates)[0]).predicted.peak_bytes for policy in POLICIES.values()]
    least, most = min(*peaks, frontier.smallest_bytes), max(unmodified_levels(graph))
    found = []
    for share in BUDGETS:
        budget = int(least + share * (most - least))
        others = {}
        for label, policy in POLICIES.items():
            lives, fits = carry_out(policy, graph, rates, budget_nbytes=budget)
            if fits:
                others[label] = simulate(graph, lives, rates=rates).predicted.seconds
        fitting = [c.predicted.seconds for c in frontier.candidates if c.predicted.peak_bytes <= budget]
        if fitting:
            others["recomputation alone"] = min(fitting)
        plans = [(c.solver, c.lives) for c in frontier.candidates]
        began = time.perf_counter()
        ours = joint.solve(graph, budget, rates=rates, forms=forms(graph), plans=plans, limit_seconds=limit_seconds)
        best = min(others, key=others.__getitem__) if others else None
        found.append(
            {
                "network": name,
                "batch": batch,
                "share": share,
                "budget_mb": budget / MB,
                "best_other": best,
                "best_other_seconds": None if best is None else others[best],
                "joint_seconds": None if ours is None else ours.predicted.seconds,
                "joint": None if ours is None else ours.solver,
                "bound_seconds": None if ours is None else ours.bound_seconds,
                "solved_seconds": time.perf_counter() - began,
                "others": others,
            }
        )
        print(f"  {name} {share}: {best} {found[-1]['best_other_seconds']}, joint {found[-1]['joint_seconds']}", flush=True)
    return found


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for r in [head, *rows]:
        print(
            "  "
            + "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True)))
        )


def print_runs(results: dict[str, Any]) -> None:
    for source, runs in results["runs"].items():
        rows = []
        for key, run in runs.items():
            for label, r in run["policies"].items():
                numbers = (
                    f"{r['peak_mb']:.0f}",
                    f"{r['images_per_second']:.1f}",
                    f"{100 * r['overlap']:.0f} %" if r["copy_seconds"] else "-",
                    f"{100 * r['overlapped_share_of_step']:.0f} %",
                    f"{r['stall_seconds']:.3f}",
                    f"{r['codec_seconds']:.3f}",
                    f"{r['recompute_seconds']:.3f}",
                )
                rows.append((f"{key}: {label}", *numbers))
        head = ("network, batch: policy", "peak MB", "images/s", "overlap", "of step", "stall s", "codec s", "again s")
        table(f"{source}'s networks, simulated", head, rows)


def print_claims(results: dict[str, Any]) -> None:
    rows, reasons = [], dict[str, list[str]]()
    for claim in CLAIMS:
        ours = claim.ours(results["runs"][claim.source])
        rows.append((f"{claim.source} {claim.where}: {claim.what}", claim.unit.format(claim.paper), claim.unit.format(ours)))
        if claim.why:
            reasons.setdefault(claim.why, []).append(f"{claim.where}, {claim.what}")
    table("reported, and simulated", ("what", "paper", "simulated"), rows)
    print("\nwhere the shape differs")
    for why, where in reasons.items():
        print(f"  {'; '.join(where)}:\n    {why}")


def claims_json(results: dict[str, Any]) -> list[dict[str, Any]]:
    def one(claim: Claim) -> dict[str, Any]:
        ours = claim.ours(results["runs"][claim.source])
        return {
            "source": claim.source,
            "where": claim.where,
            "what": claim.what,
            "paper": claim.paper,
            "simulated": ours,
            "why": claim.why,
        }

    return [one(claim) for claim in CLAIMS]


def print_joint(name: str, pairs: list[dict[str, Any]]) -> None:
    rows = []
    for p in pairs:
        seconds = [
            "none fits" if p[k] is None else f"{p[k]:.4f}" for k in ("best_other_seconds", "joint_seconds", "bound_seconds")
        ]
        rows.append(
            (f"{p['network']}, {p['batch']}: {p['share']:g}", f"{p['budget_mb']:.0f}", p["best_other"] or "-", *seconds)
        )
    table(
        f"{name}: extra seconds within a budget, simulated",
        ("network, batch: share", "budget MB", "best other", "seconds", "joint", "bound"),
        rows,
    )
    fit = [p for p in pairs if p["best_other_seconds"] is not None]
    better = sum(p["joint_seconds"] < p["best_other_seconds"] * (1 - 1e-6) for p in fit)
    worse = sum(p["joint_seconds"] > p["best_other_seconds"] * (1 + 1e-6) for p in fit)
    print(f"joint is strictly better on {better} of {len(fit)} pairs that any policy fits, worse on {worse}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joint", nargs="?", type=float, const=30.0, metavar="SECONDS")
    parser.add_argument("--profile", default=PROFILE, help="the card and link of --joint")
    args = parser.parse_args()
    rates = profile(PROFILE)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: dict[str, Any] = {"simulated": True, "profile": PROFILE, "efficiency": EFFICIENCY, "runs": {}}
    for source, runs in RUNS.items():
        results["runs"][source] = {f"{name}, {batch}": simulated(name, batch, rates) for name, batch in runs}
    results["claims"] = claims_json(results)
    results["joint"] = before.get("joint", {})
    if args.joint is not None:
        card = profile(args.profile)
        results["joint"][args.profile] = [pair for name, batch in JOINT for pair in jointly(name, batch, card, args.joint)]
    print_runs(results)
    for name, pairs in results["joint"].items():
        print_joint(name, pairs)
    print_claims(results)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
