"""Lightning's callbacks and loaders around a plan: averaged weights, checkpoints, early stops, unfreezing, several loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn

from tests.cpu.lib.fits import Task, assert_planned, assert_same_tree, both, loader, plans_of
from tests.cpu.lib.loops import small


class Sgd(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def test_m13_p22_stochastic_weight_averaging() -> None:
    """SWA from the third epoch on: the averaged weights, its own rate and the BatchNorm statistics of its extra epoch."""
    _, planned = both(Sgd, max_epochs=4, callbacks=lambda: [callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=2)])
    assert_planned(planned)


def test_m13_p22_exponential_moving_average(tmp_path: Path) -> None:
    """EMA: validated with (so swapped in and out between steps), saved, and in the model at the end."""
    ema = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging
    saved = []

    def made() -> list[pl.Callback]:
        directory = tmp_path / str(len(saved))
        saved.append(directory / "last.ckpt")
        return [ema(decay=0.9), callbacks.ModelCheckpoint(directory, save_last=True, every_n_train_steps=4)]

    _, planned = both(max_epochs=3, limit_val_batches=2, callbacks=made, enable_checkpointing=True)
    assert_planned(planned)
    one, other = (torch.load(path, weights_only=False) for path in saved)
    for key in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
        assert_same_tree(one[key], other[key])


def test_early_stopping_and_checkpoints(tmp_path: Path) -> None:
    """Stops in the same epoch; the best checkpoint has the same name (its metric is in it) and the same weights."""
    kept: list[callbacks.ModelCheckpoint] = []

    def made() -> list[pl.Callback]:
        kept.append(
            callbacks.ModelCheckpoint(tmp_path / str(len(kept)), "{step}-{val_loss:.9f}", monitor="val_loss", save_top_k=2)
        )
        return [callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0), kept[-1]]

    plain, planned = both(max_epochs=5, limit_val_batches=2, callbacks=made, enable_checkpointing=True)
    assert_planned(planned)
    assert plain.current_epoch < 5 and plain.current_epoch == planned.current_epoch
    paths = [Path(c.best_model_path) for c in kept]
    assert paths[0].name == paths[1].name and paths[0] != paths[1]
    one, other = (torch.load(path, weights_only=False) for path in paths)
    assert_same_tree(one["state_dict"], other["state_dict"])
    Task().load_state_dict(other["state_dict"], strict=True)


class Unfreezing(callbacks.BaseFinetuning):
    """One more layer from every epoch on, with a parameter group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(pl_module.net.layers[epoch - 1], optimizer)


class Tuned(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


def test_unfreezing_layers() -> None:
    """D6: whenever layers are unfrozen, the step is observed again and gets a plan of its own."""
    _, planned = both(Tuned, max_epochs=3, callbacks=lambda: [Unfreezing()])
    found = plans_of(planned)
    assert len(found) == 3 and len({s.plan.fingerprint for s in found}) == 3
    assert not any(s.drift.deviated for s in found)


class Combined(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


def test_several_loaders() -> None:
    """Two training loaders of different lengths in one batch, and two validation loaders."""
    _, planned = both(
        Combined,
        data=lambda: CombinedLoader({"a": loader(), "b": loader(count=100)}, "max_size_cycle"),
        val=lambda: [loader(False), loader(False, size=64)],
        limit_val_batches=1.0,
    )
    assert plans_of(planned)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= planned.callback_metrics.keys()


def test_sanity_checks_and_validation_between_steps() -> None:
    """Sanity checks, validation twice an epoch, limited loaders: nothing of it is observed or planned."""
    _, planned = both(val_check_interval=0.5, limit_val_batches=2, num_sanity_val_steps=2, limit_train_batches=6)
    assert_planned(planned)


class Renewed(Task):
    """Its forward is another one from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = small(1, depth=2)

    def loss(self, batch: Any) -> Tensor:
        out = self.net(batch[0])
        if self.current_epoch:
            out = nn.functional.softplus(out) + self.extra(batch[0]).sigmoid()
        return nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten())


@pytest.mark.filterwarnings("ignore:MemOpt. the forward left the plan")
def test_a_forward_that_changes_is_observed_again() -> None:
    """Drift: after two forwards that leave the plan the step is observed again; the new plan is the new forward's."""
    _, planned = both(Renewed, max_epochs=2)
    (found,) = plans_of(planned)
    assert found.past.again == 1 and not found.drift.deviated and found.peaks.steps > 0
