"""The parts that both implementations of the block codec share: tables on a device, and the layout of blocks in a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from lightning_memopt.runtime.codecs import block_tables as layout
from lightning_memopt.runtime.codecs.base import in_memory
from lightning_memopt.runtime.codecs.block_tables import HEADER_BITS, MODES, NOT_FINITE, SIDE, VALUES

SCALE = 2.0**-6
"""All values are multiplied by this before the transform, so that no sum overflows and no reciprocal is denormal."""


class BlockForm(Protocol):
    """The part of a block codec that its kernels use.

    rate: bits a value.
    gated: for tensors that are nowhere below 0.
    header: bits of a block before its coefficients.
    """

    @property
    def rate(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def header(self) -> int: ...


@dataclass(frozen=True)
class Constants:
    """Tables on a device.

    bits, at, reach: of a coefficient under a mode, `[coefficient, mode]` (block_tables.py).
    modes: numbers of the modes, `[mode, 1]`.
    step, reciprocal: of every step, float32 `[1024]`.
    merges: how often the codes of neighbours can be joined pairwise without exceeding 63 bits.
    """

    bits: Tensor
    at: Tensor
    reach: Tensor
    modes: Tensor
    step: Tensor
    reciprocal: Tensor
    merges: int


@cache
def constants(rate: int, device: torch.device, header: int = HEADER_BITS) -> Constants:
    """The tables of a rate, made once per device."""
    tables = layout.tables(rate, header)
    powers = [2.0 ** ((s >> 2) - 127) if 0 < s >> 2 < 255 else 0.0 for s in range(NOT_FINITE + 1)]
    step = torch.tensor([p * (1 + (s & 3) / 4) for s, p in enumerate(powers)], dtype=torch.float32)
    merges = 0
    while 2 << merges <= VALUES and _widest(tables.bits, 2 << merges) <= 63:
        merges += 1
    return Constants(
        bits=torch.tensor(tables.bits).t().contiguous().to(device),
        at=torch.tensor(tables.at).t().contiguous().to(device),
        reach=torch.tensor(tables.reach, dtype=torch.int16).t().contiguous().to(device),
        modes=torch.arange(MODES, dtype=torch.int16)[:, None].to(device),
        step=step.to(device),
        reciprocal=step.reciprocal().where(step > 0, 0).to(device),
        merges=merges,
    )


def _widest(bits: tuple[tuple[int, ...], ...], together: int) -> int:
    return max(sum(of[i : i + together]) for of in bits for i in range(0, VALUES, together))


def across(t: Tensor) -> int:
    """How many blocks lie side by side in a strip: 1 if blocks are 16 values in a row."""
    sizes = in_memory(t)
    square = t.numel() > 0 and len(sizes) > 1 and sizes[-1] % SIDE == 0 and sizes[-2] % SIDE == 0
    return sizes[-1] // SIDE if square else 1


@cache
def shares(device: torch.device) -> Tensor:
    """1 / n at index n, float32 `[17]`, for means of the n values of a block that are above 0; 0 at index 0."""
    return torch.tensor([0.0, *(1 / n for n in range(1, VALUES + 1))], device=device)
