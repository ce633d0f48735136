"""The models of the benchmarks on CUDA within budgets of reserved bytes: kept, predicted within 3 %, equal bit by bit."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from benchmarks.gpu.bench import GpuBench
from benchmarks.lib.bench import MIB
from benchmarks.models.registry import MODELS
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.plan import reserved
from lightning_memopt.runtime import Program
from lightning_memopt.session.observe.resident import resident_tensors
from lightning_memopt.session.observe.workspaces import take_workspaces
from lightning_memopt.session.solve.machine import machine_of
from lightning_memopt.solvers import planner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_budget_is_kept_and_bits_are_equal(name: str, dtype: torch.dtype) -> None:
    def build(device):
        model, batch, blocks = MODELS[name]()
        moved = {k: t.to(device, dtype) if t.is_floating_point() else t.to(device) for k, t in batch.items()}
        return model.to(device, dtype), moved, blocks

    bench = GpuBench(name, build, torch.device("cuda", 0))
    try:
        bench.step()
    except RuntimeError as error:
        lacks = next((lack for lack in ("does not have a deterministic", "not implemented for") if lack in str(error)), None)
        if lacks is None:
            raise
        pytest.skip(f"torch has no kernel for this model: {str(error).partition(lacks)[0]}{lacks} one")
    loss, reference = bench.step(), bench.outcome()
    bench.step()
    if not bench.equal(reference):
        pytest.skip("the unmodified step does not have the same bits twice")
    take_workspaces(bench.model, bench.device)  # from here on as a session does
    graph = bench.observe(steps=2)
    machine = machine_of(bench.device, resident_tensors(bench.model, (), bench.batch))
    frontier = planner.solve(graph, machine)
    assert frontier.reserve is not None
    resident = resident_nbytes(graph)
    unmodified = reserved(graph, frontier.candidates[-1].lives, machine.allocator, beginning=machine.beginning)
    measured = bench.peaks()
    assert abs(measured["allocated_mib"] * MIB / unmodified.allocated_nbytes - 1) <= 0.02
    assert abs(measured["reserved_mib"] * MIB / unmodified.peak_nbytes - 1) <= 0.03
    for share in (0.8, 0.5, 0.25):
        budget = int(resident + share * (unmodified.peak_nbytes - resident))
        try:
            plan = frontier.plan(budget)
        except InfeasibleError as error:
            assert error.smallest_nbytes is not None
            budget = error.smallest_nbytes
            plan = frontier.plan(budget)
        forward = bench.planned(Program(graph, plan.lives))
        bench.step(forward)
        got = bench.step(forward)
        assert torch.equal(got, loss) and bench.equal(reference), f"bits at f={share}"
        del got  # it would hold a segment that the plan knows nothing of
        measured = bench.peaks(forward)
        assert measured["reserved_mib"] * MIB <= budget, f"f={share}"
        assert abs(measured["reserved_mib"] * MIB / plan.predicted.reserved_nbytes - 1) <= 0.03, f"f={share}"
