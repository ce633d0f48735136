"""Small models, and training of them on the emulated device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memopt import optimize

CUDA = torch.device("cuda", 0)


class Dropouts(nn.Module):
    """Dropout, tied weights, and small tensors that no op of the forward reads anything for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + torch.arange(7, device=tokens.device).float().mean()
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.embedding.weight.T).logsumexp(-1).mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(), nn.LazyLinear(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.size(1), 64), x.new_zeros(x.size(1), 64)
        for part in x:
            state = self.cell(part, state)
        return state[0].square().mean()


class Attention(nn.Module):
    """Fused attention: the flash kernel's in 16 bits, the efficient one's in 32. Its log-sum-exps have padding."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(256, 768), nn.Linear(256, 256))) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for whole, out in self.layers:
            parts = whole(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
            attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(-2)).tanh()
        return x


class Halves(nn.Module):
    """Its middle is on another device."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64)) for _ in range(6)]
        self.ends, self.middle = nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])

    def to(self, device: torch.device) -> Halves:  # type: ignore[override]
        self.devices = device, torch.device("cuda", 1 - device.index)
        self.ends.to(self.devices[0]), self.middle.to(self.devices[1])
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.ends(x).to(self.devices[1]))
        return self.ends(x.to(self.devices[0])).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.device], torch.Tensor]]] = {
    "dropout, tied weights": (Dropouts, lambda n, device: torch.randint(50, (16 * n, 32), device=device)),
    "convolutions, BatchNorm": (Convolutions, lambda n, device: torch.randn(8 * n, 3, 24, 24, device=device)),
    "cells": (Cells, lambda n, device: torch.randn(20, 64 * n, 32, device=device)),
}
"""Name -> the model, and a function that makes a batch of it, `n` times as large."""


@dataclass
class Trained:
    """What a run leaves.

    values: losses and gradients of all steps, then parameters and buffers.
    status: of the session at its end; None without one.
    requested, allocated, reserved: the most bytes of the last step: as asked for, in whole blocks, and of segments.
    """

    values: list[torch.Tensor]
    status: Any
    requested: int
    allocated: int
    reserved: int

    def same(self, other: Trained) -> bool:
        """Whether both have the same bits."""
        return len(self.values) == len(other.values) and all(map(torch.equal, self.values, other.values))


def train(
    model: str,
    budget: str | int | None,
    autocast: bool = False,
    *,
    times: int = 1,
    steps: int = 7,
    device: torch.device = CUDA,
    last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    warned: str = "",
    **options: Any,
) -> Trained:
    """Train with this budget; None: without a session. `times`: the batch's size. `last`: is entered for the last step.
    `warned`: how a warning begins that is printed; others are errors.
    """
    torch.manual_seed(0)
    make, batch = MODELS[model]
    trained = make().to(device)
    trained(batch(times, device))  # lazy modules
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    session: AbstractContextManager[Any] = nullcontext()
    if budget is not None:
        session = optimize(trained, optimizer, budget=budget, **({"verbose": False, "max_slowdown": float("inf")} | options))
    seen: list[torch.Tensor] = []
    with warnings.catch_warnings(), session as run:
        warnings.simplefilter("error")
        if warned:
            warnings.filterwarnings("always", warned)
        for step in range(steps):
            torch.cuda.reset_peak_memory_stats(device)
            with last() if step == steps - 1 else nullcontext():
                x = batch(times, device)
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = trained(x)
                loss.backward()
                seen += [loss.detach().cpu(), *(p.grad.detach().cpu() for p in trained.parameters() if p.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
                del loss, x
            peaks = torch.cuda.memory_stats(device)
        status = None if run is None else run.status()
    values = [*seen, *(t.detach().cpu() for t in trained.state_dict().values())]
    found = (peaks[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved"))
    return Trained(values, status, *found)
