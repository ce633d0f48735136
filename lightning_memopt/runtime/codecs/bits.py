"""One bit per element, for tensors whose readers need only one bit per element: masks, and feature maps of ReLU.

Source: Jain et al., *Gist* (ISCA 2018), binarize; Zheng et al., *Echo* (ISCA 2020), section V-C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.runtime.codecs.base import FLOATS, SLACK_NBYTES, check, chunks, flat, nbytes_of
from lightning_memopt.units import ceil_div, round_up

CHUNK = 1 << 19
"""Number of elements that are coded at a time, a multiple of 8."""
_EACH = 0x0101010101010101  # bit 0 of each byte
_GATHER = 0x0102040810204080  # factor: moves byte i, of eight bytes of 0 or 1, to bit 56 + i, without a carry
_PICK = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_CARRY = 0x00406070787C7E7F  # summand that sets bit 7 of byte i if its bit i is 1


@dataclass(frozen=True)
class Bits:
    """One bit for each element of a tensor.

    name: "bools" takes bool tensors. "positive" takes floats whose reader only asks whether they are `<= 0`, as the backward of
        ReLU does, and gives back 0 for those that are and 1 for the others. -0.0 is `<= 0`. A NaN is not: its gradient passes,
        as in torch.
    dtypes: the dtypes that it takes.
    exact: see `Codec`.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    exact: bool = True

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in self.dtypes and self.encoded_nbytes(size, dtype) < nbytes_of(size, dtype)

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return ceil_div(math.prod(size), 8)

    def workspace_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return min(round_up(math.prod(size), 8), 2 * CHUNK) + SLACK_NBYTES  # 2: that of the previous chunk is not freed yet

    def encode(self, t: Tensor, out: Tensor) -> None:
        check(self, t, out)
        values = flat(t)
        for begin, end in chunks(len(values), CHUNK):
            part = values[begin:end]
            padded = torch.zeros(round_up(end - begin, 8), dtype=torch.bool, device=t.device)
            bits = padded[: end - begin]
            if t.dtype is torch.bool:
                torch.ne(part.view(torch.uint8), 0, out=bits)  # a bool may be any byte, and the product needs 0 and 1
            else:
                torch.le(part, 0, out=bits).logical_not_()
            words = padded.view(torch.int64)
            words.mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(0xFF)
            out[begin // 8 : ceil_div(end, 8)].copy_(words)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        check(self, out, encoded)
        values = flat(out)
        for begin, end in chunks(len(values), CHUNK):
            words = encoded[begin // 8 : ceil_div(end, 8)].to(torch.int64)
            words.mul_(_EACH).bitwise_and_(_PICK).add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_EACH)
            values[begin:end].copy_(words.view(torch.bool)[: end - begin])


BOOLS = Bits("bools", (torch.bool,))
POSITIVE = Bits("positive", (*FLOATS, torch.float64))
