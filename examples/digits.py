"""A small ResNet trained on scikit-learn's bundled handwritten digits.

In: `sklearn.datasets.load_digits` (1797 grey images of 8x8 pixels, ten classes), enlarged once to 16x16. Out: `build`
for plain torch, `task` and `data` for Lightning. The network is the basic block of He et al. (2015,
section 3.3) with BatchNorm and in-place ReLU: state that a second forward pass would disturb.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .training import Data, Task, Workload, fit, loss_of

CLASSES = 10
HELD_OUT_COUNT = 360
SPLIT_SEED = 0
# Mean and standard deviation of the pixels after division by their maximum, 16.
PIXEL_MEAN, PIXEL_STD = 0.305, 0.376


@dataclass(frozen=True)
class DigitsSettings:
    """Sizes of network and training; `side` is the image side in pixels, `widths` the channels of each stage."""

    widths: tuple[int, ...] = (24, 48, 96)
    blocks_per_stage: int = 2
    side: int = 16
    batch_size: int = 128
    learning_rate: float = 1e-3
    epochs: int = 8

    @classmethod
    def quick(cls) -> "DigitsSettings":
        """Two epochs of a smaller network: for tests, not for memory figures."""
        return cls(widths=(8, 16), blocks_per_stage=1, side=8, batch_size=64, learning_rate=1e-2, epochs=2)


FULL = DigitsSettings()


# The images


@cache
def split_indices() -> tuple[Tensor, Tensor]:
    """Rows of `load_digits` to train on and held-out rows: the same for every seed and setting."""
    order = torch.randperm(len(load_digits().target), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return order[HELD_OUT_COUNT:], order[:HELD_OUT_COUNT]


def datasets(settings: DigitsSettings) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out `(images, labels)`: float32 `[n, 1, side, side]`, int64 `[n]`."""
    raw = load_digits()
    pixels = torch.tensor(raw.images, dtype=torch.float32)[:, None]
    images = F.interpolate((pixels / 16 - PIXEL_MEAN) / PIXEL_STD, size=settings.side, mode="bilinear")
    labels = torch.tensor(raw.target, dtype=torch.int64)
    train, held_out = split_indices()
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def loaders(settings: DigitsSettings, seed: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of `(images, labels)` batches as in `datasets`: training and held-out."""
    train, held_out = datasets(settings)
    order = torch.Generator().manual_seed(seed)
    return (
        # drop_last: every step has the same shapes, as a memory plan expects.
        DataLoader(train, settings.batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(held_out, settings.batch_size),
    )


# The network


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: `[n, c_in, h, w]` to `[n, c_out, h / stride, w / stride]`."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Images, float32 `[n, 1, side, side]`, to class logits `[n, CLASSES]`; a stage halves the side, but the first."""

    def __init__(self, settings: DigitsSettings) -> None:
        super().__init__()
        first = settings.widths[0]
        self.stem = nn.Sequential(nn.Conv2d(1, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        c_in = first
        for stage, width in enumerate(settings.widths):
            for block in range(settings.blocks_per_stage):
                blocks.append(ResidualBlock(c_in, width, stride=2 if stage and not block else 1))
                c_in = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c_in, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


# Training


def build_model(seed: int, settings: DigitsSettings) -> SmallResNet:
    """The network with the weights of `seed`; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallResNet(settings)


def make_optimizer(model: nn.Module, settings: DigitsSettings) -> torch.optim.Optimizer:
    """AdamW over all parameters: two state values per parameter."""
    return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)


def build(seed: int, settings: DigitsSettings = FULL) -> Workload:
    """Model, optimizer factory and loaders, all fixed by `seed`."""
    return Workload(build_model(seed, settings), lambda model: make_optimizer(model, settings), *loaders(settings, seed))


def task(settings: DigitsSettings = FULL, seed: int = 0) -> Task:
    """The network with its optimizer, for a Trainer."""
    return Task(build_model(seed, settings), lambda model: make_optimizer(model, settings))


def data(settings: DigitsSettings = FULL, seed: int = 0) -> Data:
    """The loaders, for a Trainer."""
    return Data(lambda: loaders(settings, seed))


__all__ = ["FULL", "DigitsSettings", "build", "build_model", "data", "loss_of", "task"]

if __name__ == "__main__":
    fit(task(), data(), budget="40MiB", max_epochs=FULL.epochs)
