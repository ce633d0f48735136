"""MONeT's memory at overhead (Shah et al., ICLR 2021) beside ours, by recomputation alone: *predicted*, at its sizes.

    python -m benchmarks monet                          # both networks; writes results/monet.json
    python -m benchmarks monet --execute                # a smaller batch of each, planned and run on this CPU; minutes
    python -m benchmarks monet --table                  # the tables of docs/measurements/monet.md, from the results

Steps are recorded without arithmetic (benchmarks/lib/sizes.py) at MONeT's own batches: 184 images of 224 x 224 pixels for
ResNet-50, 11 of 416 x 608 for the U-Net. As in its scripts, the step is forward and backward, its loss the sum of the results,
and memory the most bytes allocated at once: weights, gradients, the batch and all that the step makes. `x less`: the unmodified
step's memory over the plan's. MONeT also chooses other implementations of ops, and measured time on a card; our plans only run
recorded ops again, their FLOPs are counted, and seconds are those of the roofline of such a card (`CARD`), not measured ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import conv_flop_count

from benchmarks.lib.bench import MIB, Bench, Forward, equal
from benchmarks.lib.paths import RESULTS
from benchmarks.lib.priced import Price, counting_moved
from benchmarks.lib.sizes import record
from benchmarks.models import monet
from benchmarks.models.convolutional import Built
from benchmarks.models.registry import MODELS
from lightning_memopt import jsonio
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph, resident_nbytes, unmodified_levels
from lightning_memopt.plan.rates import Device
from lightning_memopt.runtime import Program, install_native
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute import bound

FILE = RESULTS / "monet.json"
GIB = 2**30
CARD = Device(nbytes=16 * GIB, flops_per_second={"float32": 9.3e12}, bytes_per_second=732e9, launch_seconds=5e-6)
"""A P100 by its data sheet: a card of 16 GB of that time, for MONeT's README names none. The launch is assumed."""
EFFICIENCY = 0.7
"""Of the card's FLOP rate: assumed, as in benchmarks/papers/transfer_papers.py."""
CURVE = (1.5, 2.0, 2.5, 3.0, 3.5)
"""Further points: the unmodified step's memory over the budget."""
_SECONDS = 120.0
"""The limit of solving for all points of a table."""
_SAME = 0.02
"""The table leaves out points that are this close to MONeT's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network of MONeT's, and what its README reports of it.

    title: as it is called in the tables.
    build: makes the model and a batch with this number of samples.
    batch: samples of MONeT's batch.
    gib: memory of the unmodified step there.
    points: (memory, extra seconds in percent of the unmodified step) of MONeT's schedules.
    executed: samples of the batch that is run here.
    less: how many times less memory is asked for in that run.
    """

    title: str
    build: Callable[..., Built]
    batch: int
    gib: float
    points: tuple[tuple[float, float], ...]
    executed: int
    less: float


CASES = {
    "resnet50": Case(
        title="ResNet-50",
        build=monet.resnet50,
        batch=184,
        gib=15.06,
        points=((10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95)),
        executed=16,
        less=2.5,
    ),
    "unet": Case(
        title="U-Net",
        build=monet.unet,
        batch=11,
        gib=14.32,
        points=((10.01, -4.10), (9.01, -2.07), (8.02, -0.09), (7.00, 1.39), (6.01, 4.95), (5.01, 11.51)),
        executed=1,
        less=2.0,
    ),
}


def recorded(build: Callable[..., Built], batch: int) -> Graph:
    """The step at this batch, its ops in the seconds that they would take on the card."""
    torch.manual_seed(0)
    with counting_moved() as moved:
        graph = record(lambda: build(batch)[:2], lambda p: torch.optim.SGD(p, 1e-2, foreach=False))
    price = Price.of(CARD, EFFICIENCY)
    ops = [replace(op, seconds=price.seconds(op, op.flops, n, True)) for op, n in zip(graph.ops, moved, strict=True)]
    return replace(graph, ops=tuple(ops), step_seconds=sum(op.seconds for op in ops))


