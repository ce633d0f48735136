"""`compile=True`: which modules are compiled, that they keep the budget, and that they are the user's again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memopt import optimize
from lightning_memopt.session.regions.compiling import repeated_blocks
from tests.cpu.compiled.training import counted, losses_of
from tests.cpu.lib.said import Said


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(48, 48), nn.Linear(48, 96)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x)
        return functional.gelu(self.head(x)).square().mean()


def test_blocks_are_the_outermost_modules_of_a_list_that_have_modules() -> None:
    net = Net()
    assert set(repeated_blocks(nn.Sequential(net, nn.Linear(2, 2), nn.Linear(2, 2)))) == set(net.blocks)
    assert repeated_blocks(Net(blocks=1)) == []
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block()))
    assert set(repeated_blocks(stages)) == set(stages)


def train(budget: Any, compile: bool = True, net: nn.Module | None = None, verbose: bool = False) -> Any:
    torch._dynamo.reset()
    gc.collect()
    net = Net() if net is None else net
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    torch.manual_seed(1)
    options: Any = {"profile_steps": 1, "solver_seconds": 2, "verbose": verbose, "compile": compile}
    with optimize(net, optimizer, budget=budget, **options) as run:
        losses = losses_of(net, optimizer, 9)
        status = run.status()
    return losses, [p.detach().clone() for p in net.parameters()], status, net


def test_repeated_blocks_are_compiled_once_and_planned(said: Said) -> None:
    counted()
    torch._dynamo.utils.counters.clear()
    *least, status, net = train("min", verbose=True)
    assert "MemOpt: compiling 4 Block\n" in said.taken()
    assert "1 of 1 compiled regions run ops again" in status.compiled  # one region, called four times
    assert not any(vars(module).get("_compiled_call_impl") for module in net.modules())
    *most, unplanned, _ = train("50%")
    assert status.measured_peak_nbytes < 0.8 * unplanned.measured_peak_nbytes
    assert abs(status.plan.predicted.peak_nbytes - status.measured_peak_nbytes) <= 0.01 * status.measured_peak_nbytes
    assert least[0] == pytest.approx(most[0], rel=1e-5)  # torch's own split may differ in the last bits


def test_a_model_without_repeated_blocks_is_compiled_whole_and_a_compiled_one_stays(said: Said) -> None:
    counted()
    train("50%", net=Net(blocks=1), verbose=True)
    assert "compiling the whole model, which has no repeated blocks" in said.taken()
    users = Net(blocks=1)
    users.compile(backend="aot_eager")
    own = vars(users)["_compiled_call_impl"]
    train("50%", net=users, verbose=True)
    assert "compiled already" in said.taken()
    assert vars(users)["_compiled_call_impl"] is own
