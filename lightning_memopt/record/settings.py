"""Settings that change the bits an op returns (Rule 6): read, put back, and the functions that set them."""

from __future__ import annotations

from typing import Any

import torch

_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
_REDUCED = tuple(
    name
    for name in (
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
    )
    if hasattr(torch._C, f"_set_{name}")
)
SETTERS = (
    (torch._C, "_set_mkldnn_enabled"),
    (torch._C, "_set_cudnn_enabled"),
    (torch._C, "_set_cudnn_benchmark"),
    (torch._C, "_set_cudnn_deterministic"),
    (torch._C, "_set_cudnn_allow_tf32"),
    (torch._C, "_set_cublas_allow_tf32"),
    *((torch._C, f"_set_{name}") for name in _REDUCED),
    (torch._C, "_set_deterministic_algorithms"),
    (torch._C, "_set_float32_matmul_precision"),
    (torch._C, "_set_fp32_precision_setter"),
    (torch._C, "_set_default_dtype"),
    (torch, "set_num_threads"),
    (torch, "set_flush_denormal"),
)
"""What sets one of them: module and name. Not every version of torch has all of them."""
_DENORMAL = 5e-324


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the user set precisions per backend: torch refuses to put them into this one word
        return None


def numeric_flags() -> tuple[Any, ...]:
    """Settings that change the bits an op returns (Rule 6): a replay runs under those of the forward pass."""
    c: Any = torch._C
    return (
        (_matmul_precision(), *(c._get_fp32_precision_getter(*where) for where in _PRECISIONS)),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        c._get_cudnn_enabled(),
        c._get_cudnn_benchmark(),
        c._get_cudnn_deterministic(),
        c._get_mkldnn_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        _DENORMAL * 1.0 == 0.0,  # torch has no getter: ask the processor
        tuple(getattr(c, f"_get_{name}")() for name in _REDUCED),
    )


def set_numeric_flags(flags: tuple[Any, ...]) -> None:
    """Make `numeric_flags` what they were. Only what differs is touched."""
    now = numeric_flags()
    precisions, deterministic, warn, cudnn, benchmark, cudnn_deterministic, mkldnn, threads, dtype, flush, reduced = flags
    c: Any = torch._C
    if precisions != now[0]:
        if precisions[0] is not None:
            torch.set_float32_matmul_precision(precisions[0])
        for where, then in zip(_PRECISIONS, precisions[1:], strict=True):
            if c._get_fp32_precision_getter(*where) != then:  # some follow from those before
                c._set_fp32_precision_setter(*where, then)
    if (deterministic, warn) != now[1:3]:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
    if (cudnn, benchmark, cudnn_deterministic, mkldnn) != now[3:7]:
        c._set_cudnn_enabled(cudnn)
        c._set_cudnn_benchmark(benchmark)
        c._set_cudnn_deterministic(cudnn_deterministic)
        c._set_mkldnn_enabled(mkldnn)
    if threads != now[7]:
        torch.set_num_threads(threads)
    if dtype != now[8]:
        torch.set_default_dtype(dtype)
    if flush != now[9]:
        torch.set_flush_denormal(flush)
    for name, value, found in zip(_REDUCED, reduced, now[10], strict=True):
        if value != found:
            getattr(c, f"_set_{name}")(*(value if isinstance(value, tuple) else (value,)))
