"""A U-Net of SDXL's size and shape: residual convolutions, and transformers that read words at two of three scales."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WIDTHS, _DEPTHS = (320, 640, 1280), (0, 2, 10)


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(32, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1))
        self.after = nn.Sequential(nn.GroupNorm(32, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1))
        self.time = nn.Linear(1280, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.before(x) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.after(hidden)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, read: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(n, width, bias=False) for n in (width, read, read))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        q, k, v = (m(t).unflatten(-1, (-1, 64)).transpose(1, 2) for m, t in ((self.q, x), (self.k, words), (self.v, words)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.words = Attention(width, width), Attention(width, 2048)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y)
        x = x + self.words(self.norms[1](x), words)
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))  # type: ignore[no-any-return]


class Reading(nn.Module):
    """Transformer blocks over the places of a picture."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm, self.into, self.back = nn.GroupNorm(32, width), nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.into(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            y = block(y, words)
        return x + self.back(y).transpose(1, 2).unflatten(2, x.shape[2:])  # type: ignore[no-any-return]


class DiffusionUNet(nn.Module):
    """`model(noisy, words).loss`, as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(320, 1280), nn.SiLU(), nn.Linear(1280, 1280))
        self.first = nn.Conv2d(4, _WIDTHS[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, width = [_WIDTHS[0]], _WIDTHS[0]
        for i, (outer, depth) in enumerate(zip(_WIDTHS, _DEPTHS, strict=True)):
            for _ in range(2):
                self.down.append(nn.ModuleList([Residual(width, outer), Reading(outer, depth) if depth else nn.Identity()]))
                skips.append(width := outer)
            if i < 2:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([Residual(width, width), Reading(width, 10), Residual(width, width)])
        for i, (outer, depth) in reversed(list(enumerate(zip(_WIDTHS, _DEPTHS, strict=True)))):
            for _ in range(3):
                inner, width = width + skips.pop(), outer
                self.up.append(nn.ModuleList([Residual(inner, outer), Reading(outer, depth) if depth else nn.Identity()]))
            if i:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.last = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, noisy: Tensor, words: Tensor) -> SimpleNamespace:
        time = self.time(noisy.new_zeros(noisy.shape[0], 320))
        skips = [x := self.first(noisy)]
        for part in self.down:
            x = _run(part, x, time, words)
            skips.append(x)
        first, reading, second = self.middle
        x = second(reading(first(x, time), words), time)
        for part in self.up:
            if isinstance(part, nn.Conv2d):
                x = part(F.interpolate(x, scale_factor=2.0))
            else:
                x = _run(part, torch.cat([x, skips.pop()], 1), time, words)
        return SimpleNamespace(loss=F.mse_loss(self.last(x), noisy))


def _run(part: nn.Module, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
    if not isinstance(part, nn.ModuleList):
        return part(x)  # type: ignore[no-any-return]
    residual, reading = part
    x = residual(x, time)
    return reading(x, words) if isinstance(reading, Reading) else x  # type: ignore[no-any-return]
