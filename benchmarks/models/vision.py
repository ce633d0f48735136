"""The convolutional networks that OLLA measures (Steiner et al., 2022, section 5.2), at full width, in plain torch.

Layers, widths and in-place activations are those of torchvision 0.12, which the paper uses. Each builder gives (model, batch);
`model(**batch).loss` is the training loss. The paper does not say which depth of VGG and ResNet it measures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.convolutional import Output

Built = tuple[nn.Module, dict[str, Tensor]]
CLASSES = 1000


class Classifier(nn.Module):
    """A network and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, label: Tensor) -> Output:
        """`image`: [batch, 3, ...]; `label`: [batch]."""
        return Output(F.cross_entropy(self.network(image), label))


def _unit(
    inside: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type | None = nn.ReLU
) -> nn.Sequential:
    """Convolution, batch norm, activation in place."""
    layers: list[nn.Module] = [
        nn.Conv2d(inside, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    ]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


def _head(width: int, dropout: float) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, CLASSES)]


def alexnet() -> nn.Module:
    """Krizhevsky et al. (2012), in the form of 2014 with one tower."""
    layers: list[nn.Module] = []
    shapes = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
    for i, shape in enumerate(shapes):
        layers += [nn.Conv2d(*shape), nn.ReLU(inplace=True)]
        if i in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True)]
    layers += [nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers)


