"""Lightning: a Trainer with the strategy ends with the plain Trainer's state, and what belongs to the strategy itself.

Optimizers, callbacks, precisions and loaders are in test_lightning_*.py.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memopt import MemOptConfig, MemOptDDPStrategy, MemOptStrategy
from tests.cpu.lib.fits import (
    Task,
    assert_planned,
    assert_same_tree,
    both,
    fit,
    loader,
    memopt,
    outcome,
    session_of,
    trainer_of,
)
from tests.cpu.lib.inside import state_of, states_of
from tests.cpu.lib.loops import installed, leaves_nothing
from tests.cpu.lib.said import Said


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
    _, planned = both(**options)
    assert_planned(planned)
    if "limit_train_batches" not in options:
        assert len(states_of(session_of(planned))) == 2, "the last smaller batch has a state of its own"
    assert installed()[:2] == [None, []]


def test_measured_within_the_budget() -> None:
    """A budget between the smallest plan and the unmodified peak is kept, as measured by the allocator, which is as predicted:
    gradients that the last observed step made, and that end inside of the measured one, are counted."""
    frontier = session_of(fit(memopt(), max_epochs=1)).status().frontier
    budget = (frontier.smallest_nbytes + frontier.unmodified_peak_nbytes) // 2
    found = state_of(session_of(fit(memopt(budget=budget))))
    predicted = found.plan.predicted_peak_nbytes
    assert found.peaks.measured_nbytes <= budget
    assert abs(found.peaks.measured_nbytes - predicted) <= 0.01 * predicted


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
    """An exception in training_step ends the fit as in a plain Trainer and leaves nothing of ours; a second fit is exact."""
    ends = []
    for strategy in ("auto", memopt(profile_steps=2 if when == "planned" else 50)):
        pl.seed_everything(3, verbose=False)
        task = Task(fault=raised)
        before = installed()
        trainer = trainer_of(strategy)
        with leaves_nothing(task.net), pytest.raises((raised, SystemExit)):
            trainer.fit(task, loader())
        assert installed() == before
        task.fault = None
        torch.manual_seed(4)
        trainer = trainer_of("auto" if strategy == "auto" else memopt())
        trainer.fit(task, loader())
        ends.append(outcome(trainer))
    assert_same_tree(*ends)
    assert_planned(trainer)


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_make_it_ddp(options: dict[str, int]) -> None:
    """The strategy becomes DDP with all its options, instead of training on one of the devices."""
    strategy = MemOptStrategy(budget="min", find_unused_parameters=True, offload="disk")
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, **options)
    assert trainer.strategy is strategy and type(strategy) is MemOptDDPStrategy and trainer.world_size == 2
    assert strategy.memopt_config == MemOptConfig(budget="min", offload="disk")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True} and trainer.distributed_sampler_kwargs is not None


def test_what_cannot_become_ddp_is_refused() -> None:
    """By name: a given device, a class of the user's own, and an argument that no strategy has."""

    class Own(MemOptStrategy):
        pass

    for strategy, why in ((MemOptStrategy(device="cpu"), "device='cpu' was given"), (Own(), "a class of your own")):
        with pytest.raises(MisconfigurationException, match=f"trains on one device, because .*{why}.*2 devices and 1 nodes"):
            pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, devices=2)
    with pytest.raises(TypeError, match="'find_unused'"):
        MemOptStrategy(find_unused=True)


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


def test_who_silences_lightning_silences_its_runs(said: Said) -> None:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        fit(memopt(verbose=True), max_epochs=1)
    finally:
        logger.setLevel(level)
    assert said.taken() == ""


def test_validate_and_test_are_not_touched() -> None:
    """validate, test and predict open no session."""
    trainer = fit(memopt(), max_epochs=1)
    trainer.validate(trainer.lightning_module, loader(shuffle=False), verbose=False)
    assert session_of(trainer) is None


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
from lightning_memopt.integrations.lightnings import register
register('lightning.pytorch')
"""
    lines = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", lines], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
