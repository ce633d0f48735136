"""Activation checkpointing by the user inside of compiled code: the plan decides in its place, where there is a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_memopt.compiled.joint import Joint
from lightning_memopt.compiled.rewriting import rewrite
from lightning_memopt.solvers import planner
from tests.cpu.compiled.test_joint import splitting, step
from tests.cpu.compiled.training import Forward, Trained, keeping_all, train


class Checkpointed(nn.Module):
    """`kind`: "layers" runs the first two layers again in backward, "selective" all but its products, "none" nothing."""

    def __init__(self, kind: str = "layers", p: float = 0.1) -> None:
        super().__init__()
        self.kind, self.p = kind, p
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(4))

    def layer(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return x + functional.dropout(layer(x), self.p, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if self.kind == "none" or i >= 2:
                x = self.layer(x, layer)
            else:
                options = {"context_fn": selective} if self.kind == "selective" else {}
                x = checkpoint(self.layer, x, layer, use_reentrant=False, **options)
        return x


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def made(kind: str = "layers", p: float = 0.1) -> tuple[nn.Module, Forward]:
    model = Checkpointed(kind, p)
    compiled = torch.compile(model)
    return model, lambda x: compiled(x).square().mean()


@pytest.fixture(scope="module")
def keeps() -> Trained:
    return keeping_all(made)


def test_a_budget_below_the_users_checkpointing_is_kept_with_the_bits_of_keeping_all(keeps: Trained) -> None:
    smallest = train(made, "min")
    budget = smallest.nbytes + (smallest.unmodified_nbytes - smallest.nbytes) * 3 // 4
    within = train(made, budget)
    assert smallest.nbytes < within.nbytes <= budget < smallest.unmodified_nbytes < keeps.nbytes
    for trained in (smallest, within):
        assert trained.has_bits_of(keeps)
        assert "1 of 1 compiled regions run ops again" in trained.text
        assert abs(trained.predicted_nbytes - trained.nbytes) <= 0.01 * trained.nbytes


def test_a_budget_that_the_users_checkpointing_leaves_unused_is_used(keeps: Trained) -> None:
    budget = int(1.01 * keeps.nbytes)
    within = train(made, budget)
    assert within.unmodified_nbytes < 0.9 * budget
    assert within.unmodified_nbytes < within.nbytes <= budget
    assert within.has_bits_of(keeps)


@pytest.mark.parametrize("kind", ["layers", "selective"])
def test_gradients_of_a_plan_are_those_of_the_plain_model(kind: str) -> None:
    """Ops run unfused, and dropout draws from torch's generator: all bits are those of the model without checkpointing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Checkpointed(kind)
    x = torch.randn(64, 48)
    model.kind = "none"
    torch.manual_seed(1)
    plain = step(model, model, x)
    model.kind = kind
    made: list[int] = []

    def plan(module: Any) -> None:
        joint = Joint(module)
        assert joint.checkpointed
        frontier = planner.solve(joint.graph, objective="flops", limit_seconds=5)
        made.append(rewrite(joint, frontier.candidates[0].lives))

    compiled = torch.compile(model, backend=splitting(plan), fullgraph=True)
    torch.manual_seed(1)
    planned = step(model, compiled, x)
    assert made
    assert made[0] > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
