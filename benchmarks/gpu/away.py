"""Tensors that are away, beside stock tools at the same peak.

`offload`: the joint plan within the peak of per-block checkpointing, and of `save_on_cpu(pin_memory=True)`; recomputation alone
there; everything away (Dymem). `compress`: lossless and lossy plans within the peak of per-block checkpointing, the smallest,
and all that may be encoded.
Per plan: peaks, measured and predicted; medians of interleaved step-time ratios (CUDA events); bytes moved, stall and overlap,
measured and predicted; whether every bit is that of the unmodified step, or how far the gradients of a lossy one are off.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from benchmarks.gpu.bench import GpuBench, against, in_time, observed, reference, seconds_left, times
from benchmarks.gpu.codecs import SMALL, codecs
from benchmarks.lib.bench import MIB
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Plan, simulate
from lightning_memopt.runtime import Program
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.solvers.offload.dymem import dymem_trips
from lightning_memopt.solvers.offload.policy import carry_out
from lightning_memopt.solvers.offload.trips import TripPlanner, send_away
from lightning_memopt.solvers.planner import Frontier
from lightning_memopt.solvers.rollout import keep_all

COLUMNS = {
    "budget": "budget_mib",
    "alloc": "allocated_mib",
    "pred.": "predicted_allocated_mib",
    "reserved": "reserved_mib",
    "time": "time_ratio",
    "pred. ": "predicted_ratio",
    "moved": "moved_mib",
    "stall": "stall_ms",
    "pred.  ": "predicted_stall_ms",
    "overlap": "overlap_share",
    "pred.   ": "predicted_overlap_share",
    "codecs": "codec_ms",
}
_UNBOUNDED = 1 << 62

Peer = Callable[[], contextlib.AbstractContextManager[Any]]
Wanted = tuple[str, Offloading, Callable[[], Plan], int]
"""Label, what may be away, the plan, its budget."""


def offload(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int) -> None:
    tier = "host" if bench.on_gpu else "disk"
    peers: dict[str, Peer] = {"per block": bench.per_block, "save_on_cpu": partial(save_on_cpu, pin_memory=bench.on_gpu)}

    def wanted(graph: Graph, frontier: Frontier, peaks: dict[str, int]) -> list[Wanted]:
        offloading = _offloading(bench, deadline, offload=tier)
        both = offloading.widened(frontier)
        found = [(f"at {peer}", offloading, partial(both.plan, nbytes), nbytes) for peer, nbytes in peaks.items()]
        alone = partial(frontier.plan, peaks["per block"])
        least = partial(both.plan, both.smallest_nbytes)
        return [
            *found,
            ("recompute, at per block", offloading, alone, peaks["per block"]),
            ("smallest", offloading, least, both.smallest_nbytes),
            ("all away (Dymem)", offloading, partial(_all_away, graph, offloading), _UNBOUNDED),
        ]

    _compared(bench, result, deadline, rounds, peers, wanted)


def compress(bench: GpuBench, result: dict[str, Any], deadline: float, rounds: int) -> None:
    def wanted(graph: Graph, frontier: Frontier, peaks: dict[str, int]) -> list[Wanted]:
        found: list[Wanted] = []
        for kind in ("lossless", "lossy"):
            offloading = _offloading(bench, deadline, compress=kind)
            both = offloading.widened(frontier)
            found.append((f"{kind}, at per block", offloading, partial(both.plan, peaks["per block"]), peaks["per block"]))
            found.append((f"{kind}, smallest", offloading, partial(both.plan, both.smallest_nbytes), both.smallest_nbytes))
            found.append((f"{kind}, all that may", offloading, partial(_all_encoded, graph, offloading), _UNBOUNDED))
        return found

    codecs(bench.device, SMALL, rounds=1)  # what they make once is there before memory is counted
    _compared(bench, result, deadline, rounds, {"per block": bench.per_block}, wanted)


def _offloading(bench: GpuBench, deadline: float, **options: str) -> Offloading:
    return Offloading(bench.device, MemOptConfig(solver_seconds=min(15.0, seconds_left(deadline) / 6), **options))  # type: ignore[arg-type]


def _all_away(graph: Graph, offloading: Offloading) -> Plan:
    return _unbounded(graph, offloading, carry_out(dymem_trips, graph, offloading.rates, offloading.tier)[0])


def _all_encoded(graph: Graph, offloading: Offloading) -> Plan:
    """Each tensor in the last of the forms in which it may be."""
    lives = keep_all(graph)
    trips = TripPlanner(graph, lives, offloading.rates)
    forms = {t: options[-1] for t, options in offloading.forms(graph).items() if options and t in trips.gaps}
    return _unbounded(graph, offloading, send_away(lives, trips.plan(forms)))


def _unbounded(graph: Graph, offloading: Offloading, lives: tuple[Life, ...]) -> Plan:
    predicted = simulate(graph, lives, rates=offloading.rates).predicted
    return Plan(
        fingerprint="",
        lives=lives,
        solver="",
        budget_nbytes=_UNBOUNDED,
        predicted=predicted,
        unmodified_peak_nbytes=0,
        step_seconds=graph.step_seconds,
    )


def _compared(
    bench: GpuBench,
    result: dict[str, Any],
    deadline: float,
    rounds: int,
    peers: dict[str, Peer],
    wanted: Callable[[Graph, Frontier, dict[str, int]], list[Wanted]],
) -> None:
    """Peers first, since their peaks are the budgets; then plans: their bits, all times interleaved, their peaks."""
    rows = result["rows"]
    loss, outcome = reference(bench, rows)
    forwards: dict[str, Callable[[], Any] | None] = {"unmodified": None}
    contexts: dict[str, Callable[[], Any]] = {}
    for label, peer in peers.items():
        in_time(deadline, label)
        with peer():
            bench.step()
            bench.step()
            rows[label] = {"equal": bench.equal(outcome)} | bench.peaks()
        forwards[label], contexts[label] = None, peer
    peaks = {label: int(MIB * rows[label].get("reserved_mib", rows[label]["allocated_mib"])) for label in peers}
    graph, frontier = observed(bench, deadline, lambda _: peaks.values())
    choices = wanted(graph, frontier, peaks)
    result |= {"ops": len(graph.ops), "ops_seconds": graph.step_seconds}
    result["rates"] = {
        kind: offloading.rates.to_json() for kind, offloading in {h.config.compress: h for _, h, _, _ in choices}.items()
    }
    plans: dict[str, tuple[Offloading, Plan, int]] = {}
    try:
        for label, offloading, make, budget in choices:
            in_time(deadline, label)
            rows[label] = row = {"budget_mib": budget / MIB if budget != _UNBOUNDED else 0.0}
            try:
                plan = make()
            except InfeasibleError as error:
                row["smallest_mib"] = (error.smallest_nbytes or 0) / MIB
                continue
            forwards[label] = forward = bench.planned(Program(graph, plan.lives), offloading.depot_of(plan))
            bench.step(forward)
            got = bench.step(forward)
            row["equal"] = torch.equal(loss, got) and bench.equal(outcome)
            if not row["equal"]:
                row["gradient_error"] = error_of = _gradient_error(bench, outcome)
                same = "the same" if torch.equal(loss, got) else "ANOTHER"
                row["unequal"] = f"{same} loss, gradients {error_of:.1e} off" if offloading.codec else "NO"
            del got  # peaks are of all that is held
            plans[label] = offloading, plan, budget
        times(bench, rows, forwards, contexts, rounds, len(graph.forward), deadline)
        for label, (offloading, plan, budget) in plans.items():
            row = rows[label]
            row |= _moved(offloading, plan)  # of the steps that were timed; those whose peak is measured begin with no memory
            row |= bench.peaks(forwards[label])
            against(bench, graph, plan, budget, row)
    finally:
        for _, offloading, _, _ in choices:
            offloading.close()


def _gradient_error(bench: GpuBench, outcome: tuple[list[Any], Any]) -> float:
    """The norm of the difference to the unmodified step's gradients, relative to theirs."""
    now = [p.grad for p in bench.model.parameters()]
    pairs = [(a, b.cpu()) for a, b in zip(outcome[0], now, strict=False) if a is not None and b is not None]
    off = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return float((off / sum(float(a.double().square().sum()) for a, _ in pairs)) ** 0.5)


def _moved(offloading: Offloading, plan: Plan) -> dict[str, Any]:
    """What the plan's depot measured a step, beside what was predicted."""
    depot, predicted = offloading.depot_of(plan), plan.predicted
    forms = Counter({life.tensor: life.form for life in plan.lives if life.how == "fetch"}.values())
    found: dict[str, Any] = {"forms": dict(forms)}
    if depot is None or not depot.timed:
        return found
    copied, waited = depot.copied_seconds, depot.waited.seconds
    found |= {
        "moved_mib": depot.moved_nbytes / depot.forwards / MIB,
        "predicted_moved_mib": predicted.moved_nbytes / MIB,
        "codec_ms": 1e3 * depot.coded.seconds / depot.timed,
        "predicted_codec_ms": 1e3 * predicted.codec_seconds,
        "timed_steps": depot.timed,
    }
    if copied:
        found |= {
            "stall_ms": 1e3 * waited / depot.timed,
            "predicted_stall_ms": 1e3 * predicted.stall_seconds,
            "copies_ms": 1e3 * copied / depot.timed,
            "overlap_share": max(0.0, 1 - waited / copied),
            "predicted_overlap_share": predicted.overlap,
        }
    return found
