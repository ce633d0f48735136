"""The networks of MONeT's evaluation (Shah et al., ICLR 2021) that are measured here: a ResNet-50 and a U-Net, at full width.

As its scripts have them: the loss is the sum of what the network gives, images are 224 x 224 pixels for the ResNet and
416 x 608 for the U-Net. Each builder gives (model, batch, blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import vision
from benchmarks.models.convolutional import Built, Output

_WIDTHS = (64, 128, 256, 512, 512)


class Summed(nn.Module):
    """A network whose loss is the sum of its results."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Output:
        """`image`: [batch, 3, height, width]."""
        return Output(self.network(image).sum())


def _twice(inside: int, middle: int, out: int) -> nn.Sequential:
    """Twice a convolution with bias, batch norm, ReLU in place."""
    layers: list[nn.Module] = []
    for a, b in ((inside, middle), (middle, out)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Five heights; an average pool to the larger size is the way up, which MONeT uses instead of an interpolation."""

    def __init__(self) -> None:
        super().__init__()
        inside = (3, *_WIDTHS)
        self.down = nn.ModuleList(_twice(a, b, b) for a, b in zip(inside, _WIDTHS, strict=False))
        self.up = nn.ModuleList(_twice(2 * a, a, b) for a, b in ((512, 256), (256, 128), (128, 64), (64, 64)))
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = [self.down[0](image)]
        for down in self.down[1:]:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up in self.up:
            skip = skips.pop()
            x = up(torch.cat([skip, F.adaptive_avg_pool2d(x, skip.shape[2:])], 1))
        head: Tensor = self.head(x)
        return head


def resnet50(batch: int = 184) -> Built:
    """ResNet-50, 224 x 224 pixels: batch 184."""
    network = vision.resnet50()
    model = Summed(network).train()
    return model, {"image": torch.randn(batch, 3, 224, 224)}, lambda _: [m for m in network if isinstance(m, vision.Residual)]


def unet(batch: int = 11) -> Built:
    """U-Net, 416 x 608 pixels: batch 11."""
    network = UNet()
    return Summed(network).train(), {"image": torch.randn(batch, 3, 416, 608)}, lambda _: [*network.down, *network.up]
