"""The third policy of `throughput.py`: recomputation, the host's memory and lossless codecs, decided together by the library.

Plans come from `JointFrontier`, whose starts are the plans that only recompute, so that none is slower than those.
`ParkingPlans` gives the largest size that fits. Copies and codecs take what the profile's link and codecs take, by the
simulator's clocks: what a step waits for depends on all that it does, at that size. So a plan is priced where it was
solved, and solved at few sizes.
There is no time limit: the joint solver then ends by counts of its own work (CP-SAT's deterministic time, one worker, one
seed), and the same traces give the same plans. The host is asked for as many bytes as a plan puts there (`Row.host_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from benchmarks.lib.priced import Price, PricedFit
from lightning_memopt.batching.plans import ParkingPlans
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, Plan, Prediction, Rebuild, lower, simulate
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.session.parking.joint_frontier import JointFrontier, peak_nbytes
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.solvers import planner

_SIZES = 4
"""Batch sizes that are solved, from the unmodified one to the largest, before those beside the best of them."""
_APART = 0.15
"""None that is closer to another one than this share of it is solved, unless it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What a step is priced by. `recorder_seconds`: of the host, for each forward op. `link`: the share of its rates it has."""

    price: Price
    recorder_seconds: float = 0.0
    link: float = 1.0

    def rates(self, rates: MachineRates) -> MachineRates:
        links = {
            tier: replace(
                link,
                out_bytes_per_second=self.link * link.out_bytes_per_second,
                in_bytes_per_second=self.link * link.in_bytes_per_second,
            )
            for tier, link in rates.links.items()
        }
        return replace(rates, links=links)


class HostPlans:
    """Plans of one fitted step within one budget. `alone`: plans that only recompute, and who made them."""

    def __init__(
        self, fit: PricedFit, budget_nbytes: int, rates: MachineRates, alone: Sequence[tuple[str, tuple[Life, ...]]]
    ) -> None:
        self.fit, self.budget_nbytes, self.rates, self.alone = fit, budget_nbytes, rates, alone
        config = MemOptConfig(offload="host", compress="lossless", solver_seconds=math.inf)
        self.offloading = Offloading(torch.device("cuda"), config)
        self.offloading.rates = rates  # not those of this machine
        self._solved: dict[int, Plan | None] = {}

    def frontier(self, graph: Graph) -> JointFrontier:
        """At the size of this graph, of plans that were solved at others. Host time of the engine is not priced here."""
        pool = []
        for solver, lives in self.alone:
            with suppress(LoweringError):
                pool.append(planner.Candidate(lives, simulate(graph, lives).predicted, solver))
        candidates = tuple(planner._pareto(pool, "throughput"))
        found = planner.Frontier(
            graph=graph,
            candidates=candidates,
            smallest_nbytes=min(c.least_budget_nbytes for c in candidates),
            unmodified_peak_nbytes=unmodified_peak(graph),
            moments=(),
            seconds=0.0,
        )
        return replace(JointFrontier.of(found, self.offloading), overhead=lambda _: 0.0)

    def solved(self, size: int) -> Plan | None:
        """The plan at this size; None where none fits."""
        if size not in self._solved:
            try:
                self._solved[size] = self.frontier(self.fit.at(size)).plan(self.budget_nbytes)
            except InfeasibleError:
                self._solved[size] = None
        return self._solved[size]

    def plan(self, size: int) -> Plan:
        """The same, where there is one. Raises RuntimeError."""
        found = self.solved(size)
        if found is None:
            raise RuntimeError(f"no plan holds a batch of {size} in {self.budget_nbytes} bytes")
        return found

    @property
    def sizes(self) -> list[int]:
        """At which there is a plan, of those that were solved."""
        return sorted(size for size, plan in self._solved.items() if plan is not None)

    def largest(self, found: int, cap: int) -> int:
        """The largest batch, from one that a plan holds. Bytes depend on no rate."""
        most = ParkingPlans(self.fit, self.frontier, self.offloading).largest(found, cap, self.budget_nbytes)
        if most >= cap:
            raise RuntimeError(f"a plan holds a batch of {most}: widen the range")
        return most

    def fastest(self, sizes: Iterable[int], bare: int, most: int) -> int:
        """Solves these sizes and the largest, some between the unmodified batch and that, and those halfway from the best to
        its neighbours: the one with the most samples a second."""

        def between(size: int) -> None:
            if all(abs(math.log(size / other)) > _APART for other in self._solved):
                self.solved(size)

        for size in (*sizes, most):
            self.solved(size)
        for i in range(_SIZES - 1):
            between(round(bare * (most / bare) ** (i / (_SIZES - 1))))
        assumed = Assumed(price=self.fit.price)
        best = self.best(assumed)[0]
        for low, high in pairwise(self.sizes):
            if best in (low, high):
                between(round(math.sqrt(low * high)))
        return self.best(assumed)[0]

    def best(self, assumed: Assumed, near: int | None = None) -> tuple[int, float]:
        """The size with the most samples a second, of those that were solved, and how many these are. `near`: only that one
        and its neighbours."""
        fit = self.fit if assumed.price == self.fit.price else replace(self.fit, price=assumed.price)
        sizes = self.sizes
        if near is not None:
            i = sizes.index(near)
            sizes = sizes[max(0, i - 1) : i + 2]
        rate, size = max((self.rate(size, assumed, fit.at(size)), -size) for size in sizes)
        return -size, rate

    def rate(self, size: int, assumed: Assumed, graph: Graph) -> float:
        """Samples a second of the plan of this size, which was made for the profile's prices."""
        plan = self.plan(size)
        schedule = lower(graph, plan.lives)
        predicted = simulate(graph, plan.lives, schedule, rates=assumed.rates(self.rates)).predicted
        seconds = graph.step_seconds + predicted.seconds
        if assumed.recorder_seconds and (schedule.rebuilt or schedule.parked):
            ran = [s.op for steps in schedule.segments.values() for s in steps if isinstance(s, Rebuild)]
            kernels = sum(graph.ops[o].seconds > 0 for o in ran) + sum(op.seconds > 0 for op in graph.ops)
            calls = kernels + 2 * len(schedule.parked)  # a copy, or a codec, each way
            seconds = max(seconds, calls * assumed.price.launch_seconds + assumed.recorder_seconds * len(graph.forward))
        return size / seconds

    def predicted(self, size: int) -> Prediction:
        """Simulated anew, with what codecs allocate."""
        graph, plan = self.fit.at(size), self.plan(size)
        found = simulate(graph, plan.lives, rates=self.rates).predicted
        return replace(found, peak_nbytes=peak_nbytes(graph, plan.lives))
