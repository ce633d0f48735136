"""Generators against discriminators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.robustness.scripts.registry import Log, Watch, images, script

NOISE, SIZE = 16, 24


class Generator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)


class Discriminator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 1, 4, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten()


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def _networks() -> tuple[Generator, Discriminator, torch.optim.Optimizer, torch.optim.Optimizer]:
    generator, discriminator = Generator(), Discriminator()
    generator.apply(_initialize)
    discriminator.apply(_initialize)
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    return generator, discriminator, for_generator, for_discriminator


def _play(
    generator: nn.Module,
    discriminator: nn.Module,
    for_generator: torch.optim.Optimizer,
    for_discriminator: torch.optim.Optimizer,
    log: Log,
    steps: int,
) -> dict[str, Any]:
    criterion = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(SIZE), torch.zeros(SIZE)
    for x, _ in images(steps, SIZE):
        discriminator.zero_grad()
        on_real = criterion(discriminator(x), real)
        on_real.backward()
        made = generator(torch.randn(SIZE, NOISE, 1, 1))
        on_fake = criterion(discriminator(made.detach()), fake)
        on_fake.backward()
        for_discriminator.step()

        generator.zero_grad()
        fooled = criterion(discriminator(made), real)
        fooled.backward()
        for_generator.step()
        log(on_real.item() + on_fake.item(), fooled.item())
    return {"generator": generator, "discriminator": discriminator, "adam": [for_generator, for_discriminator]}


@script("DCGAN, one block for the generator with both optimizers")
def gan_one_block(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    generator, discriminator, for_generator, for_discriminator = _networks()
    with watch(generator, [for_generator, for_discriminator]):
        return _play(generator, discriminator, for_generator, for_discriminator, log, steps)


@script("DCGAN, a block for each network")
def gan_two_blocks(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    generator, discriminator, for_generator, for_discriminator = _networks()
    with watch(generator, for_generator), watch(discriminator, for_discriminator):
        return _play(generator, discriminator, for_generator, for_discriminator, log, steps)


@script("Wasserstein critic with a gradient penalty")
def critic_penalty(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    generator = Generator()
    critic = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.SiLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.SiLU(), nn.Flatten())
    critic.append(nn.Linear(24 * 16, 1))
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    with watch(critic, optimizer):
        for x, _ in images(steps, SIZE):
            with torch.no_grad():
                made = generator(torch.randn(SIZE, NOISE, 1, 1))
            at = torch.rand(SIZE, 1, 1, 1)
            between = (at * x + (1 - at) * made).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = critic(made).mean() - critic(x).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item(), penalty.item())
    return {"critic": critic, "rmsprop": optimizer}
