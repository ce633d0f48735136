"""MemOptMonitor in Lightning's Trainer: its values against independent counts on a clock that only the task moves."""

from __future__ import annotations

import csv
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_memopt import MemOptMonitor
from lightning_memopt.callbacks import monitor as monitor_module
from lightning_memopt.report.table import summary
from lightning_memopt.telemetry import EnergyMeter, Meter, meter, nvml_source, read_throughput
from lightning_memopt.telemetry.sources import EnergyCounter
from tests.cpu.lib.fake_nvml import CODES, Board, Clock, FakeNvml, install
from tests.cpu.lib.fits import (
    COUNT,
    SIZE,
    Task,
    assert_planned,
    assert_same_tree,
    both,
    fit,
    loader,
    memopt,
    outcome,
    session_of,
)
from tests.cpu.lib.loops import small

WATTS = 100.0


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    """Every monitor's clock; its energy is that of a board that draws `WATTS`."""
    clock = Clock()

    def made(*args: Any, **kwargs: Any) -> Meter:
        millijoules = lambda: round(1e3 * WATTS * clock.now)  # noqa: E731
        counter = functools.partial(EnergyCounter, "GPU-a", millijoules, 1e-3, (1 << 64,), 5e3, clock)
        return Meter(*args, **kwargs, clock=clock, energies={"device": EnergyMeter("fake", lambda: [counter()])})

    monkeypatch.setattr(monitor_module, "Meter", made)
    return clock


class Timed(Task):
    """A batch takes `seconds` for its index, and a second more a validation batch; `seen` has what there was."""

    def __init__(self, clock: Clock | None = None, seen: list[Any] | None = None, fails_at: int = -1) -> None:
        super().__init__()
        self.clock, self.seen, self.fails_at = clock, [] if seen is None else seen, fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        seconds = 0.25 + 0.125 * (batch_idx % 3)
        if self.clock is not None:
            self.clock.after(seconds)
        self.seen.append((len(batch[0]), seconds))
        if len(self.seen) == self.fails_at:
            raise RuntimeError("in the middle")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.clock is not None:
            self.clock.after(11.0)
        super().validation_step(batch, batch_idx)


def rows_of(path: Path) -> dict[int, dict[str, float]]:
    """What the monitor logged, by step."""
    with open(path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        ours = {k: float(v) for k, v in row.items() if v and k.startswith(("train/", "memopt/"))}
        if ours:
            assert int(row["step"]) not in found, "one row a step"
            found[int(row["step"])] = ours
    return found


def logged(
    path: Path,
    clock: Clock | None,
    strategy: Any = "auto",
    monitor: Callable[[], MemOptMonitor] = MemOptMonitor,
    **options: Any,
) -> tuple[pl.Trainer, dict[int, dict[str, float]], list[Any]]:
    seen: list[Any] = []
    task = {"clock": clock, "seen": seen}
    trainer = fit(
        strategy, Timed, task=task, callbacks=lambda: [monitor()], logger=CSVLogger(str(path), name="", version=""), **options
    )
    return trainer, rows_of(path), seen


def expected(seen: list[tuple[int, float]], every: int, accumulate: int = 1) -> dict[int, dict[str, float]]:
    """Rows without energy, from the sizes and seconds of all batches: counted here, not by a meter."""
    found, begins, steps = {}, 0, [min(i + accumulate, len(seen)) for i in range(0, len(seen), accumulate)]
    for number, end in enumerate(steps):
        if (number + 1) % every and number + 1 < len(steps):
            continue
        part, so_far = seen[begins:end], seen[:end]
        seconds, samples = sum(s for _, s in part), sum(n for n, _ in part)
        found[number] = {
            "train/time": sum(s for _, s in so_far),
            "train/batches": len(so_far),
            "train/samples": sum(n for n, _ in so_far),
            "train/device/samples_per_sec": samples / seconds,
            "train/device/batches_per_sec": len(part) / seconds,
            "train/device/step_seconds": seconds / (number + 1 - sum(end <= begins for end in steps)),
        }
        begins = end
    return found


def assert_rows(rows: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]]) -> None:
    """The same steps, keys and values, those of energy aside."""
    assert list(rows) == list(wanted)
    for step_, row in rows.items():
        assert {k: v for k, v in row.items() if "energy" not in k and "watts" not in k} == pytest.approx(wanted[step_])


