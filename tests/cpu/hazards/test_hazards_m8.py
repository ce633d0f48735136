"""Lifecycle of several runs: Trainers side by side and nested, a run entered twice, checkpoints, averaged weights, toggling."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_memopt import optimize
from lightning_memopt.errors import AlreadyAttachedError
from tests.cpu.lib.fits import Task, assert_planned, fit, loader, memopt
from tests.cpu.lib.loops import assert_same, batches, installed, leaves_nothing, loss_of, sgd, small, state, step, train
from tests.cpu.lib.scripts import Interpreter

QUIET: dict[str, Any] = dict(budget="min", profile_steps=1, verbose=False)


def trainer_of(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **({"max_epochs": 1} | quiet | options))


def test_m8_two_trainers_in_turn() -> None:
    """EXACT: one model in one Trainer after the other, each with a run of its own; nothing is left between and after them."""

    def run(strategies: list[Any]) -> dict[str, Tensor]:
        pl.seed_everything(3, verbose=False)
        task = Task()
        for strategy in strategies:
            trainer_of(strategy).fit(task, loader())
            assert installed()[:2] == [None, []]
        return state(task)

    with torch.random.fork_rng():
        assert_same(run(["auto", "auto", "auto"]), run([memopt(), "auto", memopt()]))


class Inner(pl.Callback):
    """Trains another model in a Trainer of its own, in the middle of the outer one's steps."""

    def __init__(self, hook: str, strategy: Any) -> None:
        self.strategy, self.calls = strategy, 0
        self.states: list[dict[str, Tensor]] = []
        setattr(self, hook, self.train)

    def train(self, *_: Any) -> None:
        self.calls += 1
        if self.calls in (1, 5):
            torch.manual_seed(self.calls)
            task = Task()
            trainer_of(self.strategy(), limit_train_batches=4).fit(task, loader())
            self.states.append(state(task))


HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]


@pytest.mark.parametrize("hook", HOOKS)
def test_m8_nested_fit(hook: str) -> None:
    """EXACT for both: a fit inside of a fit, while the outer step is observed and while it is planned, at any of its hooks."""

    def run(strategy: Any) -> tuple[pl.Trainer, Inner]:
        inner = Inner(hook, strategy)
        return fit(strategy(), callbacks=lambda: [inner], max_epochs=1), inner

    with torch.random.fork_rng():
        plain, expected = run(lambda: "auto")
        planned, found = run(memopt)
    assert_same(state(plain.model), state(planned.model))
    assert len(expected.states) == 2
    for one, other in zip(expected.states, found.states, strict=True):
        assert_same(one, other)
    if hook not in ("on_after_backward", "on_before_optimizer_step"):  # there, the inner fit is a part of the step observed
        assert_planned(planned)
    assert installed()[:2] == [None, []]


