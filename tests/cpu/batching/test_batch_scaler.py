"""MemOptBatchScaler: chosen before training, set on the loader in use, and the run is the one with that size written down."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_memopt import MemOptBatchScaler, MemOptStrategy
from lightning_memopt.callbacks.learning_rate import scale
from lightning_memopt.errors import ConfigError, InfeasibleError, UnsupportedError
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.limits import Device
from tests.cpu.lib.loops import batches, counted_nbytes, loss_of, small
from tests.cpu.lib.searches import Stream

pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = 500_000
"""In addition to what the process holds."""
DATA = TensorDataset(*batches(1, 192)[0])


class Module(pl.LightningModule):
    """A small model with OneCycleLR over exactly the steps that there will be; counts what is called."""

    def __init__(self, size: int = 4, schedule: bool = True) -> None:
        super().__init__()
        self.net, self.size, self.schedule = small(), size, schedule
        self.calls: list[str] = []
        self.seen: list[int] = []
        self.lrs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append("training_step")
        self.seen.append(len(batch[0]))
        loss = loss_of(self.net, batch)
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss.detach()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"validation_step {len(batch[0])}")

    def on_train_batch_end(self, *args: Any) -> None:
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_start(self) -> None:
        self.calls.append("on_train_start")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        if not self.schedule:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.size, shuffle=True)


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=96)


def fit(module: pl.LightningModule, data: Any = None, scaler: MemOptBatchScaler | None = None, **options: Any) -> pl.Trainer:
    ckpt_path = options.pop("ckpt_path", None)
    callbacks = [*options.pop("callbacks", []), *([scaler] if scaler is not None else [])]
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **quiet, **options}, callbacks=callbacks)
    where = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    torch.manual_seed(11)
    trainer.fit(module, **where, ckpt_path=ckpt_path)
    return trainer


def scaler(**options: Any) -> MemOptBatchScaler:
    return MemOptBatchScaler(**{"budget": beside(), "verbose": False, **options})


def beside(nbytes: int = BUDGET) -> int:
    """A budget that leaves this many bytes for the run, because what this process already holds counts too."""
    return nbytes + counted_nbytes()


def state(trainer: pl.Trainer) -> list[Tensor]:
    found = [t.clone() for t in trainer.lightning_module.state_dict().values()]
    moments = [t.clone() for s in trainer.optimizers[0].state.values() for t in s.values()]
    return [*found, *moments, torch.get_rng_state()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


@pytest.mark.parametrize("where", ["hook", "datamodule", "passed", "batch sampler", "iterable"])
def test_p27_l4_the_run_is_the_one_with_the_size_written_down(where: str) -> None:
    """Weights, optimizer state and generators after training: equal, bit by bit; and the schedule had the right length."""

    def data(size: int) -> Any:
        return {
            "hook": None,
            "datamodule": Data(size),
            "passed": DataLoader(DATA, batch_size=size, shuffle=True),
            "batch sampler": DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), size, False)),
            "iterable": DataLoader(Stream(96), batch_size=size),
        }[where]

    bounded = {"max_steps": 3} if where == "iterable" else {}
    mine, module = scaler(), Module(4)
    given = data(4)
    trainer = fit(module, given, mine, accumulate_grad_batches=24, limit_val_batches=1, **bounded)
    size = mine.result.size  # type: ignore[union-attr]
    assert size in (24, 32) and 96 % size == 0 and set(module.seen) == {size}
    assert mine.result.trial_steps == 1  # type: ignore[union-attr]
    expected = Module(size)
    plain = fit(expected, data(size), accumulate_grad_batches=96 // size, limit_val_batches=1, **bounded)
    assert same(state(trainer), state(plain))
    assert module.calls == expected.calls and module.lrs == expected.lrs
    assert trainer.global_step == plain.global_step
    if where == "passed":
        assert given.batch_sampler.batch_size == 4, "put back"
    assert trainer.accumulate_grad_batches == 24, "put back"
    assert not {"setup_optimizers", "process_dataloader"} & set(vars(trainer.strategy))
    assert "setup_data" not in vars(trainer.fit_loop) and not {"log", "log_dict"} & set(vars(module))


def test_within_memopt_strategy_the_size_has_a_plan() -> None:
    plain = scaler()
    fit(Module(4), scaler=plain, accumulate_grad_batches=24)
    planned, module = MemOptBatchScaler(verbose=False), Module(4)
    budget = beside()
    strategy = MemOptStrategy(budget=budget, verbose=False, profile_steps=1)
    trainer = fit(module, scaler=planned, strategy=strategy, accumulate_grad_batches=24)
    assert planned.result.size > plain.result.size and planned.result.trial_steps == 2  # type: ignore[union-attr]
    assert strategy.session.plan is not None and strategy.status().measured_peak_nbytes <= budget  # type: ignore[union-attr]
    size = planned.result.size  # type: ignore[union-attr]
    same_size = Module(size)
    expected = fit(same_size, accumulate_grad_batches=96 // size)
    assert same(state(trainer), state(expected))


def test_l10_the_default_never_changes_the_samples_an_update() -> None:
    """One batch an update: nothing to trade, unless it does not fit; then it is cut, and accumulated."""
    fits = scaler()
    trainer = fit(Module(24), scaler=fits)
    assert fits.result.size == 24 and trainer.global_step == 8  # type: ignore[union-attr]
    cut, module = scaler(), Module(192)
    trainer = fit(module, scaler=cut)
    assert cut.result.size < 192 and 192 % cut.result.size == 0 and trainer.global_step == 1  # type: ignore[union-attr]
    assert set(module.seen) == {cut.result.size}  # type: ignore[union-attr]
    assert "accumulate_grad_batches 1 -> " in cut.summary() and "confirmed" in cut.summary()


@pytest.mark.parametrize(("how", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_l10_larger_updates_and_their_learning_rates_are_asked_for(how: Any, factor: float) -> None:
    mine, module = scaler(keep_effective=False, lr_scaling=how, max_size=32), Module(16)
    trainer = fit(module, scaler=mine)
    assert set(module.seen) == {32} and trainer.global_step == 6
    expected = Module(32)
    fit(expected)
    assert module.lrs == pytest.approx([lr * factor for lr in expected.lrs])


def test_l10_what_else_changes_is_said(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_memopt"), pytest.warns(UserWarning) as said:
        fit(Module(4), scaler=scaler(verbose=True), accumulate_grad_batches=24, limit_train_batches=4)
    warned = " ".join(str(w.message) for w in said)
    assert "BatchNorm now sees batches of" in warned and "limit_train_batches count batches" in warned
    lines = [r.getMessage() for r in caplog.records if "MemOpt: batch 4 ->" in r.getMessage()]
    assert len(lines) == 2, "when it is chosen, and at the end"


def test_l6_nothing_of_a_trial_reaches_loggers_callbacks_or_progress(tmp_path: Any) -> None:
    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_train_start(self, *args: Any) -> None:
            self.calls.append("start")

        def on_before_backward(self, *args: Any) -> None:
            self.calls.append("backward")

        def on_before_optimizer_step(self, *args: Any) -> None:
            self.calls.append("step")

    mine, counts, module = scaler(), Counts(), Module(4)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(module, scaler=mine, callbacks=[counts], logger=logger, log_every_n_steps=1, accumulate_grad_batches=24)
    batches_run = 192 // mine.result.size  # type: ignore[union-attr]
    assert counts.calls.count("start") == 1 and counts.calls.count("backward") == batches_run
    assert counts.calls.count("step") == trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.total.processed == batches_run
    assert [row["step"] for row in logger.experiment.metrics] == list(range(len(logger.experiment.metrics)))


def test_l1_no_oom_on_a_device_of_the_budget() -> None:
    mine, module = scaler(), Module(4)
    with Device(BUDGET, [module]) as device:
        fit(module, scaler=mine, accumulate_grad_batches=24)
    assert device.errors == 0 and device.peak_nbytes > 0.6 * BUDGET


def test_l1_the_size_is_the_largest_that_a_trainer_can_do() -> None:
    """By exhaustion, steps in the steady state. Gradients are most of the difference to a plain loop, which would do more:
    Lightning frees them after the forward.
    """
    budget = 1_300_000

    def heavy(size: int) -> Module:
        module = Module(size, schedule=False)
        module.net = small(width=96)
        return module

    def fits(size: int) -> bool:
        module = heavy(size)
        try:
            with Device(budget, [module]):
                fit(module, max_steps=3)
        except torch.OutOfMemoryError:
            return False
        return True

    mine, module = scaler(keep_effective=False, budget=beside(budget)), heavy(4)
    with Device(budget, [module]) as device:
        fit(module, scaler=mine, max_steps=3)
    assert device.errors == 0 and mine.result is not None and mine.result.trial_steps == 1
    true = max(size for size in range(mine.result.size, mine.result.size + 4) if fits(size))
    assert true < mine.result.size + 3, "the device was never full: the test tests nothing"
    assert true / 1.02 - 1 < mine.result.size <= true


def test_l2_where_nothing_fits_the_run_is_refused_and_everything_put_back() -> None:
    loader, module = DataLoader(DATA, batch_size=4), Module(4)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(InfeasibleError, match="No batch size fits 30000 bytes"):
        fit(module, loader, scaler(budget=30_000))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert loader.batch_sampler.batch_size == 4 and not {"log", "log_dict"} & set(vars(module))  # type: ignore[union-attr]
    assert not {"setup_optimizers", "process_dataloader"} & set(vars(module.trainer.strategy))
    fit(module, loader)  # and trains


def test_what_cannot_be_done_is_refused_by_name() -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__(schedule=False)
            self.automatic_optimization = False

    class Takes(Module):
        def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            raise AssertionError

    several = {"a": DataLoader(DATA, batch_size=4), "b": DataLoader(DATA, batch_size=4)}
    for module, data, text in (
        (Manual(), None, "manual optimization"),
        (Takes(), None, "dataloader_iter"),
        (Module(), several, "2 training loaders"),
        (Module(), DataLoader(DATA, batch_size=None), "batch_size=None"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            fit(module, data, scaler())
    with pytest.raises(UnsupportedError, match="GradientAccumulationScheduler"):
        fit(Module(), scaler=scaler(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    with pytest.raises(ConfigError, match="give the budget"):
        fit(Module(), scaler=scaler(budget=None))
    with pytest.raises(ConfigError, match="give the budget"):
        fit(Module(), scaler=scaler(), strategy=MemOptStrategy(budget=BUDGET))
    with pytest.raises(ConfigError, match="made for one batch size"):
        fit(Module(), scaler=scaler(budget=None), strategy=MemOptStrategy(budget=BUDGET, plan="plan.json"))
    with pytest.raises(ConfigError, match="budget='min'"):
        fit(Module(), scaler=scaler(budget=None), strategy=MemOptStrategy(budget="min"))
    for options, text in (({"mode": "x"}, "mode"), ({"lr_scaling": "x"}, "lr_scaling"), ({"lr_scaling": "sqrt"}, "keep_eff")):
        with pytest.raises(ConfigError, match=text):
            scaler(**options)


def test_a_run_that_goes_on_keeps_its_size(tmp_path: Any) -> None:
    mine, whole_run = scaler(), Module(4, schedule=False)
    whole = fit(whole_run, scaler=mine, accumulate_grad_batches=24, max_epochs=2)
    seen, steps = set(whole_run.seen), whole.global_step
    del mine, whole_run, whole  # what they hold would count
    kept = ModelCheckpoint(tmp_path, filename="one")
    first = scaler()
    fit(Module(4, schedule=False), scaler=first, accumulate_grad_batches=24, callbacks=[kept], enable_checkpointing=True)
    again, module = scaler(budget=beside(BUDGET // 2)), Module(4, schedule=False)
    trainer = fit(module, scaler=again, accumulate_grad_batches=24, max_epochs=2, ckpt_path=kept.best_model_path, max_steps=-1)
    assert again.result is None, "nothing was searched"
    assert set(module.seen) == {first.result.size} == seen  # type: ignore[union-attr]
    assert trainer.global_step == steps


def test_switched_off_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    mine, module = scaler(), Module(8)
    fit(module, scaler=mine)
    assert mine.result is None and set(module.seen) == {8} and "not searched" in mine.summary()


def test_learning_rates_inside_schedules_are_scaled_too() -> None:
    def made(lr: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
        rest = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [3])

    one, other = made(0.1), made(0.3)
    scale([one[0]], [one[1]], 3.0)
    for _ in range(8):
        assert one[0].param_groups[0]["lr"] == pytest.approx(other[0].param_groups[0]["lr"])
        for optimizer, schedule in (one, other):
            optimizer.step()
            schedule.step()
