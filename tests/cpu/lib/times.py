"""Times that are known beforehand instead of those that this machine takes: plans are the same ones, however busy it is, or as
many different ones as there are seeds and made-up machines (tests/cpu/lib/machines.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from lightning_memopt.graph import Graph, Op
from lightning_memopt.plan.rates import Coding, Link, MachineRates
from lightning_memopt.session import times
from lightning_memopt.session.observe.costs import Costs
from lightning_memopt.session.times import Times
from tests.cpu.lib.machines import known, machine

LOOK_SECONDS = 5e-3
"""A solver takes this long between two looks at its clock."""
COSTS = Costs(call=3e-6, argument=3e-7, recorded=1.5e-5, rebuilt=1.5e-5)
FREE = Costs(0.0, 0.0, 0.0, 0.0)
EARLY_UPDATE_SECONDS = 2e-5
RATES = MachineRates(
    name="known beforehand",
    links={
        "disk": Link(out_bytes_per_second=1.5e9, in_bytes_per_second=4e9, out_latency_seconds=8e-5, in_latency_seconds=5e-5)
    },
    codecs={
        "bools": Coding(encode_bytes_per_second=1e9, decode_bytes_per_second=2e9),
        "positive": Coding(encode_bytes_per_second=3e9, decode_bytes_per_second=3e9),
        "block": Coding(encode_bytes_per_second=4e7, decode_bytes_per_second=4e7),
        "gated": Coding(encode_bytes_per_second=8e7, decode_bytes_per_second=1e8),
        "int": Coding(encode_bytes_per_second=1e8, decode_bytes_per_second=1e8),
    },
)


class OfOps(Times):
    """What ops take is measured, by each process for itself. What takes a second to measure is known."""

    costs = COSTS

    def of_our_work(self, measure: Callable[[], Costs]) -> Costs:
        return self.costs

    def of_early_update(self, measure: Callable[[], float]) -> float:
        return EARLY_UPDATE_SECONDS

    def of_transfers(self, measure: Callable[[], MachineRates]) -> MachineRates:
        return RATES


class Known(OfOps):
    """The same on every machine: seconds of an op by what it reads, makes and computes."""

    def now(self) -> float:
        return 0.0

    def solver_clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        looks = itertools.count()
        return lambda: next(looks) * LOOK_SECONDS

    def of_ops(self, graph: Graph, observed: list[Graph]) -> list[float]:
        return [self.of_op(graph, op) for op in graph.ops]

    def of_op(self, graph: Graph, op: Op) -> float:
        return known(graph, op)


class OfMachine(Known):
    """Seconds of an op on the machine that the tests run on."""

    def of_op(self, graph: Graph, op: Op) -> float:
        return machine().seconds(graph, op)


class Linked(Known):
    """Known times, with links of this rate, in bytes a second, to the host and to the disk."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def of_transfers(self, measure: Callable[[], MachineRates]) -> MachineRates:
        link = Link(out_bytes_per_second=self.rate, in_bytes_per_second=self.rate)
        return MachineRates(name="given", links={"host": link, "disk": link})


class Drawn(Known):
    """Known times, each multiplied by a factor drawn from a seed, and our own work for nothing: a seed is a plan."""

    costs = FREE

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def of_op(self, graph: Graph, op: Op) -> float:
        return super().of_op(graph, op) * self.rng.lognormvariate(0, 1)


def given(monkeypatch: pytest.MonkeyPatch, found: Times) -> None:
    """Plans are chosen by these times until the test ends."""
    monkeypatch.setattr(times, "current", found)
