"""Three convolutional networks with skips and concatenations, in plain torch: a U-Net, a DenseNet, an Inception.

Small widths, batch norm throughout. Each builder gives (model, batch, blocks): `model(**batch).loss` is the training loss,
`blocks(model)` the modules that per-block checkpointing would wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Blocks = Callable[[nn.Module], list[nn.Module]]
Built = tuple[nn.Module, dict[str, Tensor], Blocks]


class Output(NamedTuple):
    """What a model returns, named as `transformers` names it."""

    loss: Tensor


def _convolution(inside: int, out: int, size: int | tuple[int, int] = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU in place, as torchvision has them."""
    padding = size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2)
    convolution = nn.Conv2d(inside, out, size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Up(nn.Module):
    """A step back up a U-Net: transposed convolution, the skip from the same height, two convolutions."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inside, out, 2, 2)
        self.both = nn.Sequential(_convolution(2 * out, out), _convolution(out, out))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.both(torch.cat([skip, self.up(x)], 1))


class UNet(nn.Module):
    """Ronneberger et al. (2015) with batch norm: skips run from every height of the way down to the same on the way up."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(a, b), _convolution(b, b)) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.dropout = nn.Dropout2d(0.2)
        self.up = nn.ModuleList(Up(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor, mask: Tensor) -> Output:
        """`image` [batch, 3, height, width], `mask` [batch, height, width]."""
        skips = [self.down[0](image)]
        for down in self.down[1:]:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = self.dropout(skips.pop())
        for up in self.up:
            x = up(x, skips.pop())
        return Output(F.cross_entropy(self.head(x), mask))


class Dense(nn.Module):
    """A layer of a DenseNet: reads everything that the layers of its block made, adds `growth` channels."""

    def __init__(self, inside: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(
            nn.BatchNorm2d(inside), nn.ReLU(inplace=True), nn.Conv2d(inside, 4 * growth, 1, bias=False)
        )
        self.grow = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, *features: Tensor) -> Tensor:
        return self.dropout(self.grow(self.squeeze(torch.cat(features, 1))))


class Transition(nn.Sequential):
    """Half the channels, a quarter of the pixels."""

    def __init__(self, inside: int) -> None:
        super().__init__(
            nn.BatchNorm2d(inside), nn.ReLU(inplace=True), nn.Conv2d(inside, inside // 2, 1, bias=False), nn.AvgPool2d(2)
        )


class DenseNet(nn.Module):
    """DenseNet-BC, Huang et al. (2017): the concatenations grow with the square of a block's layers."""

    def __init__(self, growth: int, layers: tuple[int, ...], dropout: float, classes: int) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for n in layers:
            self.blocks.append(nn.ModuleList(Dense(width + i * growth, growth, dropout) for i in range(n)))
            width += n * growth
            if len(self.blocks) < len(layers):
                self.transitions.append(Transition(width))
                width //= 2
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Output:
        x = self.stem(image)
        for i, block in enumerate(self.blocks):
            features = [x]
            for layer in block:
                features.append(layer(*features))
            x = torch.cat(features, 1)
            x = self.transitions[i](x) if i < len(self.transitions) else x
        return Output(F.cross_entropy(self.head(F.relu(self.norm(x)).mean((2, 3))), label))


class Mixed(nn.Module):
    """An Inception module: four branches side by side, one of them factorised, concatenated."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.point = _convolution(inside, width, 1)
        self.square = nn.Sequential(_convolution(inside, width, 1), _convolution(width, 2 * width))
        self.long = nn.Sequential(
            _convolution(inside, width, 1), _convolution(width, width, (1, 7)), _convolution(width, width, (7, 1))
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), _convolution(inside, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.square(x), self.long(x), self.pooled(x)], 1)


class Inception(nn.Module):
    """After Szegedy et al. (2015): a stem, groups of `Mixed` with pooling in between, a second loss in the middle."""

    def __init__(self, width: int, groups: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, width), _convolution(width, width), _convolution(width, 2 * width), nn.MaxPool2d(2)
        )
        self.groups = nn.ModuleList()
        inside = 2 * width
        for i, n in enumerate(groups):
            out = width << i
            self.groups.append(nn.ModuleList(Mixed(inside if j == 0 else 5 * out, out) for j in range(n)))
            inside = 5 * out
        self.early = nn.Linear(inside // 2, classes)
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(inside, classes)

    def forward(self, image: Tensor, label: Tensor) -> Output:
        x, early = self.stem(image), None
        for i, group in enumerate(self.groups):
            x = x if i == 0 else F.max_pool2d(x, 2)
            for module in group:
                x = module(x)
            if i == len(self.groups) - 2:
                early = F.cross_entropy(self.early(self.dropout(x.mean((2, 3)))), label)
        loss = F.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), label)
        return Output(loss if early is None else loss + 0.3 * early)


def _images(batch: int, pixels: int, classes: int) -> dict[str, Tensor]:
    return {"image": torch.randn(batch, 3, pixels, pixels), "label": torch.randint(0, classes, (batch,))}


def unet(batch: int = 8) -> Built:
    """U-Net, 4 steps down: batch 8, 64 x 64 pixels, 16 channels at the top."""
    data = {"image": torch.randn(batch, 3, 64, 64), "mask": torch.randint(0, 8, (batch, 64, 64))}
    return UNet(16, 4, 8).train(), data, lambda m: [*m.down, *m.up]


def densenet(batch: int = 16) -> Built:
    """DenseNet-BC, 28 layers: 8 + 12 + 8, growth 12, batch 16, 32 x 32 pixels; layers are checkpointed, as in torchvision."""
    model = DenseNet(12, (8, 12, 8), 0.1, 10).train()
    return model, _images(batch, 32, 10), lambda m: [*(layer for block in m.blocks for layer in block), *m.transitions]


def inception(batch: int = 16) -> Built:
    """Inception, 9 modules: 3 + 4 + 2, batch 16, 32 x 32 pixels."""
    model = Inception(16, (3, 4, 2), 10).train()
    return model, _images(batch, 32, 10), lambda m: [m.stem, *(module for group in m.groups for module in group)]


MODELS = {"unet": unet, "densenet": densenet, "inception": inception}
