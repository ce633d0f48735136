"""What a search changed is put back, bit by bit and in place (L4)."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_memopt.batching import untouched
from tests.cpu.lib.searches import same


class Everything(nn.Module):
    """Keeps all sorts of state in its forward, and not only in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("ema", torch.zeros(4))
        self.calls, self.seen, self.cache, self.names = 0, [1], {"a": torch.ones(2)}, {"x"}
        self.last: deque[int] = deque([1, 2], maxlen=2)
        self.numbers = np.random.default_rng(0)
        self.drawn = random.Random(0)
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["a"] += 1
        self.cache["b"] = x.detach()
        self.names.add("y")
        self.last.append(self.calls)
        self.numbers.random(), self.drawn.random(), torch.rand(1, generator=self.own)
        random.random(), np.random.rand(), torch.rand(1)
        self.ema = self.ema * 0.9 + x.detach().mean(0)
        self.added = True
        return self.norm(self.linear(x))

    def everything(self) -> list[Any]:
        return [
            len(self.state_dict()), *(v.clone() for v in self.state_dict().values()),
            self.calls, list(self.seen), sorted(self.cache), self.cache["a"].clone(), sorted(self.names), list(self.last),
            self.numbers.bit_generator.state, self.drawn.getstate(), self.own.get_state(), hasattr(self, "added"),
            random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), self.linear.training,
        ]  # fmt: skip


def test_l4_attributes_containers_and_generators_are_put_back_in_place() -> None:
    model = Everything()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    x = torch.randn(8, 4)
    model(x).sum().backward()
    before, containers = model.everything(), [id(v) for v in (model.seen, model.cache, model.names, model.last)]
    weight, grad, group = model.linear.weight, model.linear.weight.grad, optimizer.param_groups[0]
    kept = grad.clone()  # type: ignore[union-attr]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with untouched(model, optimizer, schedule):
        for _ in range(2):
            optimizer.step(closure)
            schedule.step()
        model.linear.weight.data = torch.zeros(4, 4)
        model.linear.eval()
        model.norm = nn.BatchNorm1d(4)
        assert group["lr"] < 1
    assert same(before, model.everything())
    assert containers == [id(v) for v in (model.seen, model.cache, model.names, model.last)]
    assert model.linear.weight is weight and weight.grad is grad and torch.equal(grad, kept)  # type: ignore[arg-type]
    assert group["lr"] == 1 and schedule.last_epoch == 0 and not optimizer.state[weight]
    assert group is optimizer.param_groups[0]


def test_l4_views_ties_and_other_layouts_are_put_back() -> None:
    storage = torch.arange(12.0)
    model = nn.Module()
    model.register_buffer("rows", storage.view(3, 4))
    model.register_buffer("part", storage[2:5])
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("nothing", torch.empty(0))
    with untouched(model):
        model.rows.zero_()
        model.sparse.mul_(3)
    assert torch.equal(storage, torch.arange(12.0)) and torch.equal(model.part, storage[2:5])
    assert model.part.data_ptr() == storage[2:].data_ptr()
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))


def test_what_was_noted_is_still_torchs_own_memory() -> None:
    """A storage that numpy has seen counts as another library's: plans would not rebuild from such weights."""
    model = nn.Linear(4, 4)
    with untouched(model):
        pass
    assert model.weight.untyped_storage().resizable()
