"""Private names of other libraries that the package uses: each is in one place, and is there in the installed version."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities import exceptions

import lightning_memopt
from lightning_memopt.strategies import lightning_private

PACKAGE = Path(lightning_memopt.__file__).parent
THE_PLACE = Path(lightning_private.__file__)
FOLDERS = ("batching", "callbacks", "integrations", "strategies")
ADAPTERS = [path for folder in FOLDERS for path in PACKAGE.glob(f"{folder}/*.py")]

OWNERS: dict[str, Callable[[pl.Trainer], Any]] = {
    "_should_accumulate": lambda trainer: trainer.fit_loop,
    "_batches_that_stepped": lambda trainer: trainer.fit_loop.epoch_loop,
    "_combined_loader": lambda trainer: trainer.fit_loop,
    "_data_source": lambda trainer: trainer.fit_loop,
    "_data_connector": lambda trainer: trainer,
    "_prepare_dataloader": lambda trainer: trainer._data_connector,
    "_on_before_batch_transfer": lambda trainer: trainer.lightning_module,
    "_lightning_optimizers": lambda trainer: trainer.strategy,
    "_detect_anomaly": lambda trainer: trainer,
    "_data_parallel_size": lambda trainer: ModelParallelStrategy(),
    "_tensor_parallel_size": lambda trainer: ModelParallelStrategy(),
    "_TunerExitException": lambda trainer: exceptions,
}
"""Private name -> the object of a fitted Trainer that has it."""
ASSIGNED = {"_layer_sync"}
"""Private attributes that Lightning's accelerator connector assigns to strategies that have them."""
OURS = {"_all_for_data", "_arguments", "_become_parallel", "_kept", "_refuse_unknown", "_start_on_one_device"}
NOT_LIGHTNINGS = {"_cdata", "_schedulers", "_last_lr", "_optimizer_step_pre_hooks"}
"""Private names of torch."""


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.line(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


def private_names(path: Path) -> set[str]:
    """Names with one leading underscore that a file reads or assigns as attributes, or defines as methods."""
    methods = [n for c in ast.walk(ast.parse(path.read_text())) if isinstance(c, ast.ClassDef) for n in c.body]
    names = {n.name for n in methods if isinstance(n, ast.FunctionDef)}
    names |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def own_names(path: Path) -> set[str]:
    """Private names that a file of the package itself defines: functions, classes, methods, attributes."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # __slots__
    return names


@pytest.mark.filterwarnings("ignore")
def test_lightning_private_names_are_there() -> None:
    """In the installed Lightning; the message names those that are missing."""
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(Line())
    missing = {name for name, owner in OWNERS.items() if not hasattr(owner(trainer), name)}
    connector = inspect.getsource(accelerator_connector)
    missing |= {name for name in ASSIGNED if f"self.strategy.{name} =" not in connector}
    missing |= set() if "self.strategy._configure_launcher()" in connector else {"the call of _configure_launcher"}
    assert not missing, f"Lightning {pl.__version__} has no {', '.join(sorted(missing))}: see {THE_PLACE.name}"


def test_the_table_above_has_every_private_name_of_lightning() -> None:
    assert private_names(THE_PLACE) - OURS == set(OWNERS) | ASSIGNED


def test_no_other_file_uses_a_private_name_of_lightning() -> None:
    places = (THE_PLACE, PACKAGE / "fabric" / "fabric_private.py")  # Fabric's have a file of their own
    others = {path: private_names(path) for path in PACKAGE.rglob("*.py") if path not in places}
    listed = {f"{path.relative_to(PACKAGE)}: {name}" for path, names in others.items() for name in names & {*OWNERS, *ASSIGNED}}
    assert not listed
    ours = set().union(*(own_names(path) for path in PACKAGE.rglob("*.py")))
    unknown = {f"{path.relative_to(PACKAGE)}: {name}" for path in ADAPTERS for name in others.get(path, set()) - ours}
    assert {line for line in unknown if line.split(": ")[1] not in NOT_LIGHTNINGS} == set()
