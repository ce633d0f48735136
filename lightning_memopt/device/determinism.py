"""Ops that do not give the same bits twice on a type of device, although their schema says nothing of it."""

from __future__ import annotations

import torch

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.torch_private import C

# Off the CPU atomics choose the order of their sums, or which of several writes to a cell comes last. With
# `torch.use_deterministic_algorithms(True)` each of them has a kernel that fixes the order, or raises.
_ATOMIC = {
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "scatter_reduce",
    "scatter_reduce_",
    "put",
    "put_",
    "histc",
    "bincount",
    "grid_sampler_2d",
    "index_reduce",
    "index_reduce_",
    "max_unpool2d",
    "max_unpool3d",
    "nll_loss2d_forward",
    "_cudnn_ctc_loss",
    "_segment_reduce",
}
# A scan of one dimension adds up in the order in which its blocks come, whatever is set: only that of `cumsum` raises.
_SCANS = {"cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "_logcumsumexp"}
# cuDNN may choose their algorithm by how long each takes (`cudnn_tunes`).
_TUNED = {"convolution"}
# The same, by an argument of their own.
_TUNED_BY_ARGUMENT = {
    "_convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "cudnn_convolution_relu",
    "cudnn_convolution_add_relu",
}
DEPENDENT = _ATOMIC | _SCANS | _TUNED | _TUNED_BY_ARGUMENT
"""Names of the ops whose bits depend on the type of device and on torch's settings."""
_tuned: list[bool] = []
"""Not empty where cuDNN was seen to choose by time in this process."""


def repeats_bits(name: str, device_type: str) -> bool:
    """Whether the op of this name in `DEPENDENT` gives the same bits again, on this type of device and by today's settings."""
    if kind_of(device_type).is_host:
        return True
    return (name in _ATOMIC and raises_where_it_varies()) or (name in _TUNED and not cudnn_tunes())


def raises_where_it_varies() -> bool:
    """Whether ops without a deterministic kernel raise. Where torch only warns, they run, in any order."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def cudnn_tunes() -> bool:
    """Whether cuDNN's convolutions are chosen by how long they take (`torch.backends.cudnn.benchmark`), or once were.

    Each thread times them itself and remembers its choice for good: the thread of backward may choose another algorithm for
    a rebuild than the thread of the forward did, which gives other bits and takes workspaces of its own.
    """
    if C._get_cudnn_benchmark() and not _tuned:
        _tuned.append(True)
    return bool(_tuned)


def is_tuned(name: str, device_type: str) -> bool:
    """Whether an op of this name (`aten::name`) never runs again on this type of device because `cudnn_tunes`."""
    return not kind_of(device_type).is_host and name.partition("::")[2] in _TUNED and cudnn_tunes()
