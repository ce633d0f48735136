"""Made-up machines that the tests run on: `pytest --machine NAME`, `make test MACHINE=NAME`.

Plans are chosen by what ops take and hold, and both differ between machines: some are slow at bfloat16, and oneDNN asks for
other workspaces where the processor lacks an instruction set. What a test says holds on each of these machines.

Needs no torch. oneDNN reads its environment at its first op. Processes that tests start inherit it, and the machine's name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_memopt.graph import Graph, Op

OP_SECONDS, BYTES_PER_SECOND, FLOPS_PER_SECOND = 1e-6, 1e9, 8e9
"""One core of a CPU."""

Seconds = Callable[[Graph, Op], float]


def known(graph: Graph, op: Op, op_seconds: float = OP_SECONDS) -> float:
    """Seconds of an op by what it reads, makes and computes. `op_seconds`: what any op takes, however small."""
    nbytes = sum(graph.tensors[t].nbytes for t in {*op.inputs, *op.outputs})
    return op_seconds + nbytes / BYTES_PER_SECOND + op.flops / FLOPS_PER_SECOND


def dear_launches(graph: Graph, op: Op) -> float:
    return known(graph, op, 10 * OP_SECONDS)


def slow_bfloat16(graph: Graph, op: Op) -> float:
    touches = any(graph.tensors[t].dtype == "bfloat16" for t in (*op.inputs, *op.outputs))
    return known(graph, op) * (10 if touches else 1)


def equal(graph: Graph, op: Op) -> float:
    return 10 * OP_SECONDS


def drawn(seed: int) -> Seconds:
    """Known times, each multiplied by a factor drawn from the seed: ops of one name, phase and sizes take the same time."""

    def seconds(graph: Graph, op: Op) -> float:
        sizes = [[graph.tensors[t].nbytes for t in ids] for ids in (op.inputs, op.outputs)]
        return known(graph, op) * random.Random(f"{seed} {op.name} {op.phase} {sizes}").lognormvariate(0, 1)

    return seconds


@dataclass(frozen=True)
class Machine:
    """What differs on a machine.

    seconds: of an op, where a test injects no times of its own.
    environment: variables that oneDNN reads.
    """

    seconds: Seconds = known
    environment: Mapping[str, str] = field(default_factory=dict)


_AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}

STANDARD = "standard"
MACHINES = {
    STANDARD: Machine(),
    "bfloat16": Machine(slow_bfloat16),  # ops of bfloat16 take ten times as long
    "launches": Machine(dear_launches),  # what an op takes, however small, is ten times as long
    "equal": Machine(equal),  # every op takes the same time
    "random-1": Machine(drawn(1)),
    "random-2": Machine(drawn(2), _AVX2),  # other times and other workspaces: CI runs on it
    "avx512": Machine(environment=_AVX512),  # neither AMX nor the instructions for bfloat16
    "avx2": Machine(environment=_AVX2),  # oneDNN takes nothing newer
}
_VARIABLE = "MEMOPT_TESTS_MACHINE"


def enter(name: str) -> None:
    """This process runs on the machine `name` from now on, and so do those that it starts."""
    os.environ.update({_VARIABLE: name, **MACHINES[name].environment})


def machine() -> Machine:
    """The one that the tests run on."""
    return MACHINES[os.environ.get(_VARIABLE, STANDARD)]