# -- what is logged ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, 3])
def test_keys_and_values(tmp_path: Path, clock: Clock, every: int) -> None:
    """Without a plan: ThroughputMonitor's keys, and energy at every edge a second or more after the last; nothing else."""
    _, rows, seen = logged(tmp_path, clock, log_every_n_steps=every)
    wanted = expected(seen, every)
    assert len(seen) == 14 and {n for n, _ in seen} == {SIZE, COUNT % SIZE}, "a smaller batch is among them"
    assert_rows(rows, wanted)
    reads = [row for row in rows.values() if "train/device/power_watts" in row]
    assert reads and all(row["train/device/power_watts"] == pytest.approx(WATTS) for row in reads)
    for row in reads:
        assert row["train/device/energy_joules"] <= WATTS * row["train/time"] + 1e-6
    assert not any("memopt/" in k or "approximate" in k or "peak" in k for row in rows.values() for k in row)


def test_energy_of_each_window(tmp_path: Path, clock: Clock) -> None:
    """Six batches take more than a second: each row has energy, and its joules are those of its own samples."""
    _, rows, seen = logged(tmp_path, clock, log_every_n_steps=6)
    begins = 0
    for number in (5, 11):
        part = seen[begins : number + 1]
        row, begins = rows[number], number + 1
        joules, samples = WATTS * sum(s for _, s in part), sum(n for n, _ in part)
        assert row["train/device/energy_joules_per_sample"] == pytest.approx(joules / samples)
        assert row["train/device/energy_joules"] == pytest.approx(WATTS * row["train/time"])
    assert not any("energy" in key for key in rows[13]), "two batches of less than a second together say nothing"


def test_accumulation(tmp_path: Path, clock: Clock) -> None:
    """Windows end where the optimizer steps; samples are of all batches."""
    _, rows, seen = logged(tmp_path, clock, log_every_n_steps=2, accumulate_grad_batches=3, max_epochs=1, limit_train_batches=6)
    assert_rows(rows, expected(seen, 2, 3))
    assert list(rows) == [1] and rows[1]["train/batches"] == 6


def test_validation_is_left_out(tmp_path: Path, clock: Clock) -> None:
    """Sanity checks, validation within an epoch and after it: neither time nor joules of it."""
    _, rows, seen = logged(
        tmp_path, clock, log_every_n_steps=6, limit_val_batches=2, val_check_interval=4, num_sanity_val_steps=2
    )
    assert clock.now > 100 + 3 * 22
    assert_rows(rows, expected(seen, 6))
    key = "train/device/energy_joules"
    energy = [(row[key], row["train/time"]) for row in rows.values() if key in row]
    assert energy and all(WATTS * (time - 1) < joules < WATTS * time + 1e-6 for joules, time in energy)


def test_the_plan_is_logged_once(tmp_path: Path, clock: Clock) -> None:
    """Within the strategy: memopt/ keys once, the plan's own numbers; no cost of a run that made no plan."""
    trainer, rows, seen = logged(tmp_path, clock, memopt(budget="80%"), log_every_n_steps=2)
    status = trainer.strategy.status()
    rows_with = [row for row in rows.values() if any(k.startswith("memopt/") for k in row)]
    assert len(rows_with) == 1
    plan = status.plan
    assert {k.removeprefix("memopt/"): v for k, v in rows_with[0].items() if k.startswith("memopt/")} == pytest.approx(
        {
            "predicted_peak_bytes": plan.predicted_peak_nbytes,
            "unmodified_peak_bytes": plan.unmodified_peak_nbytes,
            "budget_bytes": status.budget_nbytes,
            "plan/recompute_count": 0,
            "plan/offload_count": 0,
            "plan/compress_count": 0,
            "solve_seconds": plan.solve_seconds,
            "profile_seconds": max(0.0, sum(s for _, s in seen[:2]) - plan.solve_seconds),
        }
    )
    assert rows[13]["train/device/peak_memory_bytes"] == status.measured_peak_nbytes


def test_counts_of_a_plan_that_does_all(tmp_path: Path, clock: Clock) -> None:
    """Dropped, parked and encoded tensors are counted each for what becomes of it; 'min' has no budget to log. Only
    planned steps are in the table."""
    strategy = memopt(offload="disk", compress="lossless", profile_steps=5)
    trainer, rows, _ = logged(tmp_path, clock, strategy, log_every_n_steps=50)
    (row,) = (row for row in rows.values() if "memopt/solve_seconds" in row)
    lives = session_of(trainer).plan.lives
    fetched = {life.tensor: life.form for life in lives if life.how == "fetch"}
    assert row["memopt/plan/recompute_count"] == len({life.tensor for life in lives if life.how == "rebuild"})
    assert row["memopt/plan/offload_count"] == sum("disk" in form for form in fetched.values()) > 0
    assert row["memopt/plan/compress_count"] == sum(form.split("@")[0] != "disk" for form in fetched.values())
    assert "memopt/budget_nbytes" not in row
    rates = strategy.telemetry.rates() if strategy.telemetry is not None else None
    assert rates is not None and 5 <= rates.steps <= 14 - 5, "not what was observed"


