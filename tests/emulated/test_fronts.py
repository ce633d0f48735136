"""Fronts that move a model to a card which has no room for its frozen weights, or whose budget has none."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn, optim

from lightning_memopt import MemOptFabricStrategy, MemOptStrategy
from lightning_memopt.integrations.accelerate import prepare
from lightning_memopt.runtime.parked_weights import placed_in
from lightning_memopt.runtime.tiers.shelf import is_away
from tests.emulated import device
from tests.emulated.test_weights import MIB, model_of

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

OPTIONS: dict[str, Any] = dict(budget=9 * MIB, offload="host", max_slowdown=1e6)
"""Frozen weights take 12 MiB."""


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model_of()
        self.most = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.most = max(self.most, torch.cuda.max_memory_allocated())

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW([p for p in self.parameters() if p.requires_grad], fused=True)


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(64, 256) for _ in range(7)]


def by_lightning(folder: Path, strategy: Any) -> tuple[Module, Any]:
    """(the module after a fit, the strategy)."""
    gc.collect()  # what other tests have left counts
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = Module()
    quiet: dict[str, Any] = dict(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer = L.Trainer(accelerator="cuda", devices=1, max_epochs=1, strategy=strategy, default_root_dir=folder, **quiet)
    torch.manual_seed(2)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return module, trainer.strategy


def test_lightning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fit moves the model, and again after it was moved to the CPU; its tier is let go of."""
    plain, _ = by_lightning(tmp_path, "auto")
    before, held = device.races(), torch.cuda.memory_allocated()
    with caplog.at_level(logging.INFO):
        module, strategy = by_lightning(tmp_path, MemOptStrategy(**OPTIONS))
    assert "have no room in 9.00 MiB: frozen ones stay in the host's memory" in caplog.text
    assert all(map(torch.equal, plain.parameters(), module.parameters())) and device.races() == before
    assert module.most - held <= 9 * MIB < plain.most and strategy.status().plan.weights
    parked = placed_in(module)
    assert parked is not None and not parked.paths and not any(map(is_away, module.parameters()))
    assert all(p.device.type == "cpu" for p in module.parameters())


def loop(model: nn.Module, optimizer: optim.Optimizer, backward: Any) -> list[Tensor]:
    torch.manual_seed(2)
    for batch in batches():
        optimizer.zero_grad()
        backward(model(batch.cuda()).square().mean())
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def trained() -> tuple[nn.Module, optim.Optimizer]:
    model = model_of()
    return model, optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def plainly() -> list[Tensor]:
    model, optimizer = trained()
    return loop(model.cuda(), optimizer, Tensor.backward)


def test_fabric() -> None:
    plain, before = plainly(), device.races()
    fabric = L.Fabric(accelerator="cuda", devices=1, strategy=MemOptFabricStrategy(**OPTIONS))
    model, optimizer = trained()
    wrapped, stepped = fabric.setup(model, optimizer)
    assert all(is_away(p) for p in model.parameters() if not p.requires_grad)
    assert all(map(torch.equal, plain, loop(wrapped, stepped, fabric.backward))) and device.races() == before
    assert fabric.strategy.run().status().measured_peak_nbytes <= 9 * MIB  # type: ignore[attr-defined]
    fabric.strategy.teardown()


def test_accelerate() -> None:
    plain, before = plainly(), device.races()
    accelerator = Accelerator()
    model, optimizer = trained()
    wrapped, stepped = prepare(accelerator, model, optimizer, **OPTIONS)
    assert all(is_away(p) for p in model.parameters() if not p.requires_grad)
    assert all(map(torch.equal, plain, loop(wrapped, stepped, accelerator.backward))) and device.races() == before
    accelerator.end_training()
