"""Errors that mean that memory ran out, and what they hold on to (L1, L5)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from lightning_memopt.batching import is_out_of_memory
from lightning_memopt.batching.oom import release
from tests.cpu.lib.searches import Plain, Square

OOM: list[BaseException] = [
    torch.OutOfMemoryError("anything"),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("XPU out of memory. Tried to allocate 1.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError("hipblas error: HIPBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("NCCL Error 1: unhandled cuda error, Failed to CUDA calloc async 4 bytes"),
    RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error: Cuda failure 2 'out of memory'"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("CUDA out of memory.", "with two arguments"),
    OSError(12, "Cannot allocate memory"),
]

OTHERS: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
    ValueError("out of memory"),
    OSError(2, "No such file"),
    KeyboardInterrupt(),
    RuntimeError(),
    AssertionError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", OOM, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_l5_errors_that_mean_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("in the user's layer")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_l5_errors_that_do_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", (OOM[1], OOM[-2]), ids=lambda e: type(e).__name__)
def test_l5_a_search_takes_them_for_what_they_are(error: BaseException) -> None:
    plain = Plain(Square(), lambda n: type(error)(*error.args) if n > 6 else None)
    assert plain.find(budget=1 << 30).size == 6
    with pytest.raises(RuntimeError, match="shapes"):
        Plain(Square(), lambda n: RuntimeError(*OTHERS[0].args) if n > 6 else None).find(budget=1 << 30)


def test_l1_frames_of_an_error_keep_no_tensors() -> None:
    refs: list[weakref.ref[Any]] = []

    def fails() -> None:
        x = torch.ones(10)
        refs.append(weakref.ref(x))
        raise MemoryError

    gc.disable()
    try:
        try:
            fails()
        except MemoryError as error:
            held = error
        assert refs[0]() is not None
        release(held)
        assert refs[0]() is None
    finally:
        gc.enable()
