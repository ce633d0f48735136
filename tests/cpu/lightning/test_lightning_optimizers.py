"""Several optimizers, several backwards, accumulation, schedules and clipping in Lightning: the plain Trainer's state."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.cpu.lib.fits import Manual, Task, assert_planned, both, plans_of, session_of
from tests.cpu.lib.inside import states_of
from tests.cpu.lib.loops import small


def test_manual_optimization() -> None:
    """Several backwards and updates inside one training_step: the plain run's state, and a plan for each forward."""
    _, planned = both(Manual)
    parts = {signature[0] for signature in states_of(session_of(planned))}
    assert parts == {0, 1, 2} and len(plans_of(planned)) == 3
    for found in plans_of(planned):
        assert not found.drift.deviated and any(op.phase == "backward" for op in found.program.graph.ops)


class Toggled(Task):
    """Two optimizers that are toggled, the second one on every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = small(1, depth=2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for i, (optimizer, name) in enumerate(zip(self.optimizers(), ("one", "two"), strict=True)):
            if i == 0 or batch_idx % 2 == 1:
                self.toggle_optimizer(optimizer)
                loss = self.loss(batch) + (self.other(batch[0]) - self.net(batch[0])).square().mean()
                self.log(name, loss)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        one = torch.optim.AdamW(self.net.parameters(), 1e-2)
        return [one, torch.optim.SGD(self.other.parameters(), 0.1, momentum=0.9)]


class Gan(pl.LightningModule):
    """A generator with BatchNorm and a discriminator. `shared`: one batch of fakes for both backwards, the first retains it."""

    shared = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        wide = lambda: (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU())  # noqa: E731
        self.g = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), *wide(), nn.Linear(64, 16), nn.Tanh())
        self.d = nn.Sequential(nn.Linear(16, 64), nn.GELU(), *wide(), nn.Linear(64, 1))

    def judged(self, samples: Tensor, real: bool) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.d(samples), torch.full((len(samples), 1), float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_g, of_d = self.optimizers()
        real = torch.cat([batch[0], batch[1]], 1) / 24
        noise = torch.randn(len(real), 8)
        if self.shared:
            fake = self.g(noise)
            self.step(of_d, self.judged(real, True) + self.judged(fake.detach(), False), retain_graph=True)
            self.step(of_g, self.judged(fake, True))
            return
        self.toggle_optimizer(of_g)
        self.step(of_g, self.judged(self.g(noise), True))
        self.untoggle_optimizer(of_g)
        self.toggle_optimizer(of_d)
        self.step(of_d, self.judged(real, True) + self.judged(self.g(noise).detach(), False))
        self.untoggle_optimizer(of_d)

    def step(self, optimizer: Any, loss: Tensor, **options: bool) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss, **options)
        optimizer.step()
        self.log(f"loss_{self.optimizers().index(optimizer)}", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in (self.g, self.d)]


class SharedGan(Gan):
    shared = True


class TwoBackwards(Task):
    """Two losses of one graph, whose backwards accumulate."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self.net(batch[0])
        self.manual_backward(nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten()), retain_graph=True)
        self.manual_backward(out.square().mean())
        optimizer.step()


class Contrastive(Task):
    """Two forwards, one backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = (self.net(x).mean(1) for x in (batch[0], batch[0].flip(1)))
        loss = nn.functional.cross_entropy(one @ other.T / 8, torch.arange(len(one)))
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("cls", [Toggled, Gan, SharedGan, Contrastive], ids=lambda c: c.__name__)
def test_m12_several_forwards_and_backwards(cls: type[pl.LightningModule]) -> None:
    """Toggled optimizers, a GAN in both usual forms, contrastive forwards, over 21 steps: the same state, within plans."""
    _, planned = both(cls, max_epochs=3)
    assert plans_of(planned) and not any(s.drift.deviated for s in plans_of(planned))


def test_two_backwards_of_one_graph() -> None:
    """retain_graph: exact; nothing is dropped, because the second backward asks for everything again."""
    _, planned = both(TwoBackwards, max_epochs=3)
    assert session_of(planned).status().phase == "planned"


def test_accumulation_that_does_not_divide() -> None:
    """7 batches, a step every 3: the last step of an epoch has one, and it is the smaller batch."""
    _, planned = both(accumulate_grad_batches=3, max_epochs=3)
    assert_planned(planned)
    assert planned.global_step == 9


class Scheduled(Task):
    def configure_optimizers(self) -> Any:
        o = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        each = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.9), "interval": "step", "frequency": 2}
        return [o], [torch.optim.lr_scheduler.StepLR(o, 1, 0.5), each]


class Plateau(Task):
    def configure_optimizers(self) -> Any:
        o = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0)
        return {"optimizer": o, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@pytest.mark.parametrize("cls", [Scheduled, Plateau], ids=lambda c: c.__name__)
def test_schedules(cls: type[Task]) -> None:
    """Schedules by step, by epoch and on a plateau: the same rates, and they have moved."""
    plain, planned = both(cls, max_epochs=3, limit_val_batches=2)
    assert_planned(planned)
    assert plain.optimizers[0].param_groups[0]["lr"] < 0.1


def test_clipping_by_value() -> None:
    """Clipped by value (by norm: test_lightning.py), at a bound that clips."""
    _, planned = both(gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    assert_planned(planned)
