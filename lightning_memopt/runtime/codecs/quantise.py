"""Uniform quantisation of groups of 64 values between the smallest and the largest: the cheap alternative to `block`.

Each group has its codes, its smallest value and its step (both float32). In a group with a NaN or an infinity, the stored step
is negative, and the last three codes mean +inf, -inf and NaN. Its finite values are coded as in other groups.
Layout: the codes of all groups, then their smallest values, then their steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.runtime.codecs.base import FLOATS, SLACK_NBYTES, check, chunks, flat, nbytes_of
from lightning_memopt.units import ceil_div

GROUP = 64
CHUNK = 1 << 11
"""Number of groups that are coded at a time."""
_SCALE = 0.25  # all values are multiplied by it, so that the difference of any two is finite
_TINY = 2.0**-126  # stored instead of a step of 0 if the step's sign is needed


@dataclass(frozen=True)
class Groups:
    """The codec of one number of bits.

    bits: bits a value, 4 or 8.
    exact: see `Codec`.
    """

    bits: int
    exact: bool = False

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in FLOATS and self.encoded_nbytes(size, dtype) < nbytes_of(size, dtype)

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return ceil_div(math.prod(size), GROUP) * (GROUP * self.bits // 8 + 8)

    def workspace_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        return 18 * GROUP * min(ceil_div(math.prod(size), GROUP), CHUNK) + SLACK_NBYTES

    def encode(self, t: Tensor, out: Tensor) -> None:
        check(self, t, out)
        codes, low, step = self._parts(out)
        values = flat(t)
        for begin, end in chunks(len(codes), CHUNK):
            x = _groups(values, begin, end)
            least, by, bad = self._ranges(x)
            levels = self._levels(bad)
            q = (x - least).div_(by.where(by > 0, 1)).round_().clamp_(min=0)
            torch.minimum(q, levels, out=q)
            if bool(bad.any()):
                for code, matches in ((1, x == torch.inf), (2, x == -torch.inf), (3, x.isnan())):
                    q.copy_(q.where(~matches, levels + code))
            whole = q.to(torch.uint8)
            if self.bits == 4:
                whole = whole[:, ::2] | (whole[:, 1::2] << 4)
            codes[begin:end].copy_(whole)
            low[begin:end].copy_(least.view(torch.uint8))
            step[begin:end].copy_(by.clamp(min=_TINY).neg_().where(bad, by).view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        check(self, out, encoded)
        codes, low, step = self._parts(encoded)
        values = flat(out)
        most = torch.finfo(out.dtype).max
        for begin, end in chunks(len(codes), CHUNK):
            q = codes[begin:end]
            if self.bits == 4:
                q = torch.stack((q & 15, q >> 4), dim=2).flatten(1)
            least, by = (part[begin:end].clone().view(torch.float32) for part in (low, step))
            bad = by < 0
            x = q.to(torch.float32).mul_(by.abs()).add_(least).mul_(1 / _SCALE).clamp_(-most, most)
            if bool(bad.any()):
                levels = self._levels(bad)
                for code, value in ((1, torch.inf), (2, -torch.inf), (3, torch.nan)):
                    x.masked_fill_(bad & (q == levels + code), value)
            part = values[begin * GROUP : end * GROUP]
            part.copy_(x.flatten()[: len(part)])

    def _parts(self, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(codes `[groups, bytes]`, smallest values `[groups, 4]`, steps `[groups, 4]`): uint8 views of the encoded bytes."""
        width = GROUP * self.bits // 8
        count = len(encoded) // (width + 8)
        codes, low, step = encoded.split([count * width, count * 4, count * 4])
        return codes.view(count, width), low.view(count, 4), step.view(count, 4)

    def _levels(self, bad: Tensor) -> Tensor:
        """The largest code for finite values, `[groups, 1]`. `bad`: whether the group has a value that is not finite."""
        return bad.to(torch.float32).mul_(-3).add_((1 << self.bits) - 1)

    def _ranges(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(smallest value, step, whether a value is not finite), `[groups, 1]` each."""
        least, most = x.aminmax(dim=1, keepdim=True)
        bad = (most - least).isfinite().logical_not_()
        if bool(bad.any()):
            finite = x.isfinite()
            least = x.where(finite, torch.inf).amin(1, keepdim=True)
            most = x.where(finite, -torch.inf).amax(1, keepdim=True)
            least, most = least.where(least.isfinite(), 0), most.where(most.isfinite(), 0)  # for groups without a finite value
        return least, (most - least).div_(self._levels(bad)), bad


def _groups(values: Tensor, begin: int, end: int) -> Tensor:
    """Groups `begin .. end`, scaled, float32 `[groups, GROUP]`. A last group that is short is filled with its first value."""
    part = values[begin * GROUP : end * GROUP]
    x = torch.empty((end - begin) * GROUP, dtype=torch.float32, device=values.device)
    x[: len(part)] = part
    x[len(part) :] = part[(end - begin - 1) * GROUP]
    return x.mul_(_SCALE).view(-1, GROUP)
