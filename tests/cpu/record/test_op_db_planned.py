"""Exactness of planned steps over torch's own table of operators: one step observed, a plan that drops what it can, three
steps under it, of which the last two meet templates. The first samples of every operator, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_memopt.graph import Graph
from lightning_memopt.runtime import PlannedEngine, Program
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from tests.cpu.lib.harness import draws
from tests.cpu.lib.planned_engine import engine_of
from tests.cpu.lib.sweeps import Count, Ran, assert_none_differs, dense, judge, poison, seed_of, sweep
from tests.cpu.record.test_op_db import UNINITIALISED, calls

from torch.testing._internal.common_methods_invocations import op_db  # isort: skip  # after the stub for expecttest

pytestmark = pytest.mark.long

SAMPLES = 2
ROUNDS = 3
PARTS = 4


class Steps:
    """`call(*inputs)` between ops that are rebuilt too, as steps: plain, observed or planned."""

    def __init__(self, call: Callable[..., Any], inputs: Any, device: str = "cpu", model: nn.Module | None = None) -> None:
        self.call, self.inputs, self.device = call, inputs, torch.device(device)
        self.model = nn.Module() if model is None else model
        self.state = {name: b.clone() for name, b in self.model.state_dict().items() if isinstance(b, torch.Tensor)}

    def _fresh(self, turn: int) -> Any:
        scale = 1.0 - turn / 1024
        self.model.load_state_dict(self.state, strict=False)
        return tree_map_only(
            torch.Tensor,
            lambda t: (t.detach() * scale if t.is_floating_point() else t.detach().clone()).requires_grad_(t.requires_grad),
            self.inputs,
        )

    def _forward(self, fresh: Any) -> list[torch.Tensor]:
        out = self.call(*tree_map_only(torch.Tensor, lambda t: t.clone(), fresh))
        return [dense(t) * 1.0 if t.is_floating_point() else dense(t).clone() for t in _tensors(out)]

    def _end(self, out: list[torch.Tensor], fresh: Any) -> Ran:
        roots = [t for t in out if t.requires_grad]
        wanted = [t for t in (*_tensors(fresh), *self.model.parameters()) if t.requires_grad]
        grads: list[torch.Tensor | None] = []
        if roots and wanted:
            found = torch.autograd.grad(roots, wanted, [seed_of(t) for t in roots], allow_unused=True)
            grads = [None if g is None else dense(g) for g in found]
        buffers = {f"buffer {name}": b.clone() for name, b in self.model.named_buffers()}
        return Ran([t.detach() for t in out], grads, draws(), buffers)

    def plain(self, turn: int) -> Ran:
        torch.manual_seed(turn)
        fresh = self._fresh(turn)
        return self._end(self._forward(fresh), fresh)

    def observed(self) -> Program:
        torch.manual_seed(0)
        fresh = self._fresh(0)
        observation = Observation(self.model, [], self.device, None, verify=True, meter=False)
        try:
            with observation.begin_round(fresh):
                out = self._forward(fresh)
            observation.forward_ended()
            self._end(out, fresh)
            graph = observation.finish()
        finally:
            observation.abandon()
        assert graph is not None
        return self.program(graph)

    def program(self, graph: Graph) -> Program:
        return Program(graph, recompute_everything(graph))

    def engine(self, program: Program) -> PlannedEngine:
        return engine_of(program)

    def rebuilt(self, engine: PlannedEngine) -> int:
        return len(engine.rebuilt_ops)

    def planned(self, turn: int, program: Program) -> Ran:
        torch.manual_seed(turn)
        fresh = self._fresh(turn)
        engine = self.engine(program)
        with PlannedRecording(engine, self.model):
            out = self._forward(fresh)
        poison()
        found = self._end(out, fresh)
        found.rebuilt = self.rebuilt(engine)
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def verdict_of(steps: Steps, name: str, count: Count, rounds: int = ROUNDS) -> None:
    def planned() -> list[Ran]:
        program = steps.observed()
        return [steps.planned(turn, program) for turn in range(rounds)]

    judge(lambda: [steps.plain(turn) for turn in range(rounds)], planned, lambda ran: bool(ran.rebuilt), name, count)


def sweep_planned(op: Any, count: Count, device: str = "cpu", dtype: torch.dtype = torch.float32, most: int = SAMPLES) -> None:
    """Verdicts over the first samples of an operator."""
    if op.name in UNINITIALISED or not op.supports_autograd or dtype not in op.supported_dtypes(device):
        return
    torch.manual_seed(3)
    for i, sample in zip(range(most), op.sample_inputs_func(op, device, dtype, True), strict=False):
        for suffix, call, inputs in calls(op, sample):
            verdict_of(Steps(call, inputs, device), f"{op.name}{op.variant_test_name}{suffix} #{i}", count)


@pytest.mark.parametrize("part", range(PARTS))
def test_p1_no_operator_differs_in_planned_steps(part: int) -> None:
    count = sweep(op_db[part::PARTS], sweep_planned)
    assert_none_differs(count)
    assert len(count.dropped) >= 100, (len(count.dropped), len(count.nothing), count.skipped)
