"""Loops whose step is a sequence of calls of a model, and of backwards, in every order."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.robustness.scripts.registry import Log, Watch, fit, rows, script, update


class Net(nn.Module):
    """Blocks of a transformer's feed-forward layers."""

    def __init__(self, depth: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x

    def half(self, x: Tensor, second: bool) -> Tensor:
        for block in self.blocks[2:] if second else self.blocks[:2]:
            x = block(x)
        return x


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@script("A spiking net: one forward a time step, one backward")
def time_steps(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()

    def loss_of(x: Tensor) -> Tensor:
        return torch.stack([model(part).square().mean() for part in x.chunk(6)]).sum()

    return fit(watch, log, model, _adam(model), rows(steps, 384, 32), loss_of)


@script("A sampling chain: each forward begins where the last one ended")
def sampling_chain(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()

    def loss_of(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + 0.1 * model(x) + 0.01 * torch.randn_like(x)
        return x.square().mean()

    return fit(watch, log, model, _adam(model), rows(steps, 64, 32), loss_of)


@script("MAML: an inner step for each task, and the gradient through all of them")
def maml(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net(2)

    def loss_of(x: Tensor) -> Tensor:
        losses = []
        for task in x.chunk(3):
            support, query = task.chunk(2)
            inner = torch.autograd.grad(model(support).square().mean(), list(model.parameters()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), inner, strict=True)}
            losses.append(torch.func.functional_call(model, fast, (query,)).square().mean())
        return torch.stack(losses).mean()

    return fit(watch, log, model, _adam(model), rows(steps, 768, 32), loss_of)


@script("Two crops of different sizes before one backward")
def two_crops(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()

    def loss_of(x: Tensor) -> Tensor:
        return (model(x).mean(0) - model(x[:96]).mean(0)).square().mean()

    return fit(watch, log, model, _adam(model), rows(steps, 384, 32), loss_of)


@script("As many forwards as the data asks for: another number in each step")
def another_number(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()
    optimizer = _adam(model)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 384, 32)):
            parts = x.chunk(6)[: 2 + 7 * i % 5]
            loss = torch.stack([model(part).square().mean() for part in parts]).sum()
            update(optimizer, loss)
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Two models in turns before one backward, each with a run of its own")
def two_in_turns(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    one, other = Net(), Net()
    first, second = _adam(one), _adam(other)
    with watch(one, first), watch(other, second):
        for x in rows(steps, 128, 32):
            for _ in range(3):
                x = other(one(x))
            loss = x.square().mean()
            loss.backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            log(loss.item())
    return {"one": one, "other": other, "first": first, "second": second}


@script("Accumulation: pairs of forwards, each with a backward")
def pairs_accumulated(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()
    optimizer = _adam(model)
    with watch(model, optimizer):
        for x in rows(steps, 512, 32):
            for part in x.chunk(2):
                left, right = part.chunk(2)
                loss = (model(left) - model(right)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Forwards without gradients between those with")
def targets_between(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()

    def loss_of(x: Tensor) -> Tensor:
        losses = []
        for part in x.chunk(3):
            with torch.no_grad():
                target = model(part.flip(0))
            losses.append((model(part) - target).square().mean())
        return torch.stack(losses).sum()

    return fit(watch, log, model, _adam(model), rows(steps, 384, 32), loss_of)


@script("Several forwards of a model that checkpoints its blocks")
def checkpointed_calls(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net(checkpointed=True)

    def loss_of(x: Tensor) -> Tensor:
        return torch.stack([model(part).square().mean() for part in x.chunk(4)]).sum()

    return fit(watch, log, model, _adam(model), rows(steps, 512, 32), loss_of)


@script("The third forward raises in some steps, and the loop goes on")
def third_raises(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()
    optimizer = _adam(model)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 384, 32)):
            losses = []
            for k, part in enumerate(x.chunk(4)):
                with contextlib.suppress(RuntimeError):
                    losses.append(model(part[:, :31] if k == 2 and i % 4 == 3 else part).square().mean())
            loss = torch.stack(losses).sum()
            update(optimizer, loss)
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Methods of a model in turns, several times before one backward")
def halves_in_turns(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Net()

    def loss_of(x: Tensor) -> Tensor:
        losses = [model.half(model.half(part, second=False), second=True).square().mean() for part in x.chunk(4)]
        return torch.stack(losses).sum()

    return fit(watch, log, model, _adam(model), rows(steps, 384, 32), loss_of)


@script("Dropout, BatchNorm and autocast in several forwards")
def noisy_calls(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers)

    def loss_of(x: Tensor) -> Tensor:
        losses = []
        for part in x.chunk(4):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(model(part).float().square().mean())
        return torch.stack(losses).sum()

    return fit(watch, log, model, _adam(model), rows(steps, 512, 32), loss_of)
