"""Tiny Lightning fits, run by the plain Trainer and within a plan; everything that a fit leaves is compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptStrategy
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.harness import assert_same_tree
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import batches, installed, small

SIZE, COUNT = 32, 200  # 6 batches and a smaller one


class Task(pl.LightningModule):
    """Automatic optimization with a OneCycleLR, logging on every step and on some."""

    def __init__(self, fault: type[BaseException] | None = None, none_at: int = -1, stop_at: int = -1) -> None:
        super().__init__()
        self.net = small(depth=5)  # deep enough for plans that run random ops again
        self.fault, self.none_at, self.stop_at = fault, none_at, stop_at

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).flatten(0, 1).float(), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("size", self.net.head.weight.detach().square().mean())
        if self.fault is not None and self.global_step == 5:
            raise self.fault("in training_step")
        self.trainer.should_stop = self.global_step == self.stop_at
        return None if batch_idx == self.none_at else loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Task):
    """Manual optimization: two optimizers, each with a forward and a backward of its own in the same step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.other = small(1, depth=2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        x, y = batch
        for part in (batch, (x.flip(0), y.flip(0))):  # accumulates two backwards
            self.manual_backward(self.loss(part))
        one.step()
        one.zero_grad()
        self.manual_backward((self.other(x) - self.net(x).detach()).square().mean())
        two.step()
        two.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (self.net, self.other)]


def loader(shuffle: bool = True, count: int = COUNT, size: int = SIZE) -> DataLoader:
    x, y = batches(1, size=count)[0]
    return DataLoader(TensorDataset(x, y), size, shuffle=shuffle)


def memopt(**options: Any) -> MemOptStrategy:
    return MemOptStrategy(**({"budget": "min", "profile_steps": 2, "verbose": False} | options))


def trainer_of(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = dict(enable_progress_bar=False, enable_model_summary=False)
    usual = dict(accelerator="cpu", devices=1, max_epochs=2)
    usual |= dict(limit_val_batches=0, num_sanity_val_steps=0, logger=False, enable_checkpointing=False)
    return pl.Trainer(**(usual | options), strategy=strategy, **quiet)


def fit(
    strategy: Any,
    cls: Callable[..., pl.LightningModule] = Task,
    *,
    resume: Any = None,
    task: dict[str, Any] | None = None,
    data: Callable[[], Any] = loader,
    val: Callable[[], Any] = lambda: loader(shuffle=False),
    callbacks: Callable[[], list[pl.Callback]] = list,
    plugins: Callable[[], list[Any]] = list,
    **options: Any,
) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    model = cls(**(task or {}))
    trainer = trainer_of(strategy, callbacks=callbacks(), plugins=plugins(), **options)
    asked = "weights_only" in signature(trainer.fit).parameters  # from Lightning 2.6 on
    trainer.fit(model, data(), val(), ckpt_path=resume, **({"weights_only": False} if resume and asked else {}))
    return trainer


def outcome(trainer: pl.Trainer) -> dict[str, Any]:
    """All that a fit leaves and that a user may look at."""
    return {
        "model": trainer.model.state_dict(),  # type: ignore[union-attr]
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "steps": trainer.global_step,
        "generator": torch.get_rng_state(),
        "precision": trainer.precision_plugin.state_dict(),
    }


def both(cls: Callable[..., pl.LightningModule] = Task, **options: Any) -> tuple[pl.Trainer, pl.Trainer]:
    """The plain and the planned Trainer after the same fit, whose outcomes must agree; nothing is left installed."""
    ended = []
    memory = {k: options.pop(k) for k in ("budget", "on_exceed", "plan") if k in options}
    for strategy in ("auto", memopt(**memory)):
        with torch.random.fork_rng():
            trainer = fit(strategy, cls, **options)
            ended.append((trainer, tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, outcome(trainer))))
    (plain, one), (planned, other) = ended
    assert_same_tree(one, other)
    assert installed()[:2] == [None, []]
    return plain, planned


def session_of(trainer: pl.Trainer) -> Any:
    return trainer.strategy.session  # type: ignore[attr-defined]


def plans_of(trainer: pl.Trainer) -> list[Running]:
    """The states with plans of their own that rebuild something."""
    found = (s for s in states_of(session_of(trainer)).values() if isinstance(s, Running) and s.lender is None)
    return [s for s in found if s.plan.predicted.rebuilt_ops]


def assert_planned(trainer: pl.Trainer) -> None:
    """A plan was in force that runs random ops again, and the forward was the plan's."""
    found = state_of(session_of(trainer))
    assert isinstance(found, Running) and found.program.random and not found.drift.deviated
