"""What `memopt demo` runs: two real models trained within a budget, each beside its plain run, and a table of both."""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table

from lightning_memopt import MemOptStrategy
from lightning_memopt.errors import ConfigError
from lightning_memopt.report.table import summary
from lightning_memopt.units import format_nbytes

from . import chargpt, digits

_PLAIN_STEPS, _QUICK_STEPS = 12, 6
"""Steps of the plain run that the planned run's losses are compared with; the second with `quick`."""


@dataclass
class Outcome:
    """What came of one workload; `loss_first` and `loss_last` are means over ten steps."""

    name: str
    budget: str
    budget_nbytes: int
    predicted_peak_nbytes: int
    measured_peak_nbytes: int | None
    unmodified_peak_nbytes: int
    step_time_ratio: float
    extra_seconds_predicted: float
    losses_identical: bool
    loss_first: float
    loss_last: float
    held_out_accuracy: float
    held_out_loss: float
    seconds: float


class _Steps(NamedTuple):
    """Losses and times of the steps of a run."""

    losses: list[float]
    seconds: list[float]


class _Log(pl.Callback):
    """Notes the steps as they happen."""

    def __init__(self) -> None:
        self.steps = _Steps([], [])
        self._began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.steps.seconds.append(time.perf_counter() - self._began)
        self.steps.losses.append(float(outputs["loss"]))


def _fit(workload: Any, settings: Any, strategy: Any, **limits: Any) -> tuple[pl.Trainer, _Steps]:
    torch.manual_seed(0)
    log = _Log()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[log],
        num_sanity_val_steps=0,
        **limits,
    )
    trainer.fit(workload.task(settings), datamodule=workload.data(settings))
    return trainer, log.steps  # Lightning gives callbacks a method of the model, so who holds `log` holds the model


def _train(
    name: str, workload: Any, settings: Any, budget: str, limits: dict[str, Any], compared: int, folder: Path, console: Console
) -> Outcome:
    console.print(f"\n[bold]{name}[/bold]: {compared} plain steps, then the whole training within {budget}")
    began = time.perf_counter()
    plain = _fit(workload, settings, "auto", max_steps=compared, limit_val_batches=0)[1]
    gc.collect()  # a Trainer refers to itself; what the plain run leaves would count in the planned one
    strategy = MemOptStrategy(budget=budget, report=folder / f"{name}.html")
    trainer, steps = _fit(workload, settings, strategy, **limits)
    status = strategy.status()
    plan = status.plan
    if plan is None or status.budget_nbytes is None:
        raise ConfigError(f"{name}: there is no plan, so nothing to compare. Run more steps. {summary(status)}")
    strategy.save_plan(str(folder / ("plan.json" if name == "chargpt" else f"plan-{name}.json")))
    warm = 4
    return Outcome(
        name=name,
        budget=budget,
        budget_nbytes=status.budget_nbytes,
        predicted_peak_nbytes=plan.predicted_peak_nbytes,
        measured_peak_nbytes=status.measured_peak_nbytes,
        unmodified_peak_nbytes=plan.unmodified_peak_nbytes,
        step_time_ratio=statistics.median(steps.seconds[warm + 4 :]) / statistics.median(plain.seconds[warm:]),
        extra_seconds_predicted=plan.predicted.seconds,
        losses_identical=steps.losses[:compared] == plain.losses,
        loss_first=statistics.fmean(steps.losses[:10]),
        loss_last=statistics.fmean(steps.losses[-10:]),
        held_out_accuracy=float(trainer.callback_metrics["val_acc"]),
        held_out_loss=float(trainer.callback_metrics["val_loss"]),
        seconds=time.perf_counter() - began,
    )


def run(folder: Path, quick: bool = False) -> list[Outcome]:
    """Train the digits ResNet and the character GPT; write `summary.json`, the plans and the reports into `folder`."""
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    resnet, gpt = (digits.DigitsSettings(), chargpt.CharGPTSettings())
    if quick:
        resnet, gpt = digits.DigitsSettings(epochs=1), chargpt.CharGPTSettings(steps=11, held_out_batches=4)
    compared = _QUICK_STEPS if quick else _PLAIN_STEPS
    until = {"max_steps": gpt.steps, "val_check_interval": gpt.steps}
    outcomes = [
        _train("digits", digits, resnet, "40MiB", {"max_epochs": resnet.epochs}, compared, folder, console),
        _train("chargpt", chargpt, gpt, "64MiB", until, compared, folder, console),
    ]
    table = Table(title="MemOpt demo")
    for column in ("", *(o.name for o in outcomes)):
        table.add_column(column)
    table.add_row("budget", *(o.budget for o in outcomes))
    table.add_row("predicted peak", *(format_nbytes(o.predicted_peak_nbytes) for o in outcomes))
    table.add_row(
        "measured peak",
        *("not measured" if o.measured_peak_nbytes is None else format_nbytes(o.measured_peak_nbytes) for o in outcomes),
    )
    table.add_row("unmodified peak", *(format_nbytes(o.unmodified_peak_nbytes) for o in outcomes))
    table.add_row("step time against plain", *(f"x{o.step_time_ratio:.2f}" for o in outcomes))
    table.add_row(
        f"first {compared} losses", *("identical to the plain run" if o.losses_identical else "DIFFER" for o in outcomes)
    )
    table.add_row("training loss", *(f"{o.loss_first:.3f} -> {o.loss_last:.3f}" for o in outcomes))
    table.add_row("held-out accuracy", *(f"{100 * o.held_out_accuracy:.1f} %" for o in outcomes))
    console.print(table)
    target = folder / "summary.json"
    target.write_text(json.dumps({"workloads": [asdict(o) for o in outcomes]}, indent=2) + "\n")
    console.print(f"wrote {target} and {folder / 'plan.json'}; open {folder / 'chargpt.html'} in a browser")
    return outcomes


if __name__ == "__main__":
    run(Path("demo"))