def test_no_plan_no_keys(tmp_path: Path, clock: Clock, monkeypatch: Any) -> None:
    """MEMOPT_DISABLE: a plain run, whose rates are saved for the run with a plan to be shown beside."""
    saved = tmp_path / "plain.json"
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    _, rows, seen = logged(tmp_path / "a", clock, memopt(), lambda: MemOptMonitor(save=saved), log_every_n_steps=2)
    monkeypatch.delenv("MEMOPT_DISABLE")
    assert not any(k.startswith("memopt/") for row in rows.values() for k in row)
    after_warmup = seen[3:]
    rates = read_throughput(saved)
    assert rates.steps == 11 and rates.samples_per_sec == pytest.approx(
        sum(n for n, _ in after_warmup) / sum(s for _, s in after_warmup)
    )
    trainer, _, _ = logged(tmp_path / "b", clock, memopt(), lambda: MemOptMonitor(before=saved), log_every_n_steps=2)
    text = summary(session_of(trainer).status(), trainer.strategy.telemetry)
    assert f"before {rates.samples_per_sec:.4g}, x" in text and "the whole device" in text, "O3: whose joules they are"
    assert "before" not in summary(session_of(trainer).status()), "nothing is said where nothing was measured"


# -- nothing ends training, nothing changes it ---------------------------------------------------------


class Breaks(CSVLogger):
    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if any(k.startswith("train/") for k in metrics):
            raise OSError("disk full")
        super().log_metrics(metrics, step)


def test_o4_a_logger_that_raises(tmp_path: Path, clock: Clock) -> None:
    """O4: training ends as without the monitor, after one warning; the other logger has everything."""
    loggers = [Breaks(str(tmp_path), name="broken"), CSVLogger(str(tmp_path), name="", version="")]
    plain = outcome(fit("auto", Timed, logger=False))
    seen: list[Any] = []
    with pytest.warns(UserWarning, match=r"Breaks.log_metrics failed \(OSError: disk full\); training continues") as said:
        trainer = fit("auto", Timed, task={"clock": clock, "seen": seen}, callbacks=lambda: [MemOptMonitor()],
                      logger=loggers, log_every_n_steps=2)  # fmt: skip
    assert sum("disk full" in str(w.message) for w in said) == 1
    assert len(rows_of(tmp_path)) == 7
    assert_same_tree(plain | {"logged": 0}, outcome(trainer) | {"logged": 0})


def test_gradients_are_the_same(clock: Clock) -> None:
    """Within a plan and without one, with the monitor as without it: weights, metrics, generator, what is installed."""
    counted = lambda batch: (batch[0] >= 0).all(1).sum()  # noqa: E731  # ops, in the middle of observed steps
    options: Any = dict(log_every_n_steps=1, accumulate_grad_batches=2, max_epochs=3)
    _, planned = both(callbacks=lambda: [MemOptMonitor(counted)], **options)
    assert_planned(planned)
    assert_same_tree(outcome(fit("auto")), outcome(fit("auto", callbacks=lambda: [MemOptMonitor()])))


FAULTS: dict[str, Any] = {name: {"raises": {"energy": name, "power": name}} for name in CODES} | {"sliced": {"sliced": True}}


@pytest.mark.parametrize("fault", [*FAULTS, "begins", "no module"])
def test_p31_no_energy_never_stops_training(monkeypatch: Any, tmp_path: Path, fault: str) -> None:
    """P31, O2: every error of NVML, from the start: one warning, all other keys, none of energy, the same result."""
    board = Board("a", Clock(), **FAULTS.get(fault, {}))
    begins = "LibraryNotFound" if fault == "begins" else ""
    device = install(monkeypatch, None if fault == "no module" else FakeNvml([board], begins=begins))(0)
    monkeypatch.setattr(meter, "_energies", lambda *_: {"device": EnergyMeter("cuda:0", lambda: [nvml_source(device)])})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer, rows, _ = logged(tmp_path, None, log_every_n_steps=2, max_epochs=1)
    assert sum("no energy is reported for cuda:0" in str(w.message) for w in said) == 1
    assert trainer.state.finished and len(rows) == 4 and all("train/device/samples_per_sec" in row for row in rows.values())
    assert not any("energy" in k or "watts" in k for row in rows.values() for k in row)


