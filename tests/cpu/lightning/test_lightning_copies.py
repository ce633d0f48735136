"""A Trainer within a budget can be copied, pickled and saved whenever a plain one can."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt import MemOptBatchScaler, MemOptMonitor, MemOptStrategy


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _saved(trainer: pl.Trainer) -> Any:
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: tuple[Callable[[pl.Trainer], Any], ...] = (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), _saved)


class Copies(pl.Callback):
    """Copies the Trainer while it is fitting: before the first step, in observed steps and in planned ones."""

    def __init__(self) -> None:
        self.copies = 0

    def _copy(self, trainer: pl.Trainer) -> None:
        for way in WAYS:
            check(way(trainer), trainer)
            self.copies += 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copy(trainer)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step in (1, 4):
            self._copy(trainer)


def check(other: Any, trainer: pl.Trainer) -> None:
    """The copy is a Trainer with the same weights of its own, and with nothing of a session."""
    own, theirs = other.lightning_module.state_dict(), trainer.lightning_module.state_dict()
    assert all(torch.equal(own[name], t) and own[name] is not t for name, t in theirs.items())
    strategy = other.strategy
    assert isinstance(strategy, MemOptStrategy) and strategy.session is None and strategy.telemetry is None
    assert strategy.memopt_config == trainer.strategy.memopt_config  # type: ignore[attr-defined]
    assert strategy.setup_optimizers.__self__ is strategy  # type: ignore[attr-defined]
    assert other.fit_loop.setup_data.__self__ is other.fit_loop  # type: ignore[attr-defined]


def trainer_of(*callbacks: pl.Callback, steps: int = 6, **options: Any) -> pl.Trainer:
    strategy = MemOptStrategy(**({"budget": "min", "profile_steps": 1, "verbose": False} | options))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return pl.Trainer(strategy=strategy, max_steps=steps, accelerator="cpu", callbacks=list(callbacks), **quiet)  # type: ignore[arg-type]


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(96, 16, generator=torch.Generator().manual_seed(0)), batch_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_a_trainer_is_copied_pickled_and_saved(mode: str) -> None:
    """While it fits and afterwards. A copy trains within the budget itself."""
    during = Copies() if mode == "never" else pl.Callback()  # its hook would see no gradients
    trainer = trainer_of(during, MemOptMonitor(verbose=False), optimizer_in_backward=mode)
    trainer.fit(Task(), loader())
    assert mode != "never" or during.copies == 9  # type: ignore[attr-defined]
    assert trainer.strategy.session.plan is not None  # type: ignore[attr-defined]
    for way in WAYS:
        other = way(trainer)
        check(other, trainer)
    other.fit_loop.max_epochs, other.fit_loop.epoch_loop.max_steps = None, 12
    other.fit(Task(), loader())
    assert other.global_step == 12 and other.strategy.session.plan is not None


def test_a_trainer_whose_batch_size_was_chosen_is_copied() -> None:
    """Methods that are replaced meanwhile are the copy's own again in the copy."""
    during = Copies()
    trainer = trainer_of(during, MemOptBatchScaler(max_size=16, keep_effective=False, verbose=False), budget="10MiB")
    trainer.fit(Task(), loader())
    assert during.copies == 9
    for way in WAYS:
        check(way(trainer), trainer)
