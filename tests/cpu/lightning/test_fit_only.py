"""`fit_only=True`: `trainer.fit` answers whether the steps fit, and leaves everything as it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.lib.bench import held_nbytes
from lightning_memopt import Fit
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib import fits
from tests.cpu.lib.fits import Manual, Task, assert_same_tree, loader, memopt, outcome, session_of, trainer_of
from tests.cpu.lib.loops import leaves_nothing
from tests.cpu.lib.said import Said

KIB = 1 << 10


def generators() -> list[Any]:
    return [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]


class Hooks(pl.Callback):
    """What is called between `setup` and `teardown`."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_train_start(self, *args: Any) -> None:
        self.called.append("on_train_start")

    def on_train_batch_start(self, *args: Any) -> None:
        self.called.append("on_train_batch_start")

    def on_exception(self, *args: Any) -> None:
        self.called.append("on_exception")

    def on_train_end(self, *args: Any) -> None:
        self.called.append("on_train_end")


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16-mixed"},
    "bf16 weights": {"precision": "bf16-true"},
    "accumulating": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_changed(options: dict[str, Any], tmp_path: Path) -> None:
    pl.seed_everything(3, verbose=False)
    task, strategy, hooks = Task(), memopt(budget="1GiB", fit_only=True), Hooks()
    before, kept = {name: t.clone() for name, t in task.state_dict().items()}, generators()
    attributes = dict(vars(task.net))
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    trainer = trainer_of(strategy, enable_checkpointing=True, callbacks=[hooks, saves], default_root_dir=tmp_path, **options)
    with leaves_nothing(task.net):
        assert trainer.fit(task, loader()) is None
    assert isinstance(strategy.fit, Fit) and strategy.fit.fits and strategy.fit.cards[0].verdict == "fits"
    assert_same_tree(before, dict(task.state_dict()))
    assert_same_tree(kept, generators())
    assert vars(task.net) == attributes and all(p.grad is None and p.dtype == torch.float32 for p in task.parameters())
    assert trainer.state.finished and trainer.global_step == 0 and not trainer.optimizers
    assert hooks.called == [] and list(tmp_path.iterdir()) == []


def test_the_answer_is_what_a_fit_takes(said: Said) -> None:
    """To a few scalars of Lightning's. What the process holds beside the step differs."""
    strategy = memopt(budget=held_nbytes() + 700 * KIB, fit_only=True, verbose=True)
    trainer_of(strategy).fit(Task(), loader())
    assert "fits by a plan" in said.taken() and strategy.fit is not None
    answer: Any = strategy.fit
    graph = session_of(fits.fit(memopt(), max_epochs=1)).status().frontier.graph
    real = at_peak(graph, keep_all(graph)).by(1)
    for purpose in ("feature maps", "weights", "optimizer state", "inputs", "in use"):
        assert abs(answer.purposes[purpose] - real[purpose]) <= 100, purpose


def test_trained_afterwards_by_its_plan(tmp_path: Path) -> None:
    """The same Trainer then trains with the plain Trainer's bits; the plan of the answer is in force."""
    path, held = tmp_path / "plan.json", held_nbytes()  # other tests may hold some memory
    with torch.random.fork_rng():
        plain = outcome(fits.fit("auto"))
    pl.seed_everything(3, verbose=False)
    task, strategy = Task(), memopt(budget=held + 600 * KIB, fit_only=True)
    trainer = trainer_of(strategy)
    trainer.fit(task, loader())
    assert strategy.fit is not None and "which runs" in strategy.fit.save_plan(str(path))
    strategy.fit_only = False
    strategy.memopt_config = memopt(budget=held + 760 * KIB, plan=path).memopt_config
    with torch.random.fork_rng():
        pl.seed_everything(3, verbose=False)
        task = Task()
        trainer.fit(task, loader(), loader(shuffle=False))
        assert_same_tree(plain, outcome(trainer))
    frontier = session_of(trainer).status().frontier
    assert frontier is not None and not frontier.searched


def test_what_has_no_step_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not know a step in manual optimization. Run `memopt fit -- python"):
        trainer_of(memopt(fit_only=True)).fit(Manual(), loader())


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    strategy = memopt(fit_only=True)
    trainer = trainer_of(strategy, max_epochs=1)
    trainer.fit(Task(), loader())
    assert strategy.fit is None and trainer.global_step > 0
