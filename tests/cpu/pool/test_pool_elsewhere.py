"""The planned pool in compiled regions, beside worker processes, in Lightning, and what `memopt breakdown` draws."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt.graph import Graph
from lightning_memopt.native import install
from lightning_memopt.report.arena import drawn, picture
from lightning_memopt.solvers.placement import Buffer, place
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.pooled import CLASSES, WIDTH, F, as_planned, batch, both, classifier, same, training

pytestmark = pytest.mark.skipif(install() is None, reason="no C++ compiler")


def test_a_compiled_region() -> None:
    """Inductor's code asks torch's CPU allocator for its buffers: they are planned with those of the eager part."""

    def half_compiled() -> nn.Module:
        model = classifier()
        return nn.Sequential(*model[0:4], torch.compile(model[4:6]), model[6])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    status = both(step, model=half_compiled)
    as_planned(status)
    assert status.addresses is not None and status.addresses.planned == len(status.addresses.nbytes)


def test_workers_of_a_data_loader() -> None:
    """They are forked in a step, and allocate in processes of their own, where there is no window."""

    def trained(in_pool: bool) -> tuple[list[Tensor], Any]:
        generator = torch.Generator().manual_seed(2)
        torch.manual_seed(3)
        data = TensorDataset(torch.randn(640, WIDTH), torch.randint(0, CLASSES, (640,)))
        loader = DataLoader(data, 64, shuffle=True, num_workers=1, generator=generator, multiprocessing_context="fork")
        with training(in_pool) as (run, model, optimizer):
            for _ in range(2):
                for x, y in loader:
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            run.session.pool.rests()
            return [t.clone() for t in model.state_dict().values()], run.status().pool

    (plain, _), (pooled, status) = trained(False), trained(True)
    assert same(plain, pooled)
    assert status.steps > 10 and status.last.fallen == 0


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")
def test_in_lightning() -> None:
    """zero_grad runs between forward and backward there, and a validation after every epoch."""
    import lightning as L

    from lightning_memopt import MemOptStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.cross_entropy(self.inner(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.inner(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    data = TensorDataset(torch.randn(640, WIDTH), torch.randint(0, CLASSES, (640,)))

    def trained(pool: str | None) -> tuple[list[Tensor], Any]:
        L.seed_everything(0, verbose=False)
        module, strategy = Module(), MemOptStrategy(budget="90%", pool=pool, profile_steps=2, verbose=False)
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=1, strategy=strategy, **quiet)
        trainer.fit(module, DataLoader(data, 64, shuffle=True), DataLoader(data, 64))
        return [t.clone() for t in module.state_dict().values()], strategy.status().pool

    (plain, _), (pooled, status) = trained(None), trained("planned")
    assert same(plain, pooled)
    assert status is not None and status.reason is None and status.addresses is not None
    assert status.steps > 6 and status.addresses.fragmentation < 0.01


def test_the_picture_of_an_arena() -> None:
    buffers = [Buffer("a", 0, 4, 64), Buffer("b", 4, 8, 64), Buffer("c", 2, 6, 64)]
    lines = drawn(buffers, place(buffers, alignment=64), rows=2, columns=4).splitlines()
    assert "128 B" in lines[0] and "fragmentation 0.00 %, 3 buffers" in lines[0]
    assert sorted(lines[1:]) == ["| ██ |", "|████|"]


def test_a_picture_of_a_recorded_step(planned_graph: Graph) -> None:
    lines = picture(planned_graph, keep_all(planned_graph), rows=8, columns=60).splitlines()
    assert len(lines) == 9 and all(len(line) <= 62 for line in lines[1:]) and "█" in lines[-1]


@pytest.fixture
def planned_graph() -> Graph:
    with training(False) as (run, model, optimizer):
        for _ in range(4):
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        graph = run.status().graph
    assert graph is not None
    return graph
