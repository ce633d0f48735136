"""Planned steps whose forward is not the observed one: what still matches is planned, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import agrees, batches, budget_at, small, train


class Measured(nn.Module):
    """Layer norms, each with parameters of its own, after metrics that are taken in some calls only."""

    def __init__(self, calls: range) -> None:
        super().__init__()
        self.inner = small(depth=6)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(6))
        self.calls, self.count = calls, 0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        h = inner.norm(inner.embed(x))
        for layer, norm in zip(inner.layers, self.norms, strict=True):
            if self.count in self.calls:
                (h.detach().abs().amax(-1) * 2).mean()
            h = h + inner.dropout(nn.functional.gelu(layer(norm(h))))
        self.count += 1
        return inner.head(h)


@pytest.mark.parametrize("calls", [range(0, 3), range(4, 6)], ids=["observed", "later"])
def test_the_first_op_out_of_turn_holds_what_its_rebuild_starts_from(calls: range) -> None:
    """A layer norm that comes before its turn is known only after it ran: its weight must have been held all the same."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Measured(calls)

    def use(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, batches(7))

    run = agrees(use, build, profile_steps=3)
    state = state_of(run)
    assert isinstance(state, Running) and not state.drift.deviated
    rebuilt = {state.program.graph.ops[op].name for op in state.program.schedule.rebuilt}
    assert "aten::native_layer_norm" in rebuilt


class Skipping(nn.Module):
    """A layer that is left out in some calls, as LayerDrop does."""

    def __init__(self, calls: set[int]) -> None:
        super().__init__()
        self.inner = small(depth=6)
        self.calls, self.count = calls, 0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        h = inner.norm(inner.embed(x))
        for i, layer in enumerate(inner.layers):
            if i not in (1, 2) or self.count not in self.calls:
                h = h + inner.dropout(nn.functional.gelu(layer(h)))
        self.count += 1
        return inner.head(h)


def test_a_plan_is_made_for_the_longest_forward_that_was_observed() -> None:
    """A plan for the shortest forward would keep whole layers in the steps that run all of them."""

    def build(calls: set[int]) -> nn.Module:
        torch.manual_seed(0)
        return Skipping(calls)

    def use(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, batches(7))

    whole = agrees(use, lambda: build(set()), profile_steps=3)
    budget = budget_at(whole, 0.5)
    run = agrees(use, lambda: build({0, 4}), profile_steps=3, budget=budget)
    state = state_of(run)
    assert isinstance(state, Running) and whole.status().phase == "planned"
    assert len(state.program.graph.forward) == len(state_of(whole).program.graph.forward)
    assert state.peaks.measured_nbytes is not None and state.peaks.measured_nbytes <= budget and not state.past.replanned


class Aside(nn.Module):
    """A head without a loss: its output is made before the layers that matter and lives until they have run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small(depth=6)
        self.aside = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        h = other = inner.norm(inner.embed(x))
        for layer in self.aside:
            other = nn.functional.gelu(layer(other)).exp()
        for layer in inner.layers:
            h = h + inner.dropout(nn.functional.gelu(layer(h)))
        out = inner.head(h)
        del other
        return out


def test_what_autograd_saves_and_never_asks_for_is_counted() -> None:
    """It stays until its graph is freed, whatever the plan. If it is left out, the budget is exceeded without a message before
    the step.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Aside()

    def use(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return train(model, optimizer, batches(6))

    state = state_of(agrees(use, build, profile_steps=3))
    assert isinstance(state, Running) and state.peaks.measured_nbytes is not None
    assert state.peaks.measured_nbytes <= 1.001 * state.plan.predicted_peak_nbytes
