"""One bit an element, for what is only asked yes or no: masks, and feature maps of ReLU.

Source: Jain et al., *Gist* (ISCA 2018), binarize; Zheng et al., *Echo* (ISCA 2020), section V-C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.runtime.codecs.base import FLOATS, SLACK_NBYTES, check, chunks, flat, nbytes_of

CHUNK = 1 << 19
"""Elements at a time, a multiple of 8."""
_EACH = 0x0101010101010101  # bit 0 of each byte
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: byte i becomes bit 56 + i; no two terms meet, so no carry
_PICK = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_CARRY = 0x00406070787C7E7F  # added to byte i: bit 7 is set where bit i was


@dataclass(frozen=True)
class Bits:
    """`bools`: bool tensors. `positive`: floats, of which a reader only asks whether they are `<= 0`, as backward of ReLU
    does: they come back as 0 and 1. A NaN is not `<= 0`: its gradient passes, as in torch. -0.0 is."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    exact: bool = True

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in self.dtypes and self.encoded_nbytes(size, dtype) < nbytes_of(size, dtype)

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return -(-math.prod(size) // 8)

    def workspace_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return min(-(-math.prod(size) // 8) * 8, 2 * CHUNK) + SLACK_NBYTES  # a chunk's, while that of the one before is there

    def encode(self, t: Tensor, out: Tensor) -> None:
        check(self, t, out)
        values = flat(t)
        for begin, end in chunks(len(values), CHUNK):
            part = values[begin:end]
            bits = torch.zeros(-(-(end - begin) // 8) * 8, dtype=torch.bool, device=t.device)
            here = bits[: end - begin]
            if t.dtype is torch.bool:
                torch.ne(part.view(torch.uint8), 0, out=here)  # a bool may be any byte, and the product wants 0 and 1
            else:
                torch.le(part, 0, out=here).logical_not_()
            words = bits.view(torch.int64)
            words.mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(0xFF)
            out[begin // 8 : -(-end // 8)].copy_(words)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        check(self, out, encoded)
        values = flat(out)
        for begin, end in chunks(len(values), CHUNK):
            words = encoded[begin // 8 : -(-end // 8)].to(torch.int64)
            words.mul_(_EACH).bitwise_and_(_PICK).add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_EACH)
            values[begin:end].copy_(words.view(torch.bool)[: end - begin])

    def error_bound(self, t: Tensor) -> float:
        return 0.0


BOOLS = Bits("bools", (torch.bool,))
POSITIVE = Bits("positive", (*FLOATS, torch.float64))