class Planned:
    """The plans of a step, for the fewest FLOPs and for the fewest seconds, and what no plan goes below. `less`: what the
    unmodified step's memory is divided by.
    """

    def __init__(self, graph: Graph, less: Iterable[float]) -> None:
        self.graph = graph
        self.flops = sum(op.flops for op in graph.ops)
        self.unmodified_nbytes = max(unmodified_levels(graph))
        budgets = [int(self.unmodified_nbytes / x) for x in less]
        self.fewest = planner.solve(graph, objective="flops", limit_seconds=_SECONDS, budgets=budgets)
        self.fastest = planner.solve(graph, limit_seconds=_SECONDS, budgets=budgets)
        in_flops = replace(graph, ops=tuple(replace(op, seconds=op.flops / self.flops) for op in graph.ops))
        self._moments = bound.moments(in_flops)

    def least_flops(self, budget_nbytes: int) -> float:
        """No plan within the budget runs fewer FLOPs again, as a share of those of the step."""
        return max(moment.bound_seconds(budget_nbytes) for moment in self._moments)

    def row(self, less: float) -> dict[str, Any]:
        """What the plans for a budget cost: shares of the unmodified step."""
        budget = int(self.unmodified_nbytes / less)
        row = {
            "less": less,
            "budget_nbytes": budget,
            "least_flops": self.least_flops(budget),
            "least_seconds": self.fastest.bound_seconds(budget) / self.graph.step_seconds,
        }
        for name, frontier in (("fewest_flops", self.fewest), ("fastest", self.fastest)):
            try:
                row[name] = self._price(frontier.within(budget))
            except InfeasibleError:
                row[name] = None
        return row

    def _price(self, candidate: planner.Candidate) -> dict[str, Any]:
        p = candidate.predicted
        return {
            "solver": candidate.solver,
            "peak_nbytes": p.peak_nbytes,
            "extra_flops": p.extra_flops / self.flops,
            "extra_seconds": p.extra_seconds / self.graph.step_seconds,
            "rebuilt_ops": p.rebuilt_ops,
        }


def predicted(case: Case) -> dict[str, Any]:
    """A network at MONeT's batch."""
    planned = Planned(recorded(case.build, case.batch), [*(case.gib / gib for gib, _ in case.points), *CURVE])
    smallest = min(planned.fewest.candidates[0], planned.fastest.candidates[0], key=lambda c: c.predicted.peak_nbytes)
    return {
        "batch": case.batch,
        "ops": len(planned.graph.ops),
        "unmodified_nbytes": planned.unmodified_nbytes,
        "resident_nbytes": resident_nbytes(planned.graph),
        "flops": planned.flops,
        "step_seconds": planned.graph.step_seconds,
        "solve_seconds": round(planned.fewest.seconds + planned.fastest.seconds, 2),
        "published": [{"paper_overhead": p / 100, **planned.row(case.gib / gib)} for gib, p in case.points],
        "curve": [planned.row(less) for less in CURVE],
        "smallest_nbytes": smallest.predicted.peak_nbytes,
    }


