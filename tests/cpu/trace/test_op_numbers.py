"""A recorded call has the id of its op in the observed graph, also behind ops that the recorder does not see or that raised."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.trace import unrecorded_op


class Tries(nn.Module):
    """Runs code that no recorder sees, or calls an op that raises and goes on without its result."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.raises = raises
        self.unseen: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.raises:
            with contextlib.suppress(RuntimeError):
                x @ x.new_zeros(3, 3)
        with self.unseen:
            pass
        return torch.sigmoid(self.last(x))


@pytest.mark.parametrize("raises", [False, True], ids=["unseen", "raised"])
def test_numbers_of_calls_are_ids_of_ops(raises: bool) -> None:
    model, batch = Tries(raises), torch.randn(4, 8)
    observation = Observation(model, [], torch.device("cpu"), None, verify=False, meter=False)
    try:
        recording = observation.begin_round(batch)
        tracer, engine, _ = observation._round  # type: ignore[misc]
        if not raises:
            model.unseen = unrecorded_op(tracer, "generated code")
        with recording:
            loss = model(batch).sum()
        observation.forward_ended()
        calls = [version.call for version in engine.tape.versions.values() if version.call is not None]
        names = {call.op: call.func._schema.name for call in calls}
        assert engine.clock > max(names), "eviction takes the age of a tensor from both"
        loss.backward()
        graph = observation.finish()
    finally:
        observation.abandon()
    assert graph is not None
    seen = [op.name.partition(".")[0] for op in graph.ops]
    assert ("generated code" in seen) is not raises and "aten::sigmoid" in names.values()
    assert {op: seen[op] for op in names} == names
