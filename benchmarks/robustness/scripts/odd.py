"""Loops with something uncommon about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.robustness.scripts.registry import Log, Watch, images, rows, script, tokens


@script("One linear layer, least squares", steps=24)
def line(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = nn.Linear(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truth = torch.arange(12.0)[:, None]
    with watch(model, optimizer):
        for x in rows(steps, 64, 12):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x @ truth)
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


class Tower(nn.Module):
    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _train(model: nn.Module, watch: Watch, log: Log, steps: int, calls: bool = True) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps, 64, 48):
            output = model(x) if calls else model.forward(x)
            loss = F.cross_entropy(output, x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adam": optimizer}


@script("`model.forward(x)` instead of `model(x)`", steps=24)
def forward_method(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    return _train(Tower(), watch, log, steps, calls=False)


@script("Some layers compiled (aot_eager)")
def compiled_parts(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Tower()
    for i in (1, 2):
        model.layers[i].compile(backend="aot_eager")
    return _train(model, watch, log, steps)


@script("The whole model compiled (aot_eager)", steps=24)
def compiled(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    return _train(torch.compile(Tower(), backend="aot_eager"), watch, log, steps)


class Checkpointed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@script("Layers under torch.utils.checkpoint already")
def checkpointed(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    return _train(Checkpointed(), watch, log, steps)


class Centred(Tower):
    """Its first op saves nothing of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - 0.1) / 1.1)


@script("A static batch: refilled in place before backward has run")
def static_batch(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = list(rows(steps + 1, 64, 48))
    x = data[0].clone()
    with watch(model, optimizer):
        for after in data[1:]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            x.copy_(after)
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


class Masked(nn.Module):
    """Embeddings whose norm is bounded, in place, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32, max_norm=1.0)
        self.read, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 40)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.read(self.embed(ids).transpose(1, 2)).relu().transpose(1, 2)
        self.seen.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return self.head(h - self.seen)


@script("Two forwards before one backward; each changes a running mean and bounds embeddings in place")
def bounded_norms(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for ids in tokens(steps, (2, 16, 12)):
            one, other = model(ids[0]), model(ids[1])
            loss = F.cross_entropy(one.flatten(0, 1), ids[0].flatten()) + F.mse_loss(one, other)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


class Unrolled(nn.Module):
    """Applies one layer as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer, self.head = nn.Linear(256, 48), nn.Linear(48, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.into(x.flatten(1))
        for _ in range(times):
            x = x + torch.tanh(self.layer(x))
        return self.head(x)


@script("A size that no tensor shows: the layer runs more often later in training", steps=24)
def unrolled(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Unrolled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for i, (x, y) in enumerate(images(steps, 64)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, 3 if i < steps // 2 else 6), y)
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


class Energy(nn.Module):
    """Its output is the slope of a scalar network, taken inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.out = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda at: self.network(at).sum())(x)
        return self.out(F.silu(slope))


@script("`torch.func.grad` around a submodule, inside the forward")
def slopes(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    return _train(Energy(), watch, log, steps)
