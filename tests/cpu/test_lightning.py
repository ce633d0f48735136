"""Lightning: a Trainer with the strategy ends with the plain Trainer's state, in every mode it supports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptStrategy
from lightning_memopt.session.buckets import Running
from tests.cpu.loops import assert_same, batches, installed, leaves_nothing, small, state

SIZE, COUNT = 32, 200  # 6 batches and a smaller one


class Task(pl.LightningModule):
    """Automatic optimization with a OneCycleLR, logging on every step and on some."""

    def __init__(self, fault: type[BaseException] | None = None, none_at: int = -1, stop_at: int = -1) -> None:
        super().__init__()
        self.net = small(depth=2)
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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
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


def loader(shuffle: bool = True) -> DataLoader:
    x, y = batches(1, size=COUNT)[0]
    return DataLoader(TensorDataset(x, y), SIZE, shuffle=shuffle)


def memopt(**options: Any) -> MemOptStrategy:
    return MemOptStrategy(**({"budget": "min", "profile_steps": 2, "verbose": False} | options))


def fit(
    strategy: Any, cls: type[Task] = Task, *, resume: Any = None, task: dict[str, Any] | None = None, **options: Any
) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    model = cls(**(task or {}))
    trainer = pl.Trainer(
        **({"max_epochs": 2, "limit_val_batches": 0} | options),
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, loader(), loader(shuffle=False), ckpt_path=resume, weights_only=None if resume is None else False)
    return trainer


def both(cls: type[Task] = Task, **options: Any) -> tuple[pl.Trainer, pl.Trainer]:
    """The plain and the planned Trainer after the same fit, whose states must agree."""
    plain = fit("auto", cls, **options)
    planned = fit(memopt(), cls, **options)
    assert_same(state(plain.model), state(planned.model))
    assert plain.global_step == planned.global_step
    for one, other in zip(plain.optimizers, planned.optimizers, strict=True):
        for p, q in zip(one.state.values(), other.state.values(), strict=True):
            assert_same({k: torch.as_tensor(v) for k, v in p.items()}, {k: torch.as_tensor(v) for k, v in q.items()})
    assert {k: v.item() for k, v in plain.callback_metrics.items()} == {
        k: v.item() for k, v in planned.callback_metrics.items()
    }
    return plain, planned


def session_of(trainer: pl.Trainer) -> Any:
    return trainer.strategy.session  # type: ignore[attr-defined]


def assert_planned(trainer: pl.Trainer) -> None:
    found = session_of(trainer).main
    assert isinstance(found, Running) and found.plan.predicted.replayed_ops > 0 and not found.deviated


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2},
        {"limit_val_batches": 1.0},
        {"limit_train_batches": 4, "max_epochs": 3, "val_check_interval": 2, "limit_val_batches": 1},
    ],
    ids=["fp32", "bf16", "clipping", "accumulating", "validating", "limited"],
)
def test_same_state(options: dict[str, Any]) -> None:
    """Weights, optimizer state and logged metrics after the fit are the plain Trainer's; a plan was in force."""
    with torch.random.fork_rng():
        _, planned = both(**options)
    assert_planned(planned)
    if "limit_train_batches" not in options:
        assert len(session_of(planned).buckets) == 2, "the last smaller batch has a plan of its own"
    assert installed()[:2] == [None, []]


def test_manual_optimization() -> None:
    """Several backwards and updates inside one training_step: the plain run's state, and a plan for each forward."""
    _, planned = both(Manual, max_epochs=2)
    full = [s for s in session_of(planned).buckets.values() if isinstance(s, Running)]
    assert len(full) >= 3
    for found in full:
        assert found.plan.predicted.replayed_ops > 0 and not found.deviated
        assert any(op.phase == "backward" for op in found.program.graph.ops)


def test_measured_within_the_budget() -> None:
    """A budget between the smallest plan and the unmodified peak is kept, as measured by the allocator."""
    frontier = session_of(fit(memopt(), max_epochs=1)).frontier
    budget = (frontier.smallest_bytes + frontier.unmodified_peak_bytes) // 2
    found = session_of(fit(memopt(budget=budget))).main
    assert found.measured_bytes <= budget


