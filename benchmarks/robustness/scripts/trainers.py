"""Loops that Lightning owns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.robustness.scripts.adversarial import NOISE, Discriminator, Generator
from benchmarks.robustness.scripts.language import LENGTH, SIZE, WORDS, Gpt
from benchmarks.robustness.scripts.registry import Log, Watch, images, script, tokens

_NEEDS = ("lightning.pytorch",)


def _fit(module: Any, loader: DataLoader, watch: Watch, log: Log, steps: int, **options: Any) -> dict[str, Any]:
    from lightning.pytorch import Callback, Trainer

    class Print(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                log(*[metric.item() for metric in trainer.callback_metrics.values()])

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(
        accelerator="cpu", strategy=watch.strategy(), max_epochs=1, callbacks=[Print()], use_distributed_sampler=False,
        **quiet, **options,
    )  # fmt: skip
    trainer.fit(module, loader)
    return {"module": module, "optimizers": trainer.optimizers}


def _pictures(batches: int, size: int) -> DataLoader:
    x, y = next(images(1, batches * size))
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True)


@script("Lightning: autoencoder", needs=_NEEDS)
def lightning_autoencoder(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Autoencoder(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 256))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].flatten(1)
            loss = F.mse_loss(self.decoder(self.encoder(x)), x)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return _fit(Autoencoder(), _pictures(steps, 64), watch, log, steps)


@script("Lightning: GAN by manual optimization, optimizers toggled", needs=_NEEDS)
def lightning_gan(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = Generator(), Discriminator()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, _ = batch
            for_generator, for_discriminator = self.optimizers()
            self.toggle_optimizer(for_generator)
            made = self.generator(torch.randn(len(x), NOISE, 1, 1))
            fooled = F.binary_cross_entropy_with_logits(self.discriminator(made), torch.ones(len(x)))
            self.manual_backward(fooled)
            for_generator.step()
            for_generator.zero_grad()
            self.untoggle_optimizer(for_generator)

            self.toggle_optimizer(for_discriminator)
            on_real = F.binary_cross_entropy_with_logits(self.discriminator(x), torch.ones(len(x)))
            on_fake = F.binary_cross_entropy_with_logits(self.discriminator(made.detach()), torch.zeros(len(x)))
            seen = (on_real + on_fake) / 2
            self.manual_backward(seen)
            for_discriminator.step()
            for_discriminator.zero_grad()
            self.untoggle_optimizer(for_discriminator)
            self.log_dict({"fooled": fooled, "seen": seen})

        def configure_optimizers(self) -> Any:
            options = dict(lr=2e-4, betas=(0.5, 0.999))
            return (
                torch.optim.Adam(self.generator.parameters(), **options),
                torch.optim.Adam(self.discriminator.parameters(), **options),
            )

    return _fit(Gan(), _pictures(steps, 24), watch, log, steps)


@script("Lightning: GPT, accumulation over two batches, bf16, clipping", needs=_NEEDS)
def lightning_gpt(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Gpt(None, None)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            _, loss = self.model(ids[:, :-1], ids[:, 1:])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]

    data = TensorDataset(next(tokens(1, (2 * steps * SIZE, LENGTH + 1), WORDS)))
    loader = DataLoader(data, batch_size=SIZE)
    options = dict(accumulate_grad_batches=2, precision="bf16-mixed", gradient_clip_val=1.0)
    return _fit(Language(), loader, watch, log, steps, **options)
