"""The largest number of layers within a fixed budget (Echo, Table IV): called by `echo_table.py --depth`.

The budget is what Baseline needs for the source's depth (Transformer 6, ResNet 50). Every depth that is looked at is observed
and planned; the search begins where a line through two depths says, and the deepest model that fits runs a measured step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.lib.bench import MIB, Bench
from benchmarks.lib.bench import equal as same_bits
from benchmarks.lib.tables import print_table
from benchmarks.models import recurrent
from benchmarks.models.registry import MODELS
from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life, simulate
from lightning_memopt.runtime import Program
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import mirror
from lightning_memopt.solvers.recompute.echo import echo
from lightning_memopt.solvers.rollout import keep_all

MOST = 16
"""Search up to this many times the reference depth."""
PAPER = {
    "transformer": {"Baseline": 6, "Mirror": 6, "Echo": 11},
    "resnet": {"Baseline": 50, "Mirror": 101, "Echo": 200},
}


def smallest(graph: Graph) -> tuple[Life, ...]:
    """Our planner's plan for the fewest bytes."""
    frontier = planner.solve(graph)
    return frontier.plan(frontier.smallest_nbytes).lives


POLICIES: dict[str, Callable[[Graph], tuple[Life, ...]]] = {
    "Baseline": keep_all,
    "Mirror": mirror,
    "Echo": echo,
    "ours, smallest": smallest,
}


@dataclass
class Family:
    """Models of growing depth: `build(n)`, `layers(n)` as people count them, `first` the reference."""

    name: str
    build: Callable[[int], recurrent.Built]
    layers: Callable[[int], int]
    first: int
    peaks: dict[tuple[str, int], int] = field(default_factory=dict)

    def observed(self, n: int) -> tuple[Bench, Graph]:
        MODELS["depth"] = lambda: self.build(n)
        bench = Bench("depth")
        bench.step()
        bench.step()
        return bench, bench.observe(steps=1)

    def peak(self, policy: str, n: int) -> int:
        """Predicted bytes at this depth, weights included, under every policy that was not tried there."""
        if (policy, n) not in self.peaks:
            _, graph = self.observed(n)
            for label, solve in POLICIES.items():
                if label == policy or label != "ours, smallest":  # it takes the longest
                    self.peaks[label, n] = simulate(graph, solve(graph)).predicted.peak_nbytes
        return self.peaks[policy, n]

    def deepest(self, policy: str, budget: int) -> int:
        """The largest n whose peak is within the budget: a secant, then bisection."""
        fits, most = self.first, MOST * self.first
        fails = most + 1
        guess = 2 * self.first
        while fails - fits > 1:
            guess = min(max(guess, fits + 1), fails - 1)
            if self.peak(policy, guess) <= budget:
                fits = guess
            else:
                fails = guess
            slope = (self.peak(policy, guess) - self.peak(policy, self.first)) / (guess - self.first)
            far = self.first + (budget - self.peak(policy, self.first)) / slope if slope > 0 else fails
            guess = int(far) if int(far) != fits else fits + 1
        return fits

    def verified(self, policy: str, n: int) -> dict[str, Any]:
        """One real step at this depth: its measured peak, and its bits against the unmodified step's."""
        bench, graph = self.observed(n)
        lives = POLICIES[policy](graph)
        loss, reference = bench.step(), bench.outcome()
        program = Program(graph, lives)
        forward = None if program.empty else bench.planned(program)
        equal = torch.equal(bench.step(forward), loss) and same_bits(reference, bench.outcome())
        return {"measured_nbytes": bench.peak(forward) * MIB + resident_nbytes(graph), "equal": equal}


def _resnet(n: int) -> recurrent.Built:
    """As ResNet-101 grows from ResNet-50: by blocks of the third stage."""
    return recurrent.resnet(depths=(3, 4, n, 3), batch=16, width=32)


FAMILIES = (
    Family("transformer", lambda n: recurrent.transformer(layers=n, batch=8, width=96), lambda n: n, 6),
    Family("resnet", _resnet, lambda n: 3 * (3 + 4 + n + 3) + 2, 6),
)


def deepest() -> list[dict[str, Any]]:
    """A row for every family and policy."""
    rows: list[dict[str, Any]] = []
    for family in FAMILIES:
        budget = family.peak("Baseline", family.first)
        for policy in POLICIES:
            n = family.deepest(policy, budget)
            row = {
                "model": family.name,
                "policy": policy,
                "budget_nbytes": budget,
                "layers": family.layers(n),
                "at_least": n == MOST * family.first,
                "factor": family.layers(n) / family.layers(family.first),
                "paper": PAPER[family.name].get(policy),
                "predicted_nbytes": family.peak(policy, n),
                **family.verified(policy, n),
            }
            row["one_more_nbytes"] = None if row["at_least"] else family.peak(policy, n + 1)
            print(f"  {row}", flush=True)
            rows.append(row)
            gc.collect()
    return rows


def print_depths(rows: list[dict[str, Any]]) -> None:
    print_table(
        [
            {
                "model": row["model"],
                "policy": row["policy"],
                "budget": f"{row['budget_nbytes'] / MIB:.1f}",
                "layers": f"{'>= ' if row['at_least'] else ''}{row['layers']}",
                "factor": f"x{row['factor']:.2f}",
                "paper": row["paper"] or "",
                "measured": f"{row['measured_nbytes'] / MIB:.1f}",
                "bits": "equal" if row["equal"] else "DIFFER",
            }
            for row in rows
        ]
    )