@pytest.mark.parametrize("count", ["none_at", "stop_at"])
def test_none_and_should_stop(count: str) -> None:
    """`training_step` that returns None on some steps, and `trainer.should_stop`, are as without us."""
    for at in (0, 3):
        _, planned = both(task={count: at}, max_epochs=2, min_epochs=0)
        if count == "none_at":
            assert_planned(planned)
    assert installed()[:2] == [None, []]


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["observing", "planned"])
def test_exception_in_training_step(raised: type[BaseException], when: str) -> None:
    """An exception in training_step ends the fit as in a plain Trainer and leaves nothing of ours."""
    task = Task(fault=raised)
    before = installed()
    strategy = memopt(profile_steps=2 if when == "planned" else 50)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with leaves_nothing(task.net), pytest.raises((raised, SystemExit)):
        trainer.fit(task, loader())
    assert installed() == before
    task.fault = None
    with torch.random.fork_rng():
        trainer.fit(task, loader())  # and the same Trainer fits again


def test_resume(tmp_path: Path) -> None:
    """Checkpoints cross over in every direction, resumed runs equal the uninterrupted one, and load with weights_only."""
    whole = state(fit("auto", max_epochs=2).model)
    paths = {}
    for name, strategy in (("plain", "auto"), ("memopt", memopt())):
        trainer = fit(strategy, max_epochs=1, task=None, **{"max_steps": -1})
        paths[name] = tmp_path / f"{name}.ckpt"
        trainer.save_checkpoint(paths[name])
        found = torch.load(paths[name], weights_only=True)
        assert ("lightning_memopt" in found) is (name == "memopt")
        Task().load_state_dict(found["state_dict"], strict=True)
    ends = {}
    for first in paths:
        for second in paths:
            trainer = fit("auto" if second == "plain" else memopt(), resume=paths[first])
            ends[first, second] = state(trainer.model)
    for end in ends.values():
        assert_same(ends["plain", "plain"], end)
    assert whole.keys() == ends["plain", "plain"].keys()


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_are_refused(options: dict[str, int]) -> None:
    """More devices than one are refused by name, instead of training on one of them."""
    with pytest.raises(MisconfigurationException, match="MemOptStrategy trains on one device"):
        pl.Trainer(strategy=MemOptStrategy(), accelerator="cpu", logger=False, **options)


def test_table_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """The fit ends with the table, once, and says what it does meanwhile; verbose=False says nothing."""
    with caplog.at_level("INFO"):
        fit(memopt(verbose=True), max_epochs=1)
    text = caplog.text
    assert text.count("unmodified peak") == 1 and "observing 2 steps" in text and "plan in force" in text
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(memopt(), max_epochs=1)
    assert "MemOpt" not in caplog.text


def test_validate_and_test_are_not_touched() -> None:
    """validate, test and predict open no session."""
    trainer = fit(memopt(), max_epochs=1)
    trainer.validate(trainer.lightning_module, loader(shuffle=False), verbose=False)
    assert session_of(trainer) is None


def test_extra_ops_do_not_end_the_plan() -> None:
    """Metrics that are computed and logged on every second step: the plan of the others survives, numbers are equal."""

    class Logs(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx % 2 == 0:
                with torch.no_grad():
                    self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())
            return super().training_step(batch, batch_idx)

    _, planned = both(Logs)
    assert_planned(planned)


def test_registered_after_lightning() -> None:
    """strategy="memopt" works where Lightning was imported first, as in this file."""
    trainer = pl.Trainer(strategy="memopt", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is MemOptStrategy and trainer.strategy.memopt_config.budget == "auto"


ORDERS = {
    "ours first": "import lightning_memopt; import lightning.pytorch as pl",
    "lightning only through us": "from lightning_memopt import MemOptStrategy; import lightning.pytorch as pl",
}


@pytest.mark.parametrize("order", ORDERS)
def test_registered_before_lightning(order: str) -> None:
    """strategy="memopt" works where Lightning comes later, and importing the package alone does not import Lightning."""
    code = f"""
import sys
{ORDERS[order].split(";")[0]}
assert ("lightning" in sys.modules) is {order != "ours first"}
{ORDERS[order].split(";")[1]}
t = pl.Trainer(strategy="memopt", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
from lightning_memopt import MemOptStrategy
assert type(t.strategy) is MemOptStrategy and t.strategy.memopt_config.budget == "auto"
from lightning_memopt.strategies import register
register()
"""
    lines = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", lines], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
