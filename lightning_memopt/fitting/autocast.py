"""CUDA's rules of autocast, for a step that is recorded on the CPU.

Under autocast, each device has lists of ops that run in float32. The CPU's are shorter: layer norm, softmax and sums stay in
half precision there. What autograd saves of these ops has twice the bytes on CUDA. The lists, names of ops with a space between
them, are torch's (ATen/autocast_mode.h).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from lightning_memopt.torch_private import DispatchKey, DispatchKeySet, excluding_keys, has_kernel, tree_map

IN_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor "
    "pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d "
    "upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa"
)
"""Ops whose inputs are cast to float32."""
TO_FLOAT32 = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Ops that are asked for a float32 result, unless they are asked for another type."""
IN_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Ops whose inputs are cast to the widest type among them."""
_KEY = "AutocastCPU"
_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within, autocast on the CPU has CUDA's lists, and autocast that is asked for CUDA is that of the CPU."""
    rules = torch.library.Library("aten", "IMPL")
    try:
        for names, rule in ((IN_FLOAT32, _in_float32), (TO_FLOAT32, _to_float32), (IN_WIDEST, _in_widest)):
            for name in names.split():
                if not has_kernel(f"aten::{name}", _KEY):  # else the CPU has the same rule
                    rules.impl(name, rule(_op(name)), _KEY)
        with _for_cuda():
            yield
    finally:
        rules._destroy()


@contextlib.contextmanager
def _for_cuda() -> Iterator[None]:
    """Within, `torch.autocast("cuda")` is autocast on the CPU, with CUDA's default type, and this is what is said of it."""
    original = torch.autocast.__init__
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    said: Any = {
        "is_autocast_enabled": lambda device_type="cuda": enabled(_here(device_type)),
        "get_autocast_dtype": lambda device_type: dtype_of(_here(device_type)),
        "get_autocast_gpu_dtype": lambda: dtype_of("cpu"),
    }

    def made(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if str(device_type).startswith("cuda"):
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    with mock.patch.object(torch.autocast, "__init__", made), mock.patch.multiple(torch, **said):
        yield


def _here(device_type: str) -> str:
    return "cpu" if device_type.startswith("cuda") else device_type


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(op: Any, args: Any, kwargs: Any) -> Any:
    with excluding_keys(DispatchKeySet(DispatchKey.AutocastCPU)):
        return op(*args, **kwargs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """The values, with tensors in half precision or float32 cast."""
    eligible = (*_HALF, torch.float32)
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in eligible else t, values)


def _in_float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with excluding_keys(DispatchKeySet(DispatchKey.AutocastCPU)):
            args, kwargs = _cast((args, kwargs), torch.float32)
            return op(*args, **kwargs)

    return run


def _to_float32(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if args[0].dtype in _HALF and given.get("dtype") is None:
            args, kwargs = args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}
        return _without_autocast(op, args, kwargs)

    return run


def _in_widest(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found: list[torch.dtype] = []
        tree_map(lambda t: found.append(t.dtype) if isinstance(t, torch.Tensor) else None, (args, kwargs))
        widest = torch.float32 if torch.float32 in found else next((d for d in found if d in _HALF), torch.float32)
        with excluding_keys(DispatchKeySet(DispatchKey.AutocastCPU)):
            args, kwargs = _cast((args, kwargs), widest)
            return op(*args, **kwargs)

    return run
