"""Digests of what a run leaves: two runs have left the same bits where their digests are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def _bytes(t: Tensor) -> bytes:
    """The bytes of a tensor; of a sharded one those of this rank."""
    local = t.detach().to_local() if isinstance(t, DTensor) else t.detach()
    return local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def hashed(tensors: Iterable[Tensor]) -> str:
    """One hash of the bytes of all tensors."""
    total = hashlib.sha256()
    for t in tensors:
        total.update(_bytes(t))
    return total.hexdigest()[:16]


def digest(value: Any) -> Any:
    """A value as plain data that differs where a bit does."""
    if isinstance(value, nn.Module):
        tensors = dict(value.named_parameters()) | dict(value.named_buffers())
        return {name: digest(t) for name, t in tensors.items()}
    if isinstance(value, torch.optim.Optimizer):
        return [digest(list(value.state.values())), digest([len(group["params"]) for group in value.param_groups])]
    if isinstance(value, Tensor):
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            return ["sparse", list(value.shape), digest(value.indices()), digest(value.values())]
        return [str(value.dtype), list(value.shape), hashlib.sha256(_bytes(value)).hexdigest()]
    if isinstance(value, dict):
        return {str(key): digest(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [digest(entry) for entry in value]
    return float(value).hex() if isinstance(value, float) else value if isinstance(value, int | str) else repr(value)
