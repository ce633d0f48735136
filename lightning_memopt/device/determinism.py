"""Ops that may give other bits each time they run on some type of device, although their schema does not say so."""

from __future__ import annotations

import torch

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.torch_private import C

# On accelerators, atomics decide the order in which these ops add up, or which of several writes to a cell comes last. With
# `torch.use_deterministic_algorithms(True)`, each of them either uses a kernel that fixes the order, or raises.
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
# A scan of one dimension adds up in the order in which its blocks arrive, whatever the setting. Only `cumsum` raises then.
_SCANS = {"cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "_logcumsumexp"}
# cuDNN may choose the algorithm for these by timing all of them (`cudnn_tunes`).
_TUNED = {"convolution"}
# The same, chosen by an argument of the op.
_TUNED_BY_ARGUMENT = {
    "_convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "cudnn_convolution_relu",
    "cudnn_convolution_add_relu",
}
DEPENDENT = _ATOMIC | _SCANS | _TUNED | _TUNED_BY_ARGUMENT
"""Names of the ops whose bits may vary, depending on the type of device and on torch's settings."""
_tuned: list[bool] = []
"""Not empty if cuDNN was seen to choose algorithms by timing in this process."""


def repeats_bits(name: str, device_type: str) -> bool:
    """Whether an op named in `DEPENDENT` gives the same bits each time on this type of device, with the present settings."""
    if kind_of(device_type).is_host:
        return True
    return (name in _ATOMIC and raises_where_it_varies()) or (name in _TUNED and not cudnn_tunes())


def varies(op_name: str, device_type: str) -> bool:
    """Whether an op (`aten::name.overload`) may give other bits each time on this type of device, with the present settings."""
    name = op_name.partition("::")[2].partition(".")[0]
    return name in DEPENDENT and not repeats_bits(name, device_type)


def raises_where_it_varies() -> bool:
    """Whether ops without a deterministic kernel raise. If torch only warns, they run, and add up in any order."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def cudnn_tunes() -> bool:
    """Whether cuDNN chooses its convolutions by timing them (`torch.backends.cudnn.benchmark`), or did so once in this process.

    Each thread times them for itself and keeps its choice for ever. So for a rebuild, the backward thread may choose another
    algorithm than the forward thread did, which gives other bits and needs other workspaces.
    """
    if C._get_cudnn_benchmark() and not _tuned:
        _tuned.append(True)
    return bool(_tuned)


def is_tuned(name: str, device_type: str) -> bool:
    """Whether an op of this name (`aten::name`) never runs again on this type of device because of `cudnn_tunes`."""
    return not kind_of(device_type).is_host and name.partition("::")[2] in _TUNED and cudnn_tunes()
