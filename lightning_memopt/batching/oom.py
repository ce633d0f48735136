"""Recognise errors that mean that memory ran out: by type, or by the message of a library that raises a plain RuntimeError."""

from __future__ import annotations

import errno
import gc
import re
import traceback
from collections.abc import Iterator

import torch

from lightning_memopt.device.backends import empty_caches

_TYPES: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)

_TEXTS = re.compile(
    "|".join(
        (
            r"out of memory",  # CUDA, HIP, XPU, MPS, NPU, "CUDA error: out of memory", NCCL's "Cuda failure 2 'out of memory'"
            r"(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_(STATUS_)?ALLOC_FAILED",
            r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\. This error may appear if you passed in a non-contiguous input",
            r"Failed to CUDA (host )?[cm]alloc",  # NCCL
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
            r"std::bad_alloc",
            r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",
        )
    ),
    re.IGNORECASE,
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its cause or context, and so on; cycles end."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or one that it was raised from, means that memory of the device or the host ran out."""
    return any(_is_memory_error(e) for e in _chain(error))


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, _TYPES):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _TEXTS.search(" ".join(map(str, error.args))) is not None


def release(error: BaseException) -> None:
    """Free the tensors that the frames of an error hold, and the cached memory of the device's allocator."""
    for e in _chain(error):
        traceback.clear_frames(e.__traceback__)
        e.__traceback__ = None
    gc.collect()
    empty_caches()
