"""The networks of Dymem's and FreeLunch's evaluations, layer by layer as published.

Sources: AlexNet (Krizhevsky et al., 2012; one tower, with LRN: the 23 steps that Dymem counts), VGG-16 (Simonyan and
Zisserman, 2015, D), ResNet-50/101/152 (He et al., 2016, table 1; strides on the 3x3 convolution, as in torchvision), ResNet-32
(the same, 4.2: 3 stages of 5 basic blocks), ResNet-256 (FreeLunch names no shapes: bottlenecks 3, 8, 71, 3, which is 257
layers), Inception V4 (Szegedy et al., 2017, figs. 3 to 9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.models.papers.layers import Map, Net
from lightning_memopt.graph import Graph
from lightning_memopt.plan.rates import Device


def _classify(net: Net, x: Map, classes: int = 1000) -> None:
    net.softmax(net.linear(net.pool_all(x), classes))


def alexnet(net: Net, batch: int) -> None:
    x = net.input(batch, 3, 227, 227)
    x = net.max_pool(net.lrn(net.relu(net.conv(x, 96, 11, 4))), 3, 2)
    x = net.max_pool(net.lrn(net.relu(net.conv(x, 256, 5, 1, 2))), 3, 2)
    for channels in (384, 384, 256):
        x = net.relu(net.conv(x, channels, 3, 1, 1))
    _fully_connected(net, net.max_pool(x, 3, 2))


def _fully_connected(net: Net, x: Map) -> None:
    for _ in range(2):
        x = net.dropout(net.relu(net.linear(x, 4096)))
    net.softmax(net.linear(x, 1000))


def vgg16(net: Net, batch: int) -> None:
    x = net.input(batch, 3, 224, 224)
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = net.relu(net.conv(x, channels, 3, 1, 1))
        x = net.max_pool(x, 2, 2)
    _fully_connected(net, x)


def _unit(
    net: Net, x: Map, channels: int, kernel: int | tuple[int, int], stride: int = 1, pad: int | tuple[int, int] = 0
) -> Map:
    """Convolution, batch normalisation, ReLU."""
    return net.relu(net.norm(net.conv(x, channels, kernel, stride, pad)))


def resnet(net: Net, batch: int, blocks: Sequence[int]) -> None:
    """Bottleneck blocks on images of 224 x 224."""
    x = net.max_pool(_unit(net, net.input(batch, 3, 224, 224), 64, 7, 2, 3), 3, 2, 1)
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = _unit(net, _unit(net, x, width, 1), width, 3, stride, 1)
            y = net.norm(net.conv(y, 4 * width, 1))
            x = x if block else net.norm(net.conv(x, 4 * width, 1, stride))
            x = net.relu(net.add(y, x))
    _classify(net, x)


def resnet32(net: Net, batch: int, side: int = 224, norm: bool = True) -> None:
    """15 basic blocks of 16, 32 and 64 channels."""
    after: Callable[[Map], Map] = net.norm if norm else lambda x: x
    x = net.relu(after(net.conv(net.input(batch, 3, side, side), 16, 3, 1, 1)))
    for stage, width in enumerate((16, 32, 64)):
        for block in range(5):
            stride = 2 if stage and not block else 1
            y = net.relu(after(net.conv(x, width, 3, stride, 1)))
            y = after(net.conv(y, width, 3, 1, 1))
            x = after(net.conv(x, width, 1, stride)) if stride == 2 else x
            x = net.relu(net.add(y, x))
    _classify(net, x, 10)


def inception_v4(net: Net, batch: int) -> None:
    def unit(x: Map, channels: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True) -> Map:
        kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
        return _unit(net, x, channels, kernel, stride, (kh // 2, kw // 2) if same else 0)

    x = unit(net.input(batch, 3, 299, 299), 32, 3, 2, same=False)
    x = unit(unit(x, 32, 3, same=False), 64, 3)
    x = net.concat(net.max_pool(x, 3, 2), unit(x, 96, 3, 2, same=False))
    left = unit(unit(x, 64, 1), 96, 3, same=False)
    right = unit(unit(unit(unit(x, 64, 1), 64, (7, 1)), 64, (1, 7)), 96, 3, same=False)
    x = net.concat(left, right)
    x = net.concat(unit(x, 192, 3, 2, same=False), net.max_pool(x, 3, 2))
    for _ in range(4):
        x = net.concat(
            unit(net.avg_pool(x, 3, 1, 1), 96, 1),
            unit(x, 96, 1),
            unit(unit(x, 64, 1), 96, 3),
            unit(unit(unit(x, 64, 1), 96, 3), 96, 3),
        )
    x = net.concat(
        net.max_pool(x, 3, 2), unit(x, 384, 3, 2, same=False), unit(unit(unit(x, 192, 1), 224, 3), 256, 3, 2, same=False)
    )
    for _ in range(7):
        x = net.concat(
            unit(net.avg_pool(x, 3, 1, 1), 128, 1),
            unit(x, 384, 1),
            unit(unit(unit(x, 192, 1), 224, (1, 7)), 256, (7, 1)),
            unit(unit(unit(unit(unit(x, 192, 1), 192, (1, 7)), 224, (7, 1)), 224, (1, 7)), 256, (7, 1)),
        )
    x = net.concat(
        net.max_pool(x, 3, 2),
        unit(unit(x, 192, 1), 192, 3, 2, same=False),
        unit(unit(unit(unit(x, 256, 1), 256, (1, 7)), 320, (7, 1)), 320, 3, 2, same=False),
    )
    for _ in range(3):
        third = unit(x, 384, 1)
        fourth = unit(unit(unit(x, 384, 1), 448, (1, 3)), 512, (3, 1))
        x = net.concat(
            unit(net.avg_pool(x, 3, 1, 1), 256, 1),
            unit(x, 256, 1),
            unit(third, 256, (1, 3)),
            unit(third, 256, (3, 1)),
            unit(fourth, 256, (3, 1)),
            unit(fourth, 256, (1, 3)),
        )
    net.softmax(net.linear(net.dropout(net.pool_all(x)), 1000))


NETWORKS: dict[str, Callable[[Net, int], None]] = {
    "AlexNet": alexnet,
    "VGG-16": vgg16,
    "ResNet-32": resnet32,
    "ResNet-32, 32x32": lambda net, batch: resnet32(net, batch, 32),
    "ResNet-32, no norm": lambda net, batch: resnet32(net, batch, 224, norm=False),
    "ResNet-50": lambda net, batch: resnet(net, batch, (3, 4, 6, 3)),
    "ResNet-101": lambda net, batch: resnet(net, batch, (3, 4, 23, 3)),
    "ResNet-152": lambda net, batch: resnet(net, batch, (3, 8, 36, 3)),
    "ResNet-256": lambda net, batch: resnet(net, batch, (3, 8, 71, 3)),
    "Inception V4": inception_v4,
}


def network(name: str, batch: int, device: Device, efficiency: float) -> Graph:
    """One training step of a network. Raises KeyError for unknown names."""
    net = Net(device, efficiency)
    NETWORKS[name](net, batch)
    return net.build()
