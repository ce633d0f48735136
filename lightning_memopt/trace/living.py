"""Find all live storages: those of every tensor that Python's garbage collector knows, each once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_memopt.device.places import is_on
from lightning_memopt.live_objects import live_objects
from lightning_memopt.native import Counter, counter, install
from lightning_memopt.record import Seams, uncompiled
from lightning_memopt.torch_private import gradient_of, no_torch_functions, without_modes


def storages(t: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages with a tensor's bytes; none if it has no memory of its own. Call where torch functions and modes are off."""
    try:
        if t.layout is torch.strided:
            return [t.untyped_storage()]
        if t.layout is torch.sparse_coo:
            parts = [t._indices(), t._values()]
        elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [t.crow_indices(), t.col_indices(), t.values()]
        elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [t.ccol_indices(), t.row_indices(), t.values()]
        else:
            return []  # mkldnn: torch does not show where its bytes are
        return [part.untyped_storage() for part in parts]
    except (RuntimeError, NotImplementedError):
        return []  # a wrapper around other tensors, which the garbage collector lists too


def living(device: torch.device) -> list[torch.UntypedStorage]:
    """Distinct storages on a device, of all tensors and their gradients, except tensors that only C++ holds."""
    storage_of: dict[int, torch.UntypedStorage] = {}
    with torch.no_grad(), no_torch_functions(), without_modes():
        for known in live_objects(lambda kind: torch.Tensor in kind.__mro__):
            for t in (known, gradient_of(known)):
                for storage in () if t is None else storages(t):
                    if is_on(device, storage.device):
                        storage_of[storage._cdata] = storage
    return list(storage_of.values())


def count_all(say: Callable[[str], None]) -> None:
    """Install the native counter once per process, if possible, and let it count the storages that are alive on the CPU.

    Unreachable objects (a run that an error ended, in a cycle with its traceback) are collected first, so they do not count.
    """
    gc.collect()
    installed_before = counter() is not None
    counts = install(say)
    if counts is not None and not installed_before:
        count_living(counts)


def count_living(counts: Counter) -> None:
    """Let the counter count the storages that are alive on the CPU, including those from before it was installed, and those
    that Python made, for which torch uses another allocator.
    """
    for storage in living(torch.device("cpu")):
        counts.counts(storage)


@contextlib.contextmanager
def counting_all(say: Callable[[str], None]) -> Iterator[None]:
    """Like `count_all`. Within, the counter also counts the storages that Python makes (a deep copy, an unpickled tensor)."""
    gc.collect()
    counts = install(say)
    if counts is None:
        yield
        return
    with _made_by_python.listening(counts):
        count_living(counts)
        yield


def _counted(original: Any) -> Any:
    @uncompiled
    def new(*args: Any, **kwargs: Any) -> Any:
        storage = original(*args, **kwargs)
        for counts in tuple(_made_by_python.listeners):
            counts.counts(storage)
        return storage

    return new


_made_by_python: Seams[Counter] = Seams(lambda: [(torch.UntypedStorage, "__new__", _counted)])
