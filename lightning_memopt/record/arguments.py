"""The arguments of an op: the storage versions that it reads, and what the tape keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_memopt.record.tape import StorageVersion, View
from lightning_memopt.record.tensors import is_plain

VersionOf = Callable[[torch.Tensor], StorageVersion]


def captured(values: Iterable[Any], version_of: VersionOf, reads: list[StorageVersion], foreign: list[torch.Tensor]) -> list[Any]:
    """The arguments as a tape keeps them: a `View` in place of an ordinary tensor, None in place of any other.

    version_of: gives the version that an ordinary tensor is on.
    reads: gets these versions.
    foreign: gets the tensors that are not ordinary.
    """
    kept: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                version = version_of(value)
                reads.append(version)
                kept.append(View(version.id, value))
            else:
                foreign.append(value)
                kept.append(None)
        elif type(value) in (list, tuple):
            kept.append(captured(value, version_of, reads, foreign))
        else:
            kept.append(value)
    return kept


def read(values: Iterable[Any], version_of: VersionOf, reads: list[StorageVersion]) -> None:
    """`captured`, where no tape keeps the arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                reads.append(version_of(value))
        elif type(value) in (list, tuple):
            read(value, version_of, reads)
