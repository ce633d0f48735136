"""Fabric loops of a few steps, run by Fabric's own strategy and within a plan; everything that a loop leaves is compared."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_memopt import MemOptFabricStrategy
from lightning_memopt.graph import resident_nbytes
from tests.cpu.lib.fits import assert_same_tree

STEPS, SAVED_AT = 10, 5
QUIET: dict[str, Any] = dict(verbose=False, profile_steps=1, solver_seconds=0.3)


def convolutions() -> nn.Module:
    """Convolutions, BatchNorm, in-place ReLUs and dropout on images `[n, 1, 8, 8]`."""
    layers = [nn.Conv2d(1, 8, 3, padding=1)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1)]  # type: ignore[list-item]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def gpt2() -> nn.Module:
    import transformers

    sizes = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))


def loss_of(model: Any, step: int, part: int) -> Tensor:
    """The loss of the batch of a step, or of a part of it, which are the same in every run."""
    draw = torch.Generator().manual_seed(100 * step + part)
    if hasattr(model, "transformer"):
        ids = torch.randint(0, 64, (8, 16), generator=draw)
        return model(input_ids=ids, labels=ids).loss
    images, labels = torch.randn(32, 1, 8, 8, generator=draw), torch.randint(0, 10, (32,), generator=draw)
    return nn.functional.cross_entropy(model(images), labels)


def fabric_of(strategy: Any, **options: Any) -> Fabric:
    return Fabric(strategy=strategy, accelerator="cpu", **({"devices": 1} | options))


def train(fabric: Any, build: Any, kind: str, first: int = 0, last: int = STEPS, folder: Path | None = None) -> dict[str, Any]:
    """All that a loop leaves: `kind` is what it does besides training. From `first` on it goes on from the file in `folder`."""
    torch.manual_seed(0)
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS) if kind == "schedule" else None
    model, optimizer = fabric.setup(module, optimizer)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind == "ema" else None
    parts, losses = (2 if kind == "accumulation" else 1), []
    torch.manual_seed(1)
    state = {"model": model, "optimizer": optimizer, "generator": torch.get_rng_state()}
    if first:
        assert folder is not None
        fabric.load(folder / "last.ckpt", state)
        torch.set_rng_state(state["generator"])
    for step in range(first, last):
        for part in range(parts):
            with fabric.no_backward_sync(model, enabled=part < parts - 1):
                loss = loss_of(model, step, part)
                fabric.backward(loss / parts)
            losses.append(loss.detach())
        if kind == "clipping":
            losses.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        if average is not None:
            average.update_parameters(module)
    state["generator"] = torch.get_rng_state()
    if folder is not None and last < STEPS:
        fabric.save(folder / "last.ckpt", state)
    left = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "generator": torch.get_rng_state(),
        "average": None if average is None else average.state_dict(),
    }
    return torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, left) | {"wrapper": model}


def within(budget: Any = "min", **options: Any) -> MemOptFabricStrategy:
    return MemOptFabricStrategy(budget=budget, **(QUIET | options))


@cache
def middle(build: Any, kind: str, **options: Any) -> int:
    """A budget halfway between the smallest plan's peak and the unmodified step's."""
    fabric = fabric_of(within(), **options)
    left = train(fabric, build, kind, last=3)
    frontier = fabric.strategy.run(left["wrapper"]).status().frontier  # type: ignore[attr-defined]
    fabric.strategy.close()  # type: ignore[attr-defined]  # its hooks would stay until Fabric, which refers to itself, is collected
    assert frontier is not None and resident_nbytes(frontier.graph) < frontier.smallest_nbytes
    return (frontier.smallest_nbytes + frontier.unmodified_peak_nbytes) // 2


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in one.keys() - {"wrapper"}:
        assert_same_tree(one[key], other[key])
