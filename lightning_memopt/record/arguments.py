"""Find the storage versions that an op reads, what the tape keeps of its arguments, and its results on new storages.

The native engine does this if all tensors are ordinary, known and unchanged. The Python code here is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from lightning_memopt.record.tape import StorageVersion, Tape
from lightning_memopt.record.tensors import is_plain, tensors_in
from lightning_memopt.torch_private import storage_id

_FOREIGN = None
"""What the tape keeps instead of a tensor that is not ordinary. The op that reads it never runs again."""


class Source(Protocol):
    """The part of the recorder that is used here.

    meets: called before an op reads a version.
    of_storage: address of a storage -> its version.
    """

    meets: Callable[[StorageVersion, torch.Tensor], None] | None
    of_storage: dict[int, StorageVersion]

    @property
    def tape(self) -> Tape: ...
    def version_of(self, t: torch.Tensor) -> StorageVersion: ...


def captured(values: tuple, source: Source, reads: list[StorageVersion], foreign: list[torch.Tensor]) -> tuple:
    """The arguments as a tape keeps them: a `View` instead of each ordinary tensor.

    reads: the versions of the ordinary tensors are appended to it.
    foreign: the tensors that are not ordinary are appended to it.
    """
    native = source.tape.native
    if native is not None and source.meets is None:
        kept = native.captured(values, source.of_storage, True, reads)
        if kept is not None:
            return kept
    return tuple(_captured(values, source, reads, foreign))


def _captured(values: Iterable[Any], source: Source, reads: list[StorageVersion], foreign: list[torch.Tensor]) -> list[Any]:
    kept: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                version = source.version_of(value)
                reads.append(version)
                kept.append(source.tape.view(version.id, value))
            else:
                foreign.append(value)
                kept.append(_FOREIGN)
        elif type(value) in (list, tuple):
            kept.append(_captured(value, source, reads, foreign))
        else:
            kept.append(value)
    return kept


def read(values: Iterable[Any], source: Source, reads: list[StorageVersion]) -> None:
    """Like `captured`, for an op whose arguments no tape keeps. The recorder asks the native engine first."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                reads.append(source.version_of(value))
        elif type(value) in (list, tuple):
            read(value, source, reads)


def fresh(out: Any, source: Source) -> list[tuple[int, torch.Tensor]]:
    """(position among the tensors of the result, tensor) of each ordinary tensor that is on a new storage.

    Two of the tensors may be on the same storage. The native engine has the same function.
    """
    known = source.of_storage
    results = enumerate((out,) if isinstance(out, torch.Tensor) else tensors_in(out))
    return [(i, t) for i, t in results if is_plain(t) and storage_id(t) not in known]
