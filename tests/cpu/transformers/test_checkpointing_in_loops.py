"""Gradient checkpointing of a transformers model is replaced by the plan in a plain loop, Lightning, Fabric and the search."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.robustness.front_models import Samples, built, collated
from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.integrations import transformers_private
from lightning_memopt.session import RunStatus
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.said import Said

STEPS = 6
LINE = "gradient checkpointing is replaced by the plan"
Loop = Callable[[nn.Module, bool], RunStatus | None]
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def checkpointed() -> nn.Module:
    model = built("gpt2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def functions(model: nn.Module) -> list[Any]:
    return [transformers_private.checkpointing_function(module) for module in model.modules()]


def batches() -> Any:
    return torch.utils.data.DataLoader(Samples("gpt2", 4 * STEPS), 4, collate_fn=collated)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def plain_loop(model: nn.Module, within: bool) -> RunStatus | None:
    optimizer = adamw(model)
    with optimize(model, optimizer, budget="min", profile_steps=2) if within else contextlib.nullcontext() as run:
        for batch in batches():
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.status() if within else None


def fabric_loop(model: nn.Module, within: bool) -> RunStatus | None:
    pytest.importorskip("lightning.fabric")
    from lightning.fabric import Fabric

    from lightning_memopt import MemOptFabricStrategy

    fabric = Fabric(accelerator="cpu", devices=1, strategy=MemOptFabricStrategy(budget="min") if within else "auto")
    wrapped, optimizer = fabric.setup(model, adamw(model))
    for batch in batches():
        fabric.backward(wrapped(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    if not within:
        return None
    status = fabric.strategy.run(wrapped).status()
    fabric.strategy.close()
    return status


def lightning_fit(model: nn.Module, within: bool) -> RunStatus | None:
    pl = pytest.importorskip("lightning.pytorch")

    from lightning_memopt import MemOptStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = MemOptStrategy(budget="min", profile_steps=2) if within else "auto"
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Module(), batches())
    return trainer.strategy.status() if within else None


@pytest.mark.parametrize("loop", [plain_loop, fabric_loop, lightning_fit])
def test_replaced(loop: Loop, said: Said) -> None:
    """The bits of the checkpointed loop, dropout included; one line says it; afterwards the model checkpoints itself again."""
    ends = []
    for within in (False, True):
        model = checkpointed()
        before = functions(model)
        torch.manual_seed(3)
        status = loop(model, within)
        ends.append([*model.state_dict().values(), torch.get_rng_state()])
        assert functions(model) == before
    assert all(map(same_bits, *ends))
    assert said.taken().count(LINE) == 1
    assert status is not None and status.phase == "planned" and len(status.checkpointed) == 3


def test_the_search_plans_what_training_plans() -> None:
    """`find_max_batch_size` searches for a loop inside `optimize`, which replaces checkpointing; `planned=False` does not."""
    model = checkpointed()
    optimizer, before, seen = adamw(model), functions(model), set[bool]()

    def step(batch: Any) -> None:
        seen.add(functions(model) == before)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for planned in (True, False):
        seen.clear()
        find_max_batch_size(step, batches(), model, optimizer, budget="1GiB", planned=planned, max_size=4)
        assert seen == {not planned} and functions(model) == before