def test_m8_the_same_model_twice() -> None:
    """REFUSE by name: a model that is in a run already, whichever front asks; after the first run it may enter another."""
    task = Task()
    optimizer = torch.optim.AdamW(task.parameters())
    with leaves_nothing(task.net), optimize(task, optimizer, **QUIET):
        for strategy in (memopt(), memopt(budget="50%")):
            with pytest.raises(AlreadyAttachedError, match="Leave that one first"):
                trainer_of(strategy).fit(task, loader())
        with pytest.raises(AlreadyAttachedError), optimize(task, optimizer, **QUIET):
            pass

    class Second(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            with pytest.raises(AlreadyAttachedError), optimize(module, trainer.optimizers, **QUIET):
                pass

    trainer_of(memopt(), callbacks=[Second()]).fit(task, loader())
    with optimize(task, optimizer, **QUIET):
        pass


def test_m8_a_part_of_the_model_in_a_run_of_its_own() -> None:
    """EXACT: a module that is part of another run's model; the outer run takes it along."""

    def run(attach: bool) -> dict[str, Tensor]:
        model = small()
        optimizer = sgd(model)
        part = torch.optim.SGD(model.layers[1].parameters(), lr=0.01)
        with contextlib.ExitStack() as stack:
            if attach:
                found = stack.enter_context(optimize(model, optimizer, **QUIET))
                stack.enter_context(optimize(model.layers[1], part, **QUIET))
            torch.manual_seed(3)
            for batch in batches(5):
                loss_of(model, batch).backward()
                part.step()
                optimizer.step()
                optimizer.zero_grad()
            assert not attach or found.plan.predicted.rebuilt_ops > 0
        return state(model)

    assert_same(run(False), run(True))


def test_m8_notebook_cell_run_again() -> None:
    """EXACT: a cell that was interrupted and is run again, with the block never left by hand and the name bound anew."""
    model = small()
    optimizer = sgd(model)
    with leaves_nothing(model):
        for steps in (1, 3):
            cell = optimize(model, optimizer, **QUIET)
            cell.__enter__()
            train(model, optimizer, batches(steps))
            loss_of(model, batches(1)[0])  # interrupted here, in the middle of a step
            with pytest.raises(AlreadyAttachedError):
                optimize(model, optimizer, **QUIET).__enter__()
            del cell
        model.load_state_dict(small().state_dict())
        optimizer = sgd(model)
        with optimize(model, optimizer, **QUIET) as run:
            train(model, optimizer, batches(4))
            assert run.plan is not None
    plain = small()
    train(plain, sgd(plain), batches(4))
    assert_same(state(plain), state(model))


def test_m10_p20_checkpoint_in_a_plain_trainer_without_the_package(tmp_path: Path, interpreter: Interpreter) -> None:
    """A checkpoint of a Trainer with the strategy resumes in a plain Trainer of a process where the package is not."""
    with torch.random.fork_rng():
        fit(memopt(), max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    script = tmp_path / "train.py"
    script.write_text(f"""
import sys
sys.modules["lightning_memopt"] = None
import lightning.pytorch as pl, torch
from torch import nn
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.embed, self.net.norm = nn.Embedding(24, 32), nn.BatchNorm1d(8)
        self.net.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.net.head = nn.Linear(32, 24, bias=False)
        self.net.head.weight = self.net.embed.weight
    def training_step(self, batch, i):
        return self.net.head(self.net.norm(self.net.embed(batch))).square().mean()
    def configure_optimizers(self):
        o = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {{"optimizer": o, "lr_scheduler": {{
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=30), "interval": "step"}}}}
path = {str(tmp_path / "one.ckpt")!r}
assert "lightning_memopt" in torch.load(path, weights_only=True)
Net().load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.zeros(200, 8, dtype=torch.long), 32), ckpt_path=path, weights_only=True)
assert trainer.global_step == 14, trainer.global_step
""")
    done = interpreter.run(str(script), cwd=tmp_path, needs=("torch._dynamo", "lightning.pytorch"))
    assert done.returncode == 0, done.stderr[-3000:]


class Seen(pl.Callback):
    """Which hooks are called, in which order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "names").append(name)
        return object.__getattribute__(self, name)


def test_m11_p23_callbacks_and_logs_once_in_order() -> None:
    """Sanity check, validation in the middle of an epoch, predict after it: the plain Trainer's hooks, logs and weights."""

    def run(strategy: Any) -> tuple[list[str], dict[str, Tensor], dict[str, Any], list[Tensor]]:
        pl.seed_everything(3, verbose=False)
        seen, task = Seen(), Task()
        trainer = trainer_of(strategy, callbacks=[seen], num_sanity_val_steps=2, val_check_interval=2)
        trainer.fit(task, loader(), loader(shuffle=False))
        task.predict_step = lambda batch, batch_idx: task.net(batch[0])
        return seen.names, state(task), dict(trainer.callback_metrics), trainer.predict(task, loader(shuffle=False))

    with torch.random.fork_rng():
        names, expected, metrics, predictions = run("auto")
        found = run(memopt())
    assert len(names) > 100 and names == found[0]
    assert_same(expected, found[1])
    assert metrics == found[2] and all(map(torch.equal, predictions, found[3]))


def test_m12_toggled_between_forward_and_backward() -> None:
    """EXACT: what requires gradients is changed after the forward, before its backward."""

    def run(attach: bool) -> dict[str, Tensor]:
        model = small()
        optimizer = sgd(model)
        with optimize(model, optimizer, **QUIET) if attach else contextlib.nullcontext():
            torch.manual_seed(3)
            for batch in batches(5):
                loss = loss_of(model, batch)
                model.requires_grad_(False)
                loss.backward()
                model.requires_grad_(True)
                optimizer.step()
                optimizer.zero_grad()
        return state(model)

    assert_same(run(False), run(True))


def test_m14_nothing_outlives_the_run() -> None:
    """After the block the session holds no tape, no mode, no profiler and no hook, and the model can be freed."""
    import gc
    import weakref

    model = small()
    optimizer = sgd(model)
    gc.collect()
    gc.disable()
    try:
        with leaves_nothing(model), optimize(model, optimizer, **QUIET) as run:
            for batch in batches(4):
                step(model, optimizer, batch)
        refs = [weakref.ref(o) for o in (run.session, model, *model.parameters())]
        del run, model, optimizer
        assert [type(r()).__name__ for r in refs if r() is not None] == []
        assert not torch.autograd._profiler_enabled()
    finally:
        gc.enable()
