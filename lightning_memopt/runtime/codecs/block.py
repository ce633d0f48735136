"""Fixed-rate transform coding of feature maps: blocks of 4 x 4 values at 4 to 16 bits a value, lossy.

The codec is of the ZFP family (Lindstrom, *Fixed-rate compressed floating-point arrays*, TVCG 2014): it uses ZFP's lifted,
nearly orthogonal transform along both sides of a block, has one scale per block, and gives bits first to the coefficients of
low sequency. ZFP's embedded coding reads its bits one after the other. Here, instead, each block names one of 16 tables that
say how many bits each coefficient has (`block_tables`), and the step to which all its coefficients are rounded. The rate is the
same, and every value is coded independently of the others.

Blocks are tiles of the two innermost dimensions in memory if both are multiples of 4, otherwise 16 consecutive values. Only
the last block is padded: a tensor takes `2 * rate` bytes for every 16 values, whatever its sizes.

Arithmetic is float32 with one rounding per operation, in an order that is fixed below, so that all devices give the same bits:
the transform only adds, and multiplies by powers of two. A NaN or an infinity comes back as itself; finite values in the same
block come back as 0.

`gated` blocks are for results of ReLU, whose backward reads only which values are above 0. 16 bits of a block say that. Values
above 0 stay above 0, and all others become 0, so that every gate of ReLU stays as it was. Values that are not above 0 need no
other bits: they are coded as if they were the mean of the others, which keeps their edges out of the spectrum.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from lightning_memopt.device.backends import backend_of
from lightning_memopt.runtime.codecs import block_tables as layout
from lightning_memopt.runtime.codecs.base import FLOATS, SLACK_NBYTES, check, flat, nbytes_of
from lightning_memopt.runtime.codecs.block_device import SCALE, Constants, across, constants, shares
from lightning_memopt.runtime.codecs.block_tables import HEADER_BITS, MODE_BITS, MODES, NOT_FINITE, SIDE, STEP_BITS, VALUES
from lightning_memopt.units import ceil_div

RATES = (4, 6, 8, 10, 12, 14, 16)
CHUNK = 1 << 12
"""Number of blocks that are coded at a time."""
BLOCK_NBYTES = 640
"""Workspace for each block of a chunk: about five arrays of 16 int64 are alive at once."""
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Block:
    """The codec of one rate.

    rate: bits a value.
    gated: for tensors that are nowhere below 0 (see the module).
    exact: see `Codec`.
    """

    rate: int
    gated: bool = False
    exact: bool = False

    @property
    def name(self) -> str:
        return f"gated{self.rate}" if self.gated else f"block{self.rate}"

    @property
    def header(self) -> int:
        """The bits of a block before those of its coefficients: step, mode, and gates."""
        return HEADER_BITS + VALUES if self.gated else HEADER_BITS

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in FLOATS and self.encoded_nbytes(size, dtype) < nbytes_of(size, dtype)

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return ceil_div(math.prod(size), VALUES) * 2 * self.rate

    def workspace_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return BLOCK_NBYTES * min(ceil_div(math.prod(size), VALUES), CHUNK) + 2 * SLACK_NBYTES

    def encode(self, t: Tensor, out: Tensor) -> None:
        check(self, t, out)
        if (kernels := _kernels(out)) is not None:
            return kernels.encode(self, t, out)
        blocks = out.view(-1, 2 * self.rate)
        for begin, tile in _tiles(t):
            words = self._encoded(tile)
            blocks[begin : begin + words.shape[1]].copy_(words.to(torch.int32).t().contiguous().view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        check(self, out, encoded)
        if (kernels := _kernels(encoded)) is not None:
            return kernels.decode(self, encoded, out)
        blocks = encoded.view(-1, 2 * self.rate)
        values, whole = flat(out), out.numel() // VALUES * VALUES
        for begin, tile in _tiles(out):
            self._decode(blocks[begin : begin + tile.shape[0] * tile.shape[2]], tile)
            if begin * VALUES >= whole:  # the tile is a copy
                values[whole:].copy_(tile.flatten()[: len(values) - whole])

    def _encoded(self, tile: Tensor) -> Tensor:
        """The 32-bit words of a tile's blocks, as int64 `[rate / 2, blocks]`."""
        const = constants(self.rate, tile.device, self.header)
        c = _transformed(tile, self.gated)
        number, mode, bad = _chosen(c, const)
        q = c.mul_(const.reciprocal.index_select(0, number)).add_(0.5).floor_().to(torch.int64)
        del c
        bits = const.bits.index_select(1, mode)
        ones = torch.bitwise_left_shift(1, bits).sub_(1)
        code = torch.minimum(q, ones >> 1, out=q).bitwise_and_(ones)
        del q, ones
        for _ in range(const.merges):
            code = code[::2] | (code[1::2] << bits[::2])
            bits = bits[::2] + bits[1::2]
        at = bits.cumsum(0).sub_(bits).add_(self.header)
        del bits
        words = torch.empty((self.rate // 2, len(mode)), dtype=torch.int64, device=tile.device)
        for w, word in enumerate(words.unbind()):
            torch.sum(_shifted(code, at - 32 * w).bitwise_and_(_WORD), 0, out=word)
        words[0].bitwise_or_(mode << STEP_BITS).bitwise_or_(number)
        if bool(bad.any()):
            self._write_kinds(tile, bad, words)
        if self.gated:
            bit = torch.arange(HEADER_BITS, self.header, device=tile.device)[:, None]
            words[0].bitwise_or_((_open(tile) << bit).sum(0))
        return words

    def _write_kinds(self, tile: Tensor, bad: Tensor, words: Tensor) -> None:
        """Overwrite the words of `bad` blocks, which have values that are not finite. After the header they have 2 bits a
        value: 0 for finite, 1 for infinity, 2 for minus infinity, 3 for NaN.
        """
        x = tile.permute(1, 3, 0, 2).reshape(VALUES, -1)[:, bad]
        kind = (x == torch.inf).to(torch.int64) + 2 * (x == -torch.inf) + 3 * x.isnan()
        at = torch.arange(self.header, self.header + 2 * VALUES, 2, device=x.device)
        kinds = (kind << at[:, None]).sum(0) | NOT_FINITE
        words[:, bad] = torch.stack((kinds & _WORD, kinds >> 32, *[torch.zeros_like(kinds)] * (len(words) - 2)))

    def _decode(self, blocks: Tensor, tile: Tensor) -> None:
        const = constants(self.rate, tile.device, self.header)
        words = torch.zeros((self.rate // 2 + 2, len(blocks)), dtype=torch.int64, device=tile.device)
        words[:-2].copy_(blocks.clone().view(torch.int32).t()).bitwise_and_(_WORD)
        number, mode = words[0] & NOT_FINITE, (words[0] >> STEP_BITS) & (MODES - 1)
        at = const.at.index_select(1, mode)
        index = at >> 5
        code = words.gather(0, index)
        code.bitwise_or_(words.gather(0, index.add_(1)).bitwise_left_shift_(32)).bitwise_right_shift_(at.bitwise_and_(31))
        del index, at
        ones = torch.bitwise_left_shift(1, const.bits.index_select(1, mode)).sub_(1)
        code.bitwise_and_(ones)
        half = ones.add_(1).bitwise_right_shift_(1)
        x = code.bitwise_xor_(half).sub_(half).to(torch.float32)
        del code, ones, half
        x.mul_(const.step.index_select(0, number))
        _inverse(x.view(SIDE, SIDE, -1))
        most = torch.finfo(tile.dtype).max
        x.mul_(1 / SCALE).clamp_(torch.finfo(tile.dtype).tiny if self.gated else -most, most)
        if self.gated:
            bit = torch.arange(HEADER_BITS, self.header, device=x.device)[:, None]
            x.mul_((words[0] >> bit) & 1)
        bad = number == NOT_FINITE
        if bool(bad.any()):
            at = torch.arange(self.header, self.header + 2 * VALUES, 2, device=x.device)
            kind = ((words[0] | (words[1] << 32)) >> at[:, None]) & 3
            for k, value in ((1, torch.inf), (2, -torch.inf), (3, torch.nan)):
                x.masked_fill_(bad & (kind == k), value)
        tile.copy_(x.view(SIDE, SIDE, tile.shape[0], tile.shape[2]).permute(2, 0, 3, 1))


def _kernels(encoded: Tensor) -> ModuleType | None:
    """The Triton kernels, for encoded bytes on a CUDA device that are aligned to words of 4 bytes; None for others."""
    if not backend_of(encoded.device).runs_triton or encoded.data_ptr() % 4 or encoded.storage_offset() % 4:
        return None
    return _imported()


@cache
def _imported() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from lightning_memopt.runtime.codecs import block_triton

    return block_triton


def _tiles(t: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first block, tile `[strips, 4, blocks of a strip, 4]`), at most `CHUNK` blocks each. Tiles are views of `t`, but a last
    block that is not full is a copy, filled up with the last value.
    """
    values, wide = flat(t), across(t)
    whole = len(values) // VALUES * VALUES
    strips = values[:whole].view(-1, SIDE, wide, SIDE)
    down = max(1, CHUNK // wide)
    for row in range(0, len(strips), down):
        for column in range(0, wide, CHUNK):
            yield row * wide + column, strips[row : row + down, :, column : column + CHUNK]
    if whole < len(values):
        rest = values[-1:].repeat(VALUES)
        rest[: len(values) - whole] = values[whole:]
        yield whole // VALUES, rest.view(1, SIDE, 1, SIDE)


def _open(tile: Tensor) -> Tensor:
    """Which values' gates are open, bool `[16, blocks]`. The gate of a NaN is open: torch's ReLU lets its gradient pass."""
    return (tile.permute(1, 3, 0, 2) <= 0).logical_not_().reshape(VALUES, -1)


def _filled(c: Tensor, open: Tensor) -> None:
    """Replace the values that are not above 0, in place, by the mean of the block's other values. The order of the pairwise sum
    is fixed, so that every device gives the same bits.
    """
    total = c.mul_(open)
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    total.mul_(shares(c.device).index_select(0, open.sum(0)))
    c.add_(open.logical_not() * total)


def _transformed(tile: Tensor, gated: bool = False) -> Tensor:
    """Coefficients of a tile's blocks, float32 `[16, blocks]`: ZFP's forward lifting down and across."""
    c = torch.empty((SIDE, SIDE, tile.shape[0], tile.shape[2]), dtype=torch.float32, device=tile.device)
    c.copy_(tile.permute(1, 3, 0, 2)).mul_(SCALE)
    if gated:
        _filled(c.view(VALUES, -1), _open(tile))
    for dim in (0, 1):
        x, y, z, w = c.unbind(dim)
        x.add_(w).mul_(0.5)
        w.sub_(x)
        z.add_(y).mul_(0.5)
        y.sub_(z)
        x.add_(z).mul_(0.5)
        z.sub_(x)
        w.add_(y).mul_(0.5)
        y.sub_(w)
        w.add_(y, alpha=0.5)
        y.sub_(w, alpha=0.5)
    return c.view(VALUES, -1)


def _inverse(c: Tensor) -> None:
    """The inverse of the transform, in place, on `[4, 4, blocks]`."""
    for dim in (1, 0):
        x, y, z, w = c.unbind(dim)
        y.add_(w, alpha=0.5)
        w.sub_(y, alpha=0.5)
        y.add_(w)
        w.mul_(2).sub_(y)
        z.add_(x)
        x.mul_(2).sub_(z)
        y.add_(z)
        z.mul_(2).sub_(y)
        w.add_(x)
        x.mul_(2).sub_(w)


def _chosen(c: Tensor, const: Constants) -> tuple[Tensor, Tensor, Tensor]:
    """(number of the step, mode, whether a value is not finite) of blocks of coefficients, `[blocks]` each."""
    number = c.view(torch.int32).bitwise_and(0x7FFFFFFF).bitwise_right_shift_(21).to(torch.int16)
    bad = number[0] >= 4 * 255  # a value that is not finite makes the mean not finite, too
    steps = number.new_empty((MODES, number.shape[1]))
    needed = torch.empty_like(number)
    for reach, step in zip(const.reach.split(1, dim=1), steps, strict=True):
        torch.amax(torch.sub(number, reach, out=needed), 0, out=step)
    steps.clamp_(layout.LEAST_STEP, NOT_FINITE).mul_(MODES).add_(const.modes)
    chosen = steps.amin(0).to(torch.int64)  # the finest step, and the first mode that has it
    return chosen >> MODE_BITS, chosen & (MODES - 1), bad


def _shifted(code: Tensor, by: Tensor) -> Tensor:
    """`code`, which is not negative, shifted to the left by `by` bits, or to the right if `by` is negative."""
    return (code << by.clamp(0, 63)).where(by >= 0, code >> by.neg().clamp_(0, 63))
