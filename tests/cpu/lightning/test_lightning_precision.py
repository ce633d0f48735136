"""Precisions, gradient scalers, compiled parts and models that checkpoint themselves, in Lightning and in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cpu.lib.fits import Task, assert_planned, both, fit, memopt, session_of
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import agrees, batches, loss_of, sgd, small


class Deep(Task):
    """Layers enough that the peak is in backward whatever the type, and an optimizer that float16 survives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small(depth=6)

    def configure_optimizers(self) -> Any:
        return sgd(self)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_g5_precisions(precision: Any) -> None:
    """Weights and default type of another precision, which is entered inside of the recorded forward: planned, exact."""
    _, planned = both(Deep, precision=precision)
    assert_planned(planned)
    assert torch.isfinite(planned.lightning_module.net.layers[0].weight).all()
    assert session_of(planned).status().measured_peak_nbytes is not None


def test_half_precision_with_a_scaler() -> None:
    """16-mixed: Lightning takes bf16 on the CPU unless it is given the plugin. The scale is compared, and steps are skipped."""
    scaler = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**27, growth_interval=3)  # noqa: E731
    plain, planned = both(Deep, max_epochs=3, plugins=lambda: [MixedPrecision("16-mixed", "cpu", scaler())])
    assert_planned(planned)
    assert plain.precision_plugin.state_dict()["scale"] < 2.0**20


@pytest.mark.parametrize("scale", [2.0**8, 2.0**22], ids=["steps", "skips"])
def test_scaler_in_a_plain_loop(scale: float) -> None:
    """torch.amp.GradScaler with clipping: the same steps, those that it skips because of infinities too."""
    scalers = []

    def run_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        torch.manual_seed(2)
        scalers.append(scaler := torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))
        seen: list[Any] = []
        for batch in batches(12):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.detach(), scaler.get_scale()]
        return seen

    run = agrees(run_all, lambda: small(depth=5))
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    assert (scalers[0].get_scale() < scale) is (scale > 2**20)


class Compiled(Task):
    """A part is compiled; it is left compiled, and what is in it is not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), backend="aot_eager")

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.part(self.net(batch[0])).flatten(0, 1), batch[1].flatten())


class Checkpoints(Task):
    """Checkpoints a part of itself."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        part = lambda: nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24))  # noqa: E731
        self.parts = nn.ModuleList(part() for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        h = self.net(batch[0])
        for part in self.parts:
            h = h + checkpoint(part, h, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(h.tanh().exp().flatten(0, 1), batch[1].flatten())


class CheckpointsReentrant(Checkpoints):
    reentrant = True


@pytest.mark.parametrize("cls", [Compiled, Checkpoints, CheckpointsReentrant], ids=lambda c: c.__name__)
def test_parts_that_are_left_alone(cls: type[Task]) -> None:
    """Compiled parts and checkpointed ones: the same state, a plan for the rest, and a budget that is kept in the end."""
    _, planned = both(cls, max_epochs=3)
    assert_planned(planned)
    frontier = session_of(planned).status().frontier
    budget = (frontier.smallest_nbytes + frontier.unmodified_peak_nbytes) // 2
    found = state_of(session_of(fit(memopt(budget=budget), cls)))
    assert found.peaks.measured_nbytes <= budget