def test_p31_lost_on_the_way(monkeypatch: Any, tmp_path: Path) -> None:
    clock = Clock()
    board = Board("a", clock, watts=WATTS)
    device = install(monkeypatch, FakeNvml([board]))(0)
    opened = lambda *_: {"device": EnergyMeter("cuda:0", lambda: [nvml_source(device, clock)])}  # noqa: E731
    monkeypatch.setattr(meter, "_energies", opened)
    monkeypatch.setattr(monitor_module, "Meter", functools.partial(Meter, clock=clock))

    class Loses(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 8:
                board.raises["energy"] = "GpuIsLost"

    task = {"clock": clock}
    with pytest.warns(UserWarning, match="no energy is reported for cuda:0"):
        fit("auto", Timed, task=task, callbacks=lambda: [MemOptMonitor(), Loses()], log_every_n_steps=4,
            logger=CSVLogger(str(tmp_path), name="", version=""))  # fmt: skip
    rows = rows_of(tmp_path)
    assert [step for step, row in rows.items() if "train/device/energy_joules" in row] == [3, 7]
    assert list(rows) == [3, 7, 11, 13]


def test_a_size_that_nobody_knows(tmp_path: Path, clock: Clock) -> None:
    """A batch_size_fn that fails: one warning with the remedy, no keys of samples, time all the same."""
    with pytest.warns(UserWarning, match="the size of a batch failed.*Give MemOptMonitor") as said:
        _, rows, _ = logged(tmp_path, clock, monitor=lambda: MemOptMonitor(lambda batch: batch.nothing), log_every_n_steps=7)
    assert sum("size of a batch" in str(w.message) for w in said) == 1
    assert all("train/time" in row and not any("sample" in k for k in row) for row in rows.values())


def test_batch_size_fn(tmp_path: Path, clock: Clock) -> None:
    _, rows, seen = logged(
        tmp_path, clock, monitor=lambda: MemOptMonitor(lambda batch: 10 * len(batch[0])), log_every_n_steps=7
    )
    assert rows[13]["train/samples"] == 10 * sum(n for n, _ in seen)


@pytest.mark.parametrize("strategy", ["auto", "memopt"])
def test_an_exception_in_training(clock: Clock, strategy: str) -> None:
    """It passes as it is; the meter is closed, the device not asked, and the next fit begins anew."""
    monitor = MemOptMonitor()
    trainer = pl.Trainer(strategy=memopt() if strategy == "memopt" else "auto", accelerator="cpu", devices=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
                         callbacks=[monitor])  # fmt: skip
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(Timed(clock, fails_at=5), loader())
    first = monitor.meter
    assert first is not None and not first.energies["device"].available and first.total.steps <= 4
    seen: list[Any] = []
    trainer.fit(Timed(clock, seen), loader())
    assert monitor.meter is not first and monitor.meter.total.samples == sum(n for n, _ in seen) > 0


# -- what is said --------------------------------------------------------------------------------------


def test_no_logger_one_line(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    with caplog.at_level("INFO"):
        fit("auto", Timed, task={"clock": clock}, callbacks=lambda: [MemOptMonitor()], log_every_n_steps=2)
    (line,) = [record.getMessage() for record in caplog.records if "samples/s" in record.getMessage()]
    assert line.startswith("MemOpt: 11 steps on cpu; ") and "J/sample (the whole device, other programs included)" in line, "O3"
    caplog.clear()
    with caplog.at_level("INFO"):
        fit("auto", Timed, task={"clock": clock}, callbacks=lambda: [MemOptMonitor(verbose=False)])
    assert "samples/s" not in caplog.text


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("first", [True, False])
def test_progress_bars(capsys: Any, caplog: pytest.LogCaptureFixture, clock: Clock, bar: type[Callback], first: bool) -> None:
    """The line is said once in either bar, whichever callback comes first; no markup is in it that Rich would take out."""
    callbacks = [bar(), MemOptMonitor()] if first else [MemOptMonitor(), bar()]
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
                         max_epochs=1, callbacks=callbacks)  # fmt: skip
    with caplog.at_level("INFO"):
        trainer.fit(Timed(clock), loader())
    shown = capsys.readouterr()
    text = (shown.out + shown.err + caplog.text).replace("\n", " ")
    assert text.count("samples/s") == 1 and "MemOpt: 4 steps on cpu" in text


def test_the_other_namespace(tmp_path: Path, clock: Clock) -> None:
    """`pytorch_lightning`'s Trainer takes the callback as its own."""
    other = pytest.importorskip("pytorch_lightning")
    seen: list[Any] = []

    class Module(other.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.after(0.5)
            seen.append((len(batch[0]), 0.5))
            return torch.nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = other.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
                            enable_model_summary=False, log_every_n_steps=3, callbacks=[MemOptMonitor()],
                            logger=other.loggers.CSVLogger(str(tmp_path), name="", version=""))  # fmt: skip
    trainer.fit(Module(), loader())
    assert_rows(rows_of(tmp_path), expected(seen, 3))
