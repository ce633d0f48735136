"""Dymem's and FreeLunch's comparisons, simulated: their networks, their card and link, their policies, beside what they report.

    python -m benchmarks transfer_papers

Every number of ours is simulated: networks as graphs (`models.papers`), ops priced by the roofline of the card, copies by its
link (`pcie3-12gb`), policies by `plan.simulate`, on which `plan.validate` agrees.
Writes benchmarks/results/transfer_papers.json.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.lib.paths import RESULTS
from benchmarks.lib.tables import print_titled
from benchmarks.models.papers.networks import network
from benchmarks.papers.claims import CLAIMS, Claim
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life, Prediction, lower, simulate, validate
from lightning_memopt.plan.rates import MachineRates, profile
from lightning_memopt.solvers.offload.policies import POLICIES
from lightning_memopt.solvers.offload.policy import carry_out

FILE = RESULTS / "transfer_papers.json"
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
CAPPED = "Dymem in vDNN's bytes"


def row(graph: Graph, lives: tuple[Life, ...], rates: MachineRates, batch: int) -> dict[str, float]:
    """What a plan costs. Raises RuntimeError where the validator disagrees with the simulator."""
    schedule = lower(graph, lives)
    report = validate(graph, lives, schedule)
    p: Prediction = simulate(graph, lives, schedule, rates=rates).predicted
    if not report.ok or report.peak_nbytes != p.peak_nbytes:
        raise RuntimeError(f"not valid: {report.problems[:1]}, {report.peak_nbytes} and {p.peak_nbytes} bytes")
    step = graph.step_seconds + p.seconds
    return {
        "peak_mb": p.peak_nbytes / MB,
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


def simulated(name: str, batch: int, rates: MachineRates) -> dict[str, Any]:
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
        print_titled(f"{source}'s networks, simulated", head, rows)


def print_claims(results: dict[str, Any]) -> None:
    rows, reasons = [], dict[str, list[str]]()
    for claim in CLAIMS:
        ours = claim.ours(results["runs"][claim.source])
        rows.append((f"{claim.source} {claim.where}: {claim.what}", claim.unit.format(claim.paper), claim.unit.format(ours)))
        if claim.why:
            reasons.setdefault(claim.why, []).append(f"{claim.where}, {claim.what}")
    print_titled("reported, and simulated", ("what", "paper", "simulated"), rows)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rates = profile(PROFILE)
    results: dict[str, Any] = {"simulated": True, "profile": PROFILE, "efficiency": EFFICIENCY, "runs": {}}
    for source, runs in RUNS.items():
        results["runs"][source] = {f"{name}, {batch}": simulated(name, batch, rates) for name, batch in runs}
    results["claims"] = claims_json(results)
    print_runs(results)
    print_claims(results)
    FILE.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
