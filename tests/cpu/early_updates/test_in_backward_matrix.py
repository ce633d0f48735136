"""Updates in backward in a Trainer: every optimizer with every feature, alone and all at once (P19, F1, F9 to F11, D4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.cpu.lib.early import ALWAYS, OPTIMIZERS, counted
from tests.cpu.lib.fits import Task, assert_same_tree, fit, loader, memopt, outcome, session_of


class Net(nn.Module):
    """Matrices alone, which all optimizers take. `tied`: head and embedding. One matrix is used on cut batches alone."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.seldom = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + nn.functional.dropout(nn.functional.gelu(layer(h)), 0.1)
        return self.head(self.seldom(h) if len(x) < 16 else h)


class Learner(Task):
    """`name`: of the optimizer; two groups, one learning rate each; step hooks are counted."""

    def __init__(self, name: str, tied: bool = False, cycle: bool = False) -> None:
        super().__init__()
        self.net = Net(tied)  # type: ignore[assignment]
        self.name, self.cycle, self.steps = name, cycle, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        *most, last = self.parameters()
        optimizer = OPTIMIZERS[self.name]([{"params": most}, {"params": [last], "lr": 3e-3}])
        optimizer.register_step_post_hook(self.stepped)
        if not self.cycle:
            return optimizer
        momentum = {"cycle_momentum": not optimizer.defaults.keys().isdisjoint(["momentum", "betas"])}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=40, **momentum)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def stepped(self, *_: Any) -> None:
        self.steps += 1


def ema() -> list[pl.Callback]:
    found = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging
    return [found(decay=0.9)]


CUT: dict[str, Any] = {"cut": 8}
"""Samples of the last batch of an epoch, which another matrix is for."""
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2},
    "cycle": {"task": {"cycle": True}},
    "ema": {"callbacks": ema},
    "tied": {"task": {"tied": True}},
    "resumed": {"resume": True},
}
ALL = {k: v for one in ALONE.values() for k, v in one.items()} | CUT | {"max_epochs": 4, "task": {"cycle": True, "tied": True}}
FEATURES = ALONE | {"all at once": ALL}


def learn(strategy: Any, name: str, saved: Path, cut: int = 24, **options: Any) -> tuple[pl.Trainer, dict[str, Any]]:
    """The fit and what it leaves; `resume`: from what the plain Trainer saved after its first epoch."""
    options = {"max_epochs": 2} | options | dict(cls=Learner, task={"name": name} | options.get("task", {}))
    options["data"] = lambda: loader(count=48 + cut, size=24)
    with torch.random.fork_rng():
        if options.pop("resume", False):
            if strategy == "auto":
                fit(strategy, **options | {"max_epochs": 1}).save_checkpoint(saved)
            options["resume"] = saved
            options["max_epochs"] += 1
        trainer = fit(strategy, **options)
        return trainer, outcome(trainer) | {"hooks": trainer.lightning_module.steps}  # type: ignore[union-attr]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p19_exact(name: str, feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, optimizer state, rates, metrics, steps and generator of the plain Trainer, with the smallest plan in force.

    Every step but the first updates every parameter in backward; cut batches have a first step of their own.
    """
    updates, options = counted(monkeypatch), FEATURES[feature]
    _, plain = learn("auto", name, tmp_path / "saved.ckpt", **options)
    trainer, found = learn(memopt(**ALWAYS), name, tmp_path / "saved.ckpt", **options)
    assert_same_tree(plain, found)
    session = session_of(trainer)
    assert session.plan is not None and session.plan.predicted.rebuilt_ops > 0 and not session._early.late
    steps, early = found["hooks"], len(session._early.early)
    if "cut" in options:  # every second step, and a first step of its own, is of a cut batch, which needs one more matrix
        assert early == 4 and len(updates) == (steps // 2 - 1) * (early + early - 1)
    else:
        assert early == 4 - ("task" in options and "tied" in options["task"]) and len(updates) == (steps - 1) * early
