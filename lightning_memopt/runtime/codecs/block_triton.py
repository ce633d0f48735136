"""Kernels that encode and decode blocks on CUDA, with the same bits as `block.py`, which says what they compute.

This file is imported only if there are a CUDA tensor and Triton. One product is inexact and part of a sum. It must not
become a fused multiply-add, which rounds once instead of twice (`enable_fp_fusion=False`). All other products are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.device.places import current
from lightning_memopt.runtime.codecs.base import flat
from lightning_memopt.runtime.codecs.block_device import SCALE, BlockForm, across, constants, shares
from lightning_memopt.runtime.codecs.block_tables import HEADER_BITS, LEAST_STEP, MODES, NOT_FINITE, STEP_BITS

_BLOCKS = 64
"""Number of blocks that one program of a kernel codes."""


def encode(codec: BlockForm, t: Tensor, out: Tensor) -> None:
    """Like `Block.encode`; `out` is aligned to 4 bytes."""
    _launch(_encode, codec, t, out)


def decode(codec: BlockForm, encoded: Tensor, out: Tensor) -> None:
    """Like `Block.decode`; `encoded` is aligned to 4 bytes."""
    _launch(_decode, codec, out, encoded)


def _launch(kernel: triton.JITFunction, codec: BlockForm, t: Tensor, encoded: Tensor) -> None:
    count = encoded.numel() // (2 * codec.rate)
    if not count:
        return
    const = constants(codec.rate, t.device, codec.header)
    with current(t.device):
        kernel[(triton.cdiv(count, _BLOCKS),)](
            flat(t),
            encoded.view(torch.int32),
            const.bits,
            const.at,
            const.reach,
            const.step,
            const.reciprocal,
            shares(t.device),
            count,
            t.numel(),
            across(t),
            WORDS=codec.rate // 2,
            BLOCKS=_BLOCKS,
            MODES=MODES,
            GATED=codec.gated,
            GATES=HEADER_BITS,
            HEADER=codec.header,
            STEP_BITS=STEP_BITS,
            LEAST=LEAST_STEP,
            NOT_FINITE=NOT_FINITE,
            SCALE=SCALE,
            AT_LEAST=torch.finfo(t.dtype).tiny if codec.gated else -torch.finfo(t.dtype).max,
            AT_MOST=torch.finfo(t.dtype).max,
            enable_fp_fusion=False,
        )


@triton.jit
def _parts(c, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Split [BLOCKS, 4, 4] along the last dimension into four [BLOCKS, 4]."""
    even, odd = tl.split(tl.reshape(c, [BLOCKS, 4, 2, 2]))
    x, z = tl.split(even)
    y, w = tl.split(odd)
    return x, y, z, w


