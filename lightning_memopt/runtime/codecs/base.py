"""What a codec is: a tensor's values in fewer bytes, in a size that is known before there are values.

A codec works on a tensor in the order of its memory: `flat`. So it takes any dense stride order, and its size depends on
neither strides nor values. It keeps no state, draws no random numbers, and calls plain aten ops chunk by chunk:
it may run below autograd and outside of dispatch modes (`record/below.py`), on any device, and takes a few MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightning_memopt.errors import UnsupportedError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SLACK_NBYTES = 1 << 14
"""For what does not grow with a chunk: constant tables, scalars, padding of the allocator."""


class Codec(Protocol):
    """`exact`: what is decoded has the same bits (or, for a consumer that its name says, the same effect)."""

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether it can encode such a tensor, and in fewer bytes than the tensor has."""

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        """The bytes that `encode` writes, all of them, whatever the values are."""

    def workspace_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        """The bytes that encoding or decoding allocates at most beside what it writes to."""

    def encode(self, t: Tensor, out: Tensor) -> None:
        """`t`: dense (a permutation of contiguous); `out`: uint8 `[encoded_nbytes]`, contiguous, of any alignment."""

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Write all of `out`, which has the size, the strides and the dtype of what was encoded."""

    def error_bound(self, t: Tensor) -> float:
        """No finite value of `t` is further than this from what is decoded for it. 0 where `exact`."""


def in_memory(t: Tensor) -> list[int]:
    """The sizes of `t` from the outermost dimension in memory to the innermost, without those of size 1.

    Raises `UnsupportedError` where there are gaps or overlaps in memory.
    """
    dims = sorted(((st, n) for st, n in zip(t.stride(), t.shape, strict=True) if n != 1), reverse=True)
    expected = 1
    if t.numel():
        for stride, n in reversed(dims):
            if stride != expected:
                raise UnsupportedError(
                    f"codecs take dense tensors; copy this one of size {tuple(t.shape)} and strides {t.stride()} first"
                )
            expected *= n
    return [n for _, n in dims]


def flat(t: Tensor) -> Tensor:
    """The values of a dense tensor in the order of its memory: an alias, 1-D."""
    in_memory(t)
    return t.as_strided((t.numel(),), (1,))


def chunks(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive ranges of at most `step` that make up `count`."""
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def check(codec: Codec, t: Tensor, encoded: Tensor) -> None:
    """Raise `UnsupportedError` where `encoded` is not what holds `t`."""
    size, expected = tuple(t.shape), codec.encoded_nbytes(tuple(t.shape), t.dtype)
    if encoded.dtype is not torch.uint8 or encoded.shape != (expected,) or not encoded.is_contiguous():
        raise UnsupportedError(
            f"{codec.name} holds a tensor of size {size}, {t.dtype}, in {expected} contiguous bytes; "
            f"give that many, not {tuple(encoded.shape)} of {encoded.dtype}"
        )


def nbytes_of(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(size) * dtype.itemsize


def largest_finite(t: Tensor) -> float:
    """The largest magnitude of a finite value; 0 where there is none."""
    return max(
        (float(part.where(part.isfinite(), 0).abs().amax()) for part in flat(t).split(1 << 20) if part.numel()), default=0.0
    )