def convolution_flops(step: Callable[[], Any]) -> int:
    """FLOPs of the convolutions of a step that are not part of backward's own ops: what runs again included.

    A counter instead of the profiler would be a dispatch mode, and rebuilds run beneath all modes.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    total = 0
    for event in profiler.events() or ():
        if event.name == "aten::convolution" and not _within(event):
            x, w = event.input_shapes[:2]
            _, _, _, stride, padding, dilation, *_ = event.concrete_inputs
            sizes = zip(x[2:], w[2:], stride, padding, dilation, strict=True)
            out = [(n + 2 * pad - d * (k - 1) - 1) // by + 1 for n, k, by, pad, d in sizes]
            total += conv_flop_count(x, w, [x[0], w[0], *out])
    return total


def _within(event: Any) -> bool:
    """Whether an event is part of another one of its name: a dispatch mode hands an op on to itself."""
    parent = event.cpu_parent
    while parent is not None and parent.name != event.name:
        parent = parent.cpu_parent
    return parent is not None


def executed(case: Case) -> dict[str, Any]:
    """A smaller batch, on this CPU: a plan for the fewest FLOPs, its peak and FLOPs as predicted and as measured."""
    label = f"MONeT's {case.title}"
    MODELS[label] = lambda: case.build(case.executed)
    bench = Bench(label)
    bench.step()
    loss, reference = bench.step(), bench.outcome()
    graph = bench.observe(steps=2)
    resident = resident_nbytes(graph)
    budget = int(max(unmodified_levels(graph)) / case.less)
    frontier = planner.solve(graph, objective="flops", budgets=[budget])
    plan = frontier.plan(budget)
    forward: Forward = bench.planned(Program(graph, plan.lives))
    same = torch.equal(bench.step(forward), loss) and equal(reference, bench.outcome())
    again = convolution_flops(lambda: bench.step(forward)) - convolution_flops(bench.step)
    return {
        "batch": case.executed,
        "less": case.less,
        "budget_nbytes": plan.budget_nbytes,
        "unmodified_predicted_nbytes": frontier.unmodified_peak_nbytes,
        "unmodified_measured_nbytes": int(bench.peak() * MIB) + resident,
        "predicted_nbytes": plan.predicted.peak_nbytes,
        "measured_nbytes": int(bench.peak(forward) * MIB) + resident,
        "flops": bench.flops(),
        "predicted_extra_flops": plan.predicted.extra_flops,
        "measured_extra_convolution_flops": again,
        "rebuilt_ops": plan.predicted.rebuilt_ops,
        "equal": same,
    }


def table(results: dict[str, Any]) -> str:
    """The tables of docs/measurements/monet.md."""
    lines: list[str] = []
    for name, row in results.items():
        case = CASES[name]
        head = (
            "memory", "MONeT, measured: time", "fewest FLOPs, predicted: FLOPs", "no plan less than", "its time",
            "fastest, predicted: time", "no plan less than",
        )  # fmt: skip
        unmodified = row["unmodified_nbytes"] / GIB
        lines += [f"{case.title}, batch {row['batch']}: {unmodified:.2f} GiB unmodified here, {case.gib} there.", ""]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        there = [point["less"] for point in row["published"]]
        ours = [point for point in row["curve"] if all(abs(point["less"] - less) > _SAME for less in there)]
        for point in sorted([*row["published"], *ours], key=lambda point: point["less"]):
            fewest, fastest = point["fewest_flops"], point["fastest"]
            cells = (
                f"x{point['less']:.2f} less",
                f"{100 * point['paper_overhead']:+.2f} %" if "paper_overhead" in point else "",
                f"{100 * fewest['extra_flops']:+.1f} %" if fewest else "none fits",
                f"{100 * point['least_flops']:+.1f} %",
                f"{100 * fewest['extra_seconds']:+.1f} %" if fewest else "",
                f"{100 * fastest['extra_seconds']:+.1f} %" if fastest else "none fits",
                f"{100 * point['least_seconds']:+.1f} %",
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        if run := row.get("executed"):
            lines += [
                f"Run here at batch {run['batch']}, x{run['less']:g} less: {run['measured_nbytes'] / MIB:,.2f} MiB measured, "
                f"{run['predicted_nbytes'] / MIB:,.2f} predicted (unmodified: {run['unmodified_measured_nbytes'] / MIB:,.2f}, "
                f"{run['unmodified_predicted_nbytes'] / MIB:,.2f}); {run['measured_extra_convolution_flops']:,} FLOPs of "
                f"convolutions ran again, {run['predicted_extra_flops']:,} predicted "
                f"({100 * run['predicted_extra_flops'] / run['flops']:.1f} %); bits {'equal' if run['equal'] else 'DIFFER'}.",
                "",
            ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(CASES), metavar="NETWORK", help=f"of {', '.join(CASES)}")
    parser.add_argument("--execute", action="store_true", help="run a smaller batch of each, and predict nothing else")
    parser.add_argument("--table", action="store_true", help="print the tables of the results, and do nothing else")
    args = parser.parse_args()
    results: dict[str, Any] = jsonio.read(FILE)["networks"] if FILE.exists() else {}
    if not args.table:
        torch.use_deterministic_algorithms(args.execute)  # with them, torch fills memory that nobody shall write to
        install_native(print)
        for name in args.networks or CASES:
            row = results.setdefault(name, {})
            row.update({"executed": executed(CASES[name])} if args.execute else predicted(CASES[name]))
            card = {"flops_per_second": CARD.flops_per_second["float32"], "bytes_per_second": CARD.bytes_per_second}
            head = {"torch": torch.__version__, "card": {**card, "efficiency": EFFICIENCY}}
            jsonio.write(FILE, {**head, "networks": results}, indent=1)
    print(table(results))


if __name__ == "__main__":
    main()