@triton.jit
def _whole(x, y, z, w, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.reshape(tl.join(tl.join(x, z), tl.join(y, w)), [BLOCKS, 4, 4])


@triton.jit
def _forward(c, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    x, y, z, w = _parts(c, BLOCKS)
    x = (x + w) * 0.5
    w = w - x
    z = (z + y) * 0.5
    y = y - z
    x = (x + z) * 0.5
    z = z - x
    w = (w + y) * 0.5
    y = y - w
    w = w + y * 0.5
    y = y - w * 0.5
    return _whole(x, y, z, w, BLOCKS)


@triton.jit
def _inverse(c, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    x, y, z, w = _parts(c, BLOCKS)
    y = y + w * 0.5
    w = w - y * 0.5
    y = y + w
    w = w * 2 - y
    z = z + x
    x = x * 2 - z
    y = y + z
    z = z * 2 - y
    w = w + x
    x = x * 2 - w
    return _whole(x, y, z, w, BLOCKS)


@triton.jit
def _addresses(block, count, total, across, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(addresses of the values of each block, whether the tensor has that value), [BLOCKS, 4, 4]. If it has not, the address
    is that of the last value.
    """
    first = (block // across) * (16 * across) + (block % across) * 4
    row = tl.arange(0, 4)[None, :, None]
    column = tl.arange(0, 4)[None, None, :]
    at = first[:, None, None] + row * (4 * across) + column
    return tl.minimum(at, total - 1), (block < count)[:, None, None] & (at < total)


@triton.jit
def _folded(c, BLOCKS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first half of [BLOCKS, 2 * HALF] plus the second."""
    first, second = tl.split(tl.permute(tl.reshape(c, [BLOCKS, 2, HALF]), [0, 2, 1]))
    return first + second


@triton.jit
def _filled(c, open, shares_table, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCKS, 16], with values whose gates are closed replaced by the mean of the block's values whose gates are open (1.0).
    The order of the sum is that of `block.py`.
    """
    c = c * open
    total = _folded(_folded(_folded(_folded(c, BLOCKS, 8), BLOCKS, 4), BLOCKS, 2), BLOCKS, 1)
    share = tl.load(shares_table + tl.sum(open.to(tl.int32), 1))
    return c + (1.0 - open) * (total * tl.expand_dims(share, 1))


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    values,
    words,
    bits_table,
    at_table,
    reach_table,
    step_table,
    reciprocal_table,
    shares_table,
    count,
    total,
    across,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    MODES: tl.constexpr,
    GATED: tl.constexpr,
    GATES: tl.constexpr,
    HEADER: tl.constexpr,
    STEP_BITS: tl.constexpr,
    LEAST: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    SCALE: tl.constexpr,
    AT_LEAST: tl.constexpr,
    AT_MOST: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at, _ = _addresses(block, count, total, across, BLOCKS)
    raw = tl.load(values + at).to(tl.float32)
    each = tl.arange(0, 16)
    x = tl.reshape(raw, [BLOCKS, 16])
    c = x * SCALE
    gates = tl.zeros([BLOCKS], tl.int64)
    if GATED:
        open = tl.where(x <= 0, 0, 1)  # the gate of a NaN is open
        gates = tl.sum(open.to(tl.int64) << (GATES + each[None, :]).to(tl.int64), 1)
        c = _filled(c, open.to(tl.float32), shares_table, BLOCKS)
    c = tl.reshape(c, [BLOCKS, 4, 4])
    c = tl.permute(_forward(tl.permute(c, [0, 2, 1]), BLOCKS), [0, 2, 1])
    c = tl.reshape(_forward(c, BLOCKS), [BLOCKS, 16])
    number = (c.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 21
    bad = tl.max(number, 1) >= 1020

    best = tl.full([BLOCKS], 32767, tl.int32)
    for mode in tl.static_range(MODES):
        reach = tl.load(reach_table + each * MODES + mode).to(tl.int32)
        step = tl.max(number - reach[None, :], 1)
        step = tl.minimum(tl.maximum(step, LEAST), NOT_FINITE)
        best = tl.minimum(best, step * MODES + mode)
    chosen = best // MODES
    mode = best % MODES

    entry = each[None, :] * MODES + mode[:, None]
    bits = tl.load(bits_table + entry)
    ones = (tl.full([BLOCKS, 16], 1, tl.int64) << bits) - 1
    c = tl.where(bad[:, None], 0.0, c)
    q = tl.floor(c * tl.load(reciprocal_table + chosen)[:, None] + 0.5).to(tl.int64)
    code = tl.minimum(q, ones >> 1) & ones
    place = tl.load(at_table + entry)

    infinite = float("inf")
    kind = tl.where(x == infinite, 1, tl.where(x == -infinite, 2, tl.where(x != x, 3, 0))).to(tl.int64)
    kinds = tl.sum(kind << (HEADER + 2 * each[None, :]).to(tl.int64), 1) | NOT_FINITE
    for w in tl.static_range(WORDS):
        by = place - 32 * w
        left = code << tl.minimum(tl.maximum(by, 0), 63)
        right = code >> tl.minimum(tl.maximum(-by, 0), 63)
        word = tl.sum(tl.where(by >= 0, left, right) & 0xFFFFFFFF, 1)
        if w == 0:
            word = tl.where(bad, kinds, word | chosen | (mode << STEP_BITS)) | gates
        elif w == 1:
            word = tl.where(bad, kinds >> 32, word)
        else:
            word = tl.where(bad, 0, word)
        tl.store(words + block * WORDS + w, word.to(tl.int32), mask=block < count)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    values,
    words,
    bits_table,
    at_table,
    reach_table,
    step_table,
    reciprocal_table,
    shares_table,
    count,
    total,
    across,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    MODES: tl.constexpr,
    GATED: tl.constexpr,
    GATES: tl.constexpr,
    HEADER: tl.constexpr,
    STEP_BITS: tl.constexpr,
    LEAST: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    SCALE: tl.constexpr,
    AT_LEAST: tl.constexpr,
    AT_MOST: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < count
    each = tl.arange(0, 16)
    first = tl.load(words + block * WORDS, mask=exists, other=0).to(tl.int64) & 0xFFFFFFFF
    second = tl.load(words + block * WORDS + 1, mask=exists, other=0).to(tl.int64) & 0xFFFFFFFF
    chosen = first & NOT_FINITE
    mode = (first >> STEP_BITS) & (MODES - 1)
    entry = each[None, :] * MODES + mode[:, None]
    place = tl.load(at_table + entry)
    index = place >> 5
    has_low = exists[:, None] & (index < WORDS)
    low = tl.load(words + block[:, None] * WORDS + index, mask=has_low, other=0).to(tl.int64) & 0xFFFFFFFF
    has_high = exists[:, None] & (index + 1 < WORDS)
    high = tl.load(words + block[:, None] * WORDS + index + 1, mask=has_high, other=0).to(tl.int64)
    ones = (tl.full([BLOCKS, 16], 1, tl.int64) << tl.load(bits_table + entry)) - 1
    code = ((low | (high << 32)) >> (place & 31)) & ones
    half = (ones + 1) >> 1
    x = ((code ^ half) - half).to(tl.float32) * tl.load(step_table + chosen)[:, None]

    c = _inverse(tl.reshape(x, [BLOCKS, 4, 4]), BLOCKS)
    c = tl.permute(_inverse(tl.permute(c, [0, 2, 1]), BLOCKS), [0, 2, 1]) * (1 / SCALE)
    c = tl.minimum(tl.maximum(c, AT_LEAST), AT_MOST)
    if GATED:
        open = (first[:, None] >> (GATES + each[None, :]).to(tl.int64)) & 1
        c = c * tl.reshape(open, [BLOCKS, 4, 4]).to(tl.float32)
    kind = ((first | (second << 32))[:, None] >> (HEADER + 2 * each[None, :]).to(tl.int64)) & 3
    kind = tl.where((chosen == NOT_FINITE)[:, None], kind, 0)
    kind = tl.reshape(kind, [BLOCKS, 4, 4])
    infinite = float("inf")
    c = tl.where(kind == 1, infinite, tl.where(kind == 2, -infinite, tl.where(kind == 3, float("nan"), c)))
    at, in_tensor = _addresses(block, count, total, across, BLOCKS)
    tl.store(values + at, c.to(values.dtype.element_ty), mask=in_tensor)
