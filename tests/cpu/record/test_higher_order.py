"""Control flow as operators (`cond`, `map`, `scan`, `while_loop`), torch's own samples of these, and of custom functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import agrees
from tests.cpu.lib.sweeps import Count, assert_none_differs
from tests.cpu.record.test_op_db import sweep_op

from torch._higher_order_ops import map as mapped  # type: ignore[attr-defined]  # isort: skip
from torch._higher_order_ops.scan import scan  # isort: skip
from torch._higher_order_ops.while_loop import while_loop  # isort: skip
from torch.testing._internal.autograd_function_db import autograd_function_db  # isort: skip  # after the stub for expecttest
from torch.testing._internal.custom_op_db import custom_op_db  # isort: skip
from torch.testing._internal.hop_db import hop_db  # isort: skip

WIDTH = 16


def branches(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: a(x).tanh(), lambda x: b(x).sin(), (x,))


def rows(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return mapped(lambda row, bias: (row.sin() * bias).tanh(), a(x).tanh(), b.bias)


def steps(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row.sin(), carry * row), torch.zeros(WIDTH), b(a(x).tanh()))[1]


def repeats(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """`while_loop` itself has no gradient."""
    more = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x.detach()))[1]
    return b((a(x) + more).tanh())


class Controlled(nn.Module):
    def __init__(self, flow: Callable[[nn.Module, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.flow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), flow

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.sigmoid(x + self.flow(self.a, self.b, x).exp())
        return x


@pytest.mark.parametrize("options", [{}, {"offload": "disk"}], ids=["rebuilt", "away"])
@pytest.mark.parametrize("flow", [branches, rows, steps, repeats])
def test_control_flow_as_an_operator(flow: Callable[..., Tensor], options: dict[str, str]) -> None:
    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for seed in range(5):
            loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Controlled(flow)

    run = agrees(use, build, **options)
    state = state_of(run)
    assert state.plan.predicted.needed_nbytes >= state.peaks.measured_nbytes  # type: ignore[union-attr]


def test_torchs_own_samples() -> None:
    count = Count()
    for op in (*hop_db, *autograd_function_db, *custom_op_db):
        sweep_op(op, count, wanted={torch.float32: 3})
    assert_none_differs(count)
    assert {"map.simple", "invoke_subgraph.simple", "CubeGenVmapAutogradFunction"} <= set(count.dropped)
