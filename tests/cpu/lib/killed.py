"""A fit in a process of its own that is killed at a step: `python -m tests.cpu.lib.killed PLAIN_OR_MEMOPT DIRECTORY STEP`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.cpu.lib.fits import Task, fit, memopt
from tests.cpu.lib.loops import batches, small

LAST, EVERY = 16, 4
"""Steps of the whole fit, and between two checkpoints."""


class Resumable(Task):
    """Takes its data by the number of the step and saves the state of the generator: all that a resumed run needs to be the
    uninterrupted one. Batches differ in size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = small(depth=3)
        self.data = [b for i in range(8) for b in batches(1, size=32 if i % 3 else 20, seed=i)]
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.data[self.global_step % len(self.data)])
        self.losses[self.global_step] = loss.item()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["generator"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.generator = checkpoint["generator"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if hasattr(self, "generator"):
            torch.set_rng_state(self.generator)
            del self.generator


class Killer(pl.Callback):
    """Kills this process in the middle of a step, between backward and update."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def run(kind: str, directory: Path | None = None, kill_at: int = -1, resume: Path | None = None) -> pl.Trainer:
    """The fit up to its last step, or until it is killed; `kind`: "plain" or "memopt"."""
    saves = [] if directory is None else [ModelCheckpoint(directory, "{step}", every_n_train_steps=EVERY, save_top_k=-1)]
    return fit(
        "auto" if kind == "plain" else memopt(profile_steps=1),
        Resumable,
        data=lambda: DataLoader(range(7), generator=torch.Generator()),  # draws nothing from the generator of the fit
        resume=resume,
        max_epochs=-1,
        max_steps=LAST,
        callbacks=lambda: [*saves, Killer(kill_at)],
        enable_checkpointing=directory is not None,
    )


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
