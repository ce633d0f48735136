"""The interface of codecs. A codec writes a tensor's values into fewer bytes, and their number does not depend on the values.

A codec works on a tensor in the order of its memory (`flat`). So it takes any dense order of strides, and the number of encoded
bytes does not depend on strides. It keeps no state, draws no random numbers, and calls plain aten ops chunk by chunk. So it can
run below autograd and outside dispatch modes (`record/below.py`), on any device, with a workspace of a few MiB.
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
"""Workspace that does not grow with a chunk: constant tables, scalars, padding of the allocator."""


class Codec(Protocol):
    """A way to store tensors in fewer bytes.

    name: the name of the codec in plans.
    exact: whether a decoded tensor has the same bits, or the same effect on the op that the codec is meant for.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def accepts(self, size: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the codec can encode a tensor of this size and dtype in fewer bytes than it has."""

    def encoded_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        """The number of bytes that `encode` writes, for any values."""

    def workspace_nbytes(self, size: tuple[int, ...], dtype: torch.dtype) -> int:
        """Maximum number of bytes that `encode` or `decode` allocates in addition to `out`."""

    def encode(self, t: Tensor, out: Tensor) -> None:
        """Write the encoded bytes of `t`, which is dense (a permutation of contiguous), into all of `out`: uint8
        `[encoded_nbytes]`, contiguous, of any alignment.
        """

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Write the decoded values into all of `out`, which has the size, the strides and the dtype of the encoded tensor."""


def in_memory(t: Tensor) -> list[int]:
    """The sizes of `t` from the outermost dimension in memory to the innermost, without sizes of 1.

    Raises `UnsupportedError` if `t` has gaps or overlaps in memory.
    """
    dims = sorted(((stride, n) for stride, n in zip(t.stride(), t.shape, strict=True) if n != 1), reverse=True)
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
    """A 1-D alias of a dense tensor, in the order of its memory."""
    in_memory(t)
    return t.as_strided((t.numel(),), (1,))


def chunks(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive ranges, each at most `step` long, that together cover `0 .. count`."""
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def check(codec: Codec, t: Tensor, encoded: Tensor) -> None:
    """Raise `UnsupportedError` if `encoded` cannot hold the encoded bytes of `t`: wrong size, dtype or layout."""
    size, expected = tuple(t.shape), codec.encoded_nbytes(tuple(t.shape), t.dtype)
    if encoded.dtype is not torch.uint8 or encoded.shape != (expected,) or not encoded.is_contiguous():
        raise UnsupportedError(
            f"{codec.name} holds a tensor of size {size}, {t.dtype}, in {expected} contiguous bytes; "
            f"give that many, not {tuple(encoded.shape)} of {encoded.dtype}"
        )


def nbytes_of(size: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a dense tensor."""
    return math.prod(size) * dtype.itemsize
