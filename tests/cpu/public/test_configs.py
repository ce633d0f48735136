"""Every file of configs/ trains as it stands, within its budget; and LightningCLI takes options from files and flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")
pytest.importorskip("sklearn")

from examples import lightning_cli, plain_loop
from lightning_memopt import MemOptBatchScaler, MemOptConfig, MemOptStrategy
from tests.cpu.lib.scripts import Interpreter

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
OFF = ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing")
QUIET = [f"--trainer.{name}=false" for name in OFF]
SMALL = [*QUIET, "--trainer.accelerator=cpu", "--trainer.devices=1", "--model.depth=1"]


@pytest.fixture(autouse=True, scope="module")
def digits_are_forgotten() -> Iterator[None]:
    yield
    plain_loop.digits.cache_clear()


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # LightningCLI warns of them


def trained_by_lightning_cli(path: Path) -> MemOptStrategy:
    cli = lightning_cli.main(["fit", "--config", str(path), *QUIET])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MemOptStrategy)
    status = strategy.status()
    assert status.phase == "planned" and status.plan is not None and status.measured_peak_nbytes is not None
    assert status.measured_peak_nbytes <= status.budget_nbytes < status.plan.unmodified_peak_nbytes  # type: ignore[operator]
    return strategy


def rebuilds(path: Path, interpreter: Interpreter) -> None:
    assert trained_by_lightning_cli(path).status().plan.predicted.rebuilt_ops > 0  # type: ignore[union-attr]


def parks(path: Path, interpreter: Interpreter) -> None:
    assert trained_by_lightning_cli(path).status().plan.predicted.moved_nbytes > 0  # type: ignore[union-attr]


def finds_a_larger_batch(path: Path, interpreter: Interpreter) -> None:
    trainer: Any = trained_by_lightning_cli(path).lightning_module.trainer  # type: ignore[union-attr]
    (scaler,) = (callback for callback in trainer.callbacks if isinstance(callback, MemOptBatchScaler))
    assert scaler.result is not None and scaler.result.size > 64


def trains_in_two_processes(path: Path, interpreter: Interpreter) -> None:
    command = ("-m", "examples.lightning_cli", "fit", "--config", str(path), *QUIET)
    done = interpreter.run(*command, cwd=Path(), needs=("torch._dynamo", "lightning.pytorch.cli", "sklearn.datasets"))
    printed = done.stdout + done.stderr
    assert done.returncode == 0 and "plan in force" in printed, printed
    assert printed.count("measured peak") == 1 and "the budget is not kept" not in printed, printed


RUNS = {
    "lightning.yaml": rebuilds,
    "offload_disk.yaml": parks,
    "largest_batch.yaml": finds_a_larger_batch,
    "ddp.yaml": trains_in_two_processes,
    "fsdp2.yaml": trains_in_two_processes,
}
"""File of configs/ -> what runs it and looks at what came of it."""
RUN_ELSEWHERE = {"accelerate_single.yaml", "accelerate_multi.yaml", "accelerate_fsdp2.yaml"}
"""Files of configs/ that another test file runs."""


def test_every_config_has_a_test() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == RUNS.keys() | RUN_ELSEWHERE


@pytest.mark.parametrize("name", RUNS)
def test_a_config_trains_within_its_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    monkeypatch.chdir(tmp_path)  # LightningCLI writes the whole configuration
    RUNS[name](CONFIGS / name, interpreter)


def test_the_first_config_has_every_option() -> None:
    text = (CONFIGS / "lightning.yaml").read_text()
    assert all(re.search(rf"^ +{field.name}: ", text, re.M) for field in fields(MemOptConfig))


def strategy_of(*flags: str) -> Any:
    classes = lightning_cli.DigitsModule, lightning_cli.DigitsData
    return lightning_cli.LightningCLI(*classes, run=False, args=[*SMALL, *flags]).trainer.strategy


VALUES = {
    "budget": ("0.5", 0.5),
    "max_slowdown": ("1.5", 1.5),
    "recompute": ("false", False),
    "offload": ("disk:/tmp", "disk:/tmp"),
    "host_budget": ("null", None),
    "disk_budget": ("50%", "50%"),
    "compress": ("lossless", "lossless"),
    "objective": ("throughput", "throughput"),
    "optimizer_in_backward": ("auto", "auto"),
    "profile_steps": ("2", 2),
    "solver_seconds": ("1.5", 1.5),
    "headroom": ("4096", 4096),
    "on_exceed": ("raise", "raise"),
    "plan": ("plan.json", "plan.json"),
    "tile": ("rounding", "rounding"),
    "pool": ("planned", "planned"),
    "compile": ("true", True),
    "verify": ("false", False),
    "report": ("run.html", "run.html"),
    "verbose": ("false", False),
}
"""Option -> a flag's text and the value that comes of it."""


def test_flags_with_short_names() -> None:
    """Every option as a flag, the class by its name alone, and the string."""
    assert VALUES.keys() == {field.name for field in fields(MemOptConfig)}
    flags = [f"--trainer.strategy.{name}={text}" for name, (text, _) in VALUES.items()]
    strategy = strategy_of("--trainer.strategy=MemOptStrategy", *flags)
    assert strategy.memopt_config == MemOptConfig(**{name: value for name, (_, value) in VALUES.items()})
    for text, value in (("8GiB", "8GiB"), ("8000000", 8000000), ("80%", "80%"), ("min", "min")):
        strategy = strategy_of("--trainer.strategy=MemOptStrategy", f"--trainer.strategy.budget={text}")
        assert strategy.memopt_config.budget == value and type(strategy.memopt_config.budget) is type(value)
    assert type(strategy_of("--trainer.strategy=memopt")) is MemOptStrategy
    whole = strategy_of("--trainer.strategy=MemOptStrategy", "--trainer.strategy.config.budget=1GiB")
    assert whole.memopt_config == MemOptConfig(budget="1GiB")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--trainer.strategy.on_exceed=stop"], "Expected a typing.Literal['replan', 'warn', 'raise']"),
        (["--trainer.strategy.budgets=1GiB"], "budgets"),
        (["--trainer.strategy.profile_steps=many"], "profile_steps"),
        (["--trainer.strategy.offload=tape"], "offload is 'tape'; use 'none', 'auto', 'host', 'disk'"),
        (["--trainer.strategy.budget=much"], "much"),
        (["--trainer.strategy.profile_steps=0"], "profile_steps is 0"),
    ],
)
def test_bad_values_are_refused_with_the_values_to_use(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as raised:
        strategy_of("--trainer.strategy=MemOptStrategy", *flags)
    assert message in " ".join(f"{capsys.readouterr().err} {raised.value}".split())


def test_help_shows_every_option_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lightning_cli.main(["fit", "--trainer.strategy.help=MemOptStrategy"])
    shown = " ".join(capsys.readouterr().out.split())
    texts = (MemOptConfig.__doc__ or "").partition("Args:")[2]
    for field in fields(MemOptConfig):
        (first,) = re.findall(rf"^ +{field.name}: (.{{12}})", texts, re.M)
        at = shown.rindex(f"--trainer.strategy.{field.name} ")
        assert first in shown[at : at + 200], field.name
