"""Which ops may run again on a device (rule R1): on CUDA, some whose rule allows it do not give the same bits twice."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lightning_memopt.record.rules import rule_of, rules_generation
from lightning_memopt.torch_private import C, OpOverload

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
_tuned: list[bool] = []
"""Not empty where cuDNN was seen to choose by time in this process."""


def may_run_again(func: OpOverload, device_type: str) -> bool:
    """R1 on this device: the op is not opaque, and the device gives the same bits again."""
    rule = rule_of(func)
    if rule.handling not in ("pure", "random", "empty"):
        return False
    if device_type == "cpu" or not _depends_on_device(func):
        return True
    name = _name(func)
    return (name in _ATOMIC and _is_deterministic()) or (name in _TUNED and not cudnn_tunes())


@cache
def _depends_on_device(func: OpOverload) -> bool:
    """Whether R1 depends on the device of this op."""
    name = _name(func)
    return any(name in table for table in (_ATOMIC, _SCANS, _TUNED, _TUNED_BY_ARGUMENT))


def _name(func: OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def _is_deterministic() -> bool:
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


def is_tuned(name: str) -> bool:
    """Whether an op of this name (`aten::name`) never runs again because `cudnn_tunes`."""
    return name.partition("::")[2] in _TUNED and cudnn_tunes()


def rules_in_force() -> tuple[Any, ...]:
    """Changes whenever a rule does, or a setting that says which ops may run again: conclusions from older ones are void."""
    return rules_generation(), _is_deterministic(), cudnn_tunes()
