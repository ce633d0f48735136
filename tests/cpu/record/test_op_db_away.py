"""Exactness over torch's own tables of operators and modules with everything away that may go: one step observed, then two in
which every tensor that autograd saves and user code lets go of is written to disk (masks as bits first) and fetched again.

Whatever `op_db` offers first for an operator, in float32 (complex64 where it has no other), and the first samples of modules.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from lightning_memopt.graph import Graph
from lightning_memopt.runtime import PlannedEngine, Program
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier
from lightning_memopt.solvers.offload.trips import Form, TripPlanner, send_away
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.planned_engine import engine_of
from tests.cpu.lib.stepped import Free
from tests.cpu.lib.sweeps import Count, assert_none_differs, sweep
from tests.cpu.record.test_op_db import UNINITIALISED, calls
from tests.cpu.record.test_op_db_planned import Steps, verdict_of

from torch.testing._internal.common_methods_invocations import op_db  # isort: skip  # after the stub for expecttest
from torch.testing._internal.common_modules import module_db  # isort: skip

PARTS = 4
ROUNDS = 2
MODULE_SAMPLES = 3


@functools.cache
def depot() -> Depot:
    return Depot({"disk": DiskTier(1 << 26)})


class AwaySteps(Steps):
    """Steps under a plan that sends everything away, counted by what came back."""

    def program(self, graph: Graph) -> Program:
        lives = keep_all(graph)
        planner = TripPlanner(graph, lives, Free())
        forms: dict[int, Form] = {t: self._form(graph, t) for t in planner.gaps}
        return Program(graph, send_away(lives, planner.plan(forms)))

    @staticmethod
    def _form(graph: Graph, t: int) -> Form:
        tensor = graph.tensors[t]
        if tensor.dtype == "bool" and tensor.nbytes > 1 and t % 2:
            return "bools", -(-tensor.nbytes // 8)
        return "disk", tensor.nbytes

    def engine(self, program: Program) -> PlannedEngine:
        self.before = depot().moved_nbytes
        return engine_of(program, verify=True, depot=depot())

    def rebuilt(self, engine: PlannedEngine) -> int:
        return depot().moved_nbytes - self.before


def sweep_away(op: Any, count: Count) -> None:
    if op.name in UNINITIALISED or not op.supports_autograd:
        return
    supported = op.supported_dtypes("cpu")
    dtype = torch.float32 if torch.float32 in supported else torch.complex64
    if dtype not in supported:
        return
    torch.manual_seed(3)
    for sample in op.sample_inputs_func(op, "cpu", dtype, True):
        for suffix, call, inputs in calls(op, sample):
            verdict_of(AwaySteps(call, inputs), f"{op.name}{op.variant_test_name}{suffix}", count, ROUNDS)
        break


def sweep_module(info: Any, count: Count) -> None:
    torch.manual_seed(3)
    samples = list(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True))
    for i, sample in list(enumerate(samples))[:: max(1, -(-len(samples) // MODULE_SAMPLES))]:
        built, given = sample.constructor_input, sample.forward_input
        if given is None:
            continue
        torch.manual_seed(11)
        module = info.module_cls(*built.args, **built.kwargs).to(torch.float32).train()
        if info.is_lazy:
            with torch.no_grad():
                module(*given.args, **given.kwargs)  # makes its parameters

        def call(args: Any, kwargs: Any, module: Any = module) -> Any:
            return module(*args, **kwargs)

        steps = AwaySteps(call, (given.args, given.kwargs), model=module)
        verdict_of(steps, f"{info.name} #{i} {sample.desc}", count, ROUNDS)


@pytest.mark.parametrize("part", range(PARTS))
def test_p1_no_operator_differs_with_everything_away(part: int) -> None:
    count = sweep(op_db[part::PARTS], sweep_away)
    assert_none_differs(count)
    print(len(count.dropped), len(count.nothing), count.skipped)
    assert len(count.dropped) >= 60, (len(count.dropped), len(count.nothing), count.skipped)
    assert depot().tiers["disk"].used_nbytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", range(PARTS))
def test_p1_no_module_differs_with_everything_away(part: int) -> None:
    count = sweep(module_db[part::PARTS], sweep_module)
    assert_none_differs(count)
    assert len(count.dropped) >= 40 and not count.skipped, (len(count.dropped), len(count.nothing), count.skipped)
    assert depot().tiers["disk"].used_nbytes == 0  # type: ignore[attr-defined]
