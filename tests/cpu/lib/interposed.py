"""Run with interposed.cpp loaded first: steps of ten models, counted by it and by the native counter. Prints what differs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.native import counter
from tests.cpu.lib.models import Calls

torch.set_num_threads(1)
F = nn.functional


def _gcn(x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    edges = torch.eye(16).to_sparse()
    return torch.sparse.mm(edges, other(torch.sparse.mm(edges, one(x)).relu()))


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), *between, nn.Linear(64, 32))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 32),
    "gelu": lambda: mlp(nn.GELU()),
    "dropout": lambda: mlp(nn.Dropout(0.2), nn.ReLU()),
    "batch norm": lambda: mlp(nn.BatchNorm1d(64)),
    "in place": lambda: mlp(nn.ReLU(inplace=True)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3, padding=1), nn.Flatten()),
    "attention": lambda: nn.Sequential(nn.Unflatten(1, (4, 8)), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "recurrent": lambda: Calls(lambda x, rnn: rnn(x.unflatten(1, (4, 8)))[0], nn.LSTM(8, 16)),
    "checkpoint": lambda: Calls(lambda x, f: checkpoint(f, x, use_reentrant=False), mlp(nn.Dropout(0.1))),
    "sparse": lambda: Calls(_gcn, nn.Linear(32, 16), nn.Linear(16, 16)),
}


def main() -> None:
    seen = ctypes.CDLL(None)
    for name in ("interposed_live", "interposed_peak"):
        getattr(seen, name).restype = ctypes.c_long
    for name, build in MODELS.items():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(16, 32)
        with optimize(model, optimizer, budget="min", verbose=False, profile_steps=1):
            counts = counter()
            assert counts is not None
            window = counts.window()
            assert window is not None
            beside = seen.interposed_live() - counts.live_nbytes  # torch's own, from before
            for i in range(3):
                seen.interposed_reset()
                window.reset()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                theirs = seen.interposed_live() - beside, seen.interposed_peak() - beside
                ours = counts.live_nbytes, window.peak_nbytes
                if theirs != ours or ours[1] <= ours[0]:
                    print(f"{name}, step {i}: {theirs} against {ours}")
            window.close()
    print("compared", len(MODELS))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