def vgg16() -> nn.Module:
    """Simonyan and Zisserman (2015), configuration D, without batch norm."""
    layers: list[nn.Module] = []
    inside = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """An Inception module: four branches side by side, concatenated."""

    def __init__(self, inside: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _unit(inside, one, 1),
                nn.Sequential(_unit(inside, three[0], 1), _unit(*three)),
                nn.Sequential(_unit(inside, five[0], 1), _unit(*five)),  # 3 x 3, as torchvision has it
                nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _unit(inside, pooled, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class GoogLeNet(nn.Module):
    """Szegedy et al. (2015), with batch norm, and two auxiliary classifiers in training."""

    def __init__(self) -> None:
        super().__init__()
        pool = lambda size, stride: nn.MaxPool2d(size, stride, ceil_mode=True)  # noqa: E731
        self.stem = nn.Sequential(_unit(3, 64, 7, 2), pool(3, 2), _unit(64, 64, 1), _unit(64, 192), pool(3, 2))
        self.first = nn.Sequential(
            Branches(192, 64, (96, 128), (16, 32), 32), Branches(256, 128, (128, 192), (32, 96), 64), pool(3, 2),
            Branches(480, 192, (96, 208), (16, 48), 64),
        )  # fmt: skip
        self.second = nn.Sequential(
            Branches(512, 160, (112, 224), (24, 64), 64), Branches(512, 128, (128, 256), (24, 64), 64),
            Branches(512, 112, (144, 288), (32, 64), 64),
        )  # fmt: skip
        self.third = nn.Sequential(
            Branches(528, 256, (160, 320), (32, 128), 128), pool(2, 2), Branches(832, 256, (160, 320), (32, 128), 128),
            Branches(832, 384, (192, 384), (48, 128), 128),
        )  # fmt: skip
        self.early = nn.ModuleList(self._auxiliary(width) for width in (512, 528))
        self.head = nn.Sequential(*_head(1024, 0.2))

    @staticmethod
    def _auxiliary(width: int) -> nn.Module:
        layers = [nn.AdaptiveAvgPool2d(4), _unit(width, 128, 1), nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Dropout(0.7), nn.Linear(1024, CLASSES))

    def forward(self, image: Tensor, label: Tensor) -> Output:
        """`image`: [batch, 3, 224, 224]; `label`: [batch]."""
        a = self.first(self.stem(image))
        early = self.early[0](a)
        b = self.second(a)
        later = self.early[1](b)
        loss = F.cross_entropy(self.head(self.third(b)), label)
        return Output(loss + 0.3 * F.cross_entropy(early, label) + 0.3 * F.cross_entropy(later, label))


class Residual(nn.Module):
    """A block whose input is added to its output, with a projection where their shapes differ."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu(y, inplace=True)


def resnet50() -> nn.Module:
    """He et al. (2016): bottleneck blocks, 3-4-6-3."""
    layers: list[nn.Module] = [_unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width, out = 64 << stage, 256 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(_unit(inside, width, 1), _unit(width, width, 3, stride), _unit(width, out, 1, act=None))
            layers.append(Residual(body, None if block else _unit(inside, out, 1, stride, act=None)))
            inside = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))


def _unit3d(inside: int, out: int, kernel: int = 3, stride: int = 1, act: bool = True) -> nn.Sequential:
    layers = [nn.Conv3d(inside, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm3d(out)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if act else []))


def resnet3d() -> nn.Module:
    """R3D-18, Tran et al. (2018): basic blocks on videos."""
    stem = [nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem]
    inside = 64
    for stage in range(4):
        out = 64 << stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(_unit3d(inside, out, 3, stride), _unit3d(out, out, act=False))
            layers.append(Residual(body, _unit3d(inside, out, 1, stride, act=False) if stride > 1 else None))
            inside = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inside, 400))


class Squeeze(nn.Module):
    """Squeeze and excitation: channels are scaled by what a small network says of their means."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, narrow, 1), nn.Conv2d(narrow, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)), inplace=True))
        return x * torch.sigmoid(scale)


class Inverted(nn.Module):
    """An inverted residual: wide inside, depthwise; EfficientNet's with squeeze and stochastic depth."""

    def __init__(
        self, inside: int, out: int, kernel: int, stride: int, expand: int, act: type, squeeze: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        wide = inside * expand
        layers = [_unit(inside, wide, 1, act=act)] if expand > 1 else []
        layers.append(_unit(wide, wide, kernel, stride, groups=wide, act=act))
        more: list[nn.Module] = [Squeeze(wide, max(1, inside // 4))] if squeeze else []
        self.body = nn.Sequential(*layers, *more, _unit(wide, out, 1, act=None))
        self.adds, self.squeezes, self.drop = stride == 1 and inside == out, squeeze, drop

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        if not self.adds:
            return y
        if self.drop:  # whole samples are left out
            noise = torch.empty(len(y), 1, 1, 1, dtype=y.dtype, device=y.device).bernoulli_(1 - self.drop)
            y = y * noise.div_(1 - self.drop)
        if self.squeezes:
            y += x
            return y
        return x + y


def _inverted_stages(settings: list[tuple[int, int, int, int, int]], inside: int, act: type, **more: bool) -> list[nn.Module]:
    """Stages of (expand, out, count, stride, kernel)."""
    blocks = sum(count for _, _, count, _, _ in settings)
    layers: list[nn.Module] = []
    for expand, out, count, stride, kernel in settings:
        for i in range(count):
            drop = 0.2 * len(layers) / blocks if more.get("squeeze") else 0.0
            layers.append(Inverted(inside, out, kernel, 1 if i else stride, expand, act, more.get("squeeze", False), drop))
            inside = out
    return layers


def efficientnet() -> nn.Module:
    """EfficientNet-B0, Tan and Le (2019)."""
    settings = [
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ]  # fmt: skip
    stages = _inverted_stages(settings, 32, nn.SiLU, squeeze=True)
    return nn.Sequential(_unit(3, 32, 3, 2, act=nn.SiLU), *stages, _unit(320, 1280, 1, act=nn.SiLU), *_head(1280, 0.2))


def mobilenet() -> nn.Module:
    """MobileNetV2, Sandler et al. (2018)."""
    settings = [
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3), (6, 160, 3, 2, 3),
        (6, 320, 1, 1, 3),
    ]  # fmt: skip
    stages = _inverted_stages(settings, 32, nn.ReLU6)
    return nn.Sequential(_unit(3, 32, 3, 2, act=nn.ReLU6), *stages, _unit(320, 1280, 1, act=nn.ReLU6), *_head(1280, 0.2))


def mnasnet() -> nn.Module:
    """MnasNet-B1 at width 1, Tan et al. (2019)."""
    settings = [
        (3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5), (6, 96, 2, 1, 3), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
    ]  # fmt: skip
    stem = [_unit(3, 32, 3, 2), _unit(32, 32, 3, 1, groups=32), _unit(32, 16, 1, act=None)]
    return nn.Sequential(*stem, *_inverted_stages(settings, 16, nn.ReLU), _unit(320, 1280, 1), *_head(1280, 0.2))


def _images(batch: int) -> dict[str, Tensor]:
    return {"image": torch.randn(batch, 3, 224, 224), "label": torch.randint(0, CLASSES, (batch,))}


def _videos(batch: int) -> dict[str, Tensor]:
    return {"image": torch.randn(batch, 3, 16, 112, 112), "label": torch.randint(0, 400, (batch,))}


def built(name: str, batch: int) -> Built:
    """A network in training, and a batch: 224 x 224 pixels; videos of 16 frames, 112 x 112."""
    network = MODELS[name]()
    model = network if isinstance(network, GoogLeNet) else Classifier(network)
    return model.train(), _videos(batch) if name == "ResNet3D-18" else _images(batch)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "AlexNet": alexnet,
    "VGG-16": vgg16,
    "GoogLeNet": GoogLeNet,
    "ResNet-50": resnet50,
    "EfficientNet-B0": efficientnet,
    "MobileNetV2": mobilenet,
    "MnasNet-1.0": mnasnet,
    "ResNet3D-18": resnet3d,
}
PARAMETERS = {
    "AlexNet": 61_100_840,
    "VGG-16": 138_357_544,
    "GoogLeNet": 13_004_888,
    "ResNet-50": 25_557_032,
    "EfficientNet-B0": 5_288_548,
    "MobileNetV2": 3_504_872,
    "MnasNet-1.0": 4_383_312,
    "ResNet3D-18": 33_371_472,
}
"""Numbers of parameters as torchvision documents them."""
