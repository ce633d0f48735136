"""Settings that change the bits an op returns (R6): how to read and restore them, and the functions that set them.

The list has each setter of `torch._C`, in any supported version, whose setting a kernel may read, with its getter. The other
setters are listed in tests/cpu/record/test_settings.py, with reasons. That test fails for a setter in neither list.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch

from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import C

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
_NAMED = (
    "mkldnn_enabled",
    "mkldnn_deterministic",
    "onednn_allow_tf32",
    "nnpack_enabled",
    "cpu_allow_fp16_reduced_precision_reduction",
    "deterministic_fill_uninitialized_memory",
    "qengine",
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_depthwise_kernel",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "cublaslt_prefer_grouped_gemm",
    "math_sdp_allow_fp16_bf16_reduction",
    "sdp_priority_order",
    "sm_carveout_experimental",
    "miopen_immediate",
    "native_aot_enabled",
    "native_aot_unconditional_masked",
)
"""Read by `torch._C._get_NAME()`; set by `torch._C._set_NAME(value)`, or by `(*value)` if the value is a tuple."""
_PAIRS = (
    *((f"_get_{name}", f"_set_{name}") for name in _NAMED),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("_get_fa4_sdp_enabled", "_set_sdp_use_fa4"),
    ("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    ("_cuda_tunableop_is_enabled", "_cuda_tunableop_enable"),
    ("_cuda_tunableop_tuning_is_enabled", "_cuda_tunableop_tuning_enable"),
)
if torch.version.cuda or torch.version.hip:  # reading these takes ten times as long as the others
    _PAIRS = (
        *_PAIRS,
        ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
        ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    )
if torch.version.hip:
    _PAIRS = (*_PAIRS, ("_get_rocm_fa_preferred_backend", "_set_rocm_fa_preferred_backend"))
_PAIRS = tuple((get, put) for get, put in _PAIRS if hasattr(C, get) and hasattr(C, put))  # no version has all of them
_GETTERS = tuple(getattr(C, get) for get, _ in _PAIRS)
_PUTTERS = tuple(getattr(C, put) for _, put in _PAIRS)  # torch's own functions, before exposure.py wraps them

SETTERS = (
    *((C, put) for _, put in _PAIRS),
    # `numeric_flags` reads these settings under other names: precisions, and the default dtype
    (C, "_set_cudnn_allow_tf32"),
    (C, "_set_cublas_allow_tf32"),
    (C, "_set_float32_matmul_precision"),
    (C, "_set_fp32_precision_setter"),
    (C, "_set_deterministic_algorithms"),
    (C, "_set_default_dtype"),
    (C, "_set_default_tensor_type"),
    (torch, "set_num_threads"),
    (torch, "set_flush_denormal"),
    (torch.backends.ContextProp, "__set__"),  # `torch.backends.mkldnn.enabled = ...` calls setters that it holds itself
)
"""(owner, name) of every function that sets one of the settings."""


class Changes:
    """Tells whether a setting may have been set since a moment, without a look at each setting.

    watched: whether the functions in `SETTERS` are wrapped now, and tell (exposure.py).
    last: an object, another one after each time that one of them ran. It is of use only where `watched` is true.
    """

    def __init__(self) -> None:
        self.watched = False
        self.last = object()


CHANGES = Changes()
_DENORMAL = 5e-324
_matmul, _deterministic, _warn_only = (
    C._get_float32_matmul_precision,
    C._get_deterministic_algorithms,
    C._get_deterministic_algorithms_warn_only,
)
_threads, _default_dtype = torch.get_num_threads, torch.get_default_dtype
_precision, _set_precision = C._get_fp32_precision_getter, C._set_fp32_precision_setter
_set_matmul_precision, _set_default_dtype = C._set_float32_matmul_precision, C._set_default_dtype
_set_deterministic = C._set_deterministic_algorithms
_set_threads, _set_denormal = torch.set_num_threads, torch.set_flush_denormal


_BACKENDS, _OPS = zip(*_PRECISIONS, strict=True)
_answer = methodcaller("__call__")


@uncompiled
def numeric_flags() -> tuple[Any, ...]:
    """The settings that change the bits an op returns (R6): rebuilds run under those of the forward. It runs before each
    rebuild, so it only calls torch's getters.
    """
    try:
        matmul = _matmul()
    except RuntimeError:  # the user set precisions per backend, which no single word describes
        matmul = None
    return (
        (matmul, *map(_precision, _BACKENDS, _OPS)),
        (_deterministic(), _warn_only()),
        _threads(),
        _default_dtype(),
        _DENORMAL * 1.0 == 0.0,  # torch has no getter: ask the processor
        tuple(map(_answer, _GETTERS)),
    )


def set_numeric_flags(flags: tuple[Any, ...]) -> None:
    """Restore the settings `flags`, an earlier result of `numeric_flags`. Only settings that differ are set."""
    now = numeric_flags()
    precisions, deterministic, threads, dtype, flush, values = flags
    try:
        if precisions != now[0]:
            if precisions[0] is not None:
                _set_matmul_precision(precisions[0])
            for where, then in zip(_PRECISIONS, precisions[1:], strict=True):
                if _precision(*where) != then:  # setting one precision may set others, too
                    _set_precision(*where, then)
        if deterministic != now[1]:
            _set_deterministic(deterministic[0], warn_only=deterministic[1])
        if threads != now[2]:
            _set_threads(threads)
        if dtype != now[3]:
            _set_default_dtype(dtype)
        if flush != now[4]:
            _set_denormal(flush)
        for put, value, before in zip(_PUTTERS, values, now[5], strict=True):
            if value != before:
                put(*value) if isinstance(value, tuple) else put(value)
    finally:
        CHANGES.last = object()
