"""What a type checker and an editor see of the public names: their types, not `Any`. Mypy checks a script as users write it."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import lightning_memopt
from lightning_memopt import MemOptStrategy
from lightning_memopt.config import MemOptConfig, Options, PlanOptions
from lightning_memopt.telemetry import Meter
from lightning_memopt.telemetry.meter import MeterOptions

ROOT = Path(__file__).parents[3]

USES = """\
import torch
from torch import nn

import lightning_memopt
from lightning_memopt import InfeasibleError, MemOptBatchScaler, MemOptConfig, MemOptMonitor, MemOptStrategy
from lightning_memopt import find_max_batch_size, optimize, register_op

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
config = MemOptConfig(budget="8GiB", offload="disk")


def step(batch: torch.Tensor) -> None:
    model(batch).sum().backward()


with optimize(model, optimizer, budget="8GiB", optimizer_in_backward="auto") as run:
    reveal_type(run)
    reveal_type(run.plan)
    reveal_type(run.report())
    reveal_type(run.monitor(every=10))
with optimize(model, [optimizer], config=config) as run:
    pass
reveal_type(MemOptStrategy(budget=0.8, profile_steps=2))
reveal_type(MemOptStrategy(config=config))
reveal_type(MemOptMonitor())
reveal_type(MemOptBatchScaler(mode="throughput"))
reveal_type(find_max_batch_size(step, lambda n: torch.ones(n, 2), model, optimizer, budget="8GiB", offload="disk"))
reveal_type(InfeasibleError("", smallest_nbytes=1).smallest_nbytes)
reveal_type(lightning_memopt.__version__)
register_op(torch.ops.aten.relu.default, "pure")
"""

REVEALED = [
    "lightning_memopt.integrations.plain.Run",
    "lightning_memopt.plan.model.Plan | None",
    "str",
    "lightning_memopt.telemetry.meter.Meter",
    "lightning_memopt.strategies.strategies.MemOptStrategy",
    "lightning_memopt.strategies.strategies.MemOptStrategy",
    "lightning_memopt.callbacks.monitor.MemOptMonitor",
    "lightning_memopt.callbacks.batch_scaler.MemOptBatchScaler",
    "lightning_memopt.batching.result.BatchSizeResult",
    "int | None",
    "str",
]

MISUSES = {
    'optimize(model, optimizer, bugdet="8GiB")': "call-overload",
    'optimize(model, optimizer, budget="8GiB", config=config)': "call-overload",
    'optimize(model, optimizer, on_exceed="retry")': "call-overload",
    'find_max_batch_size(step, [], model, optimizer, ofload="disk")': "call-arg",
    'MemOptStrategy(optimizer_in_backward="sometimes")': "arg-type",
    "run.monitor(evry=3)": "call-arg",
    "lightning_memopt.optimise": "attr-defined",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of the uses, and then of the misuses."""
    script = tmp_path_factory.mktemp("user") / "train.py"
    script.write_text(USES + "".join(f"{line}\n" for line in MISUSES))
    options = script.with_name("mypy.ini")
    # nothing else is read: it would take a minute, for types that are not ours
    options.write_text("[mypy]\nfollow_imports = skip\n[mypy-lightning_memopt.*]\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file", options.name]
    ended = subprocess.run(
        [*command, f"--cache-dir={script.parent}", script.name],
        cwd=script.parent,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.stdout.splitlines()


def test_public_names_have_their_types(said: list[str]) -> None:
    """A script checks under `mypy --strict`, and every public name reveals what it is."""
    revealed = [line.partition('"')[2].rstrip('"') for line in said if "Revealed type is" in line]
    assert [r.replace("builtins.", "") for r in revealed] == REVEALED
    last = len(USES.splitlines())
    errors = [line for line in said if ": error:" in line and int(line.split(":")[1]) <= last]
    assert not errors, errors


def test_misuses_are_told(said: list[str]) -> None:
    """Options that do not exist, values that are none of theirs, a config beside options, a misspelt name."""
    first = len(USES.splitlines()) + 1
    for line, (misuse, code) in enumerate(MISUSES.items(), first):
        assert any(re.match(rf"train\.py:{line}: error: .*\[{code}\]", s) for s in said), (misuse, said)


def test_options_are_those_of_the_config() -> None:
    """Every place that spells them out has all of them, of the same type, with the same defaults."""
    of_config = {field.name: field.type for field in fields(MemOptConfig)}
    assert {name: hint.__forward_arg__ for name, hint in Options.__annotations__.items()} == of_config
    assert set(Options.__annotations__) - set(PlanOptions.__annotations__) == {"budget"}
    arguments = inspect.signature(MemOptStrategy.__init__).parameters
    for field in fields(MemOptConfig):
        assert arguments[field.name].default == field.default
    own = {"self", "device", "config", "fit_only", "kwargs"}
    assert set(arguments) - own == set(of_config)
    meter = set(inspect.signature(Meter.__init__).parameters) - {"self", "device", "steady"}
    assert meter == set(MeterOptions.__annotations__)


def test_every_public_name_is_there() -> None:
    """`__all__`, what a type checker imports and what is imported when used are the same names."""
    source = inspect.getsource(lightning_memopt)
    block = source.partition("if TYPE_CHECKING:")[2].partition("\n__version__")[0]
    imports = [line.partition(" import ")[2] for line in block.splitlines() if " import " in line]
    typed = {name.strip() for names in imports for name in names.split(",")}
    assert typed == set(lightning_memopt._PUBLIC) == set(lightning_memopt.__all__) - {"__version__"}
    for name in typed:
        home = importlib.import_module(lightning_memopt._PUBLIC[name])
        assert getattr(lightning_memopt, name) is getattr(home, name)
