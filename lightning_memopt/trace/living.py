"""The storages that are alive: those of every tensor that Python knows, each once."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from lightning_memopt.native import counter, install
from lightning_memopt.torch_private import no_torch_functions, without_modes


def storages(t: torch.Tensor) -> list[torch.UntypedStorage]:
    """What a tensor's bytes are in; none for one without memory of its own. Call where no torch function or mode sees it."""
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
            return []  # mkldnn: opaque, and nothing tells where its bytes are
        return [part.untyped_storage() for part in parts]
    except (RuntimeError, NotImplementedError):
        return []  # a wrapper around other tensors, which are met by themselves


def _gradient(t: torch.Tensor) -> torch.Tensor | None:
    try:
        return t.grad if t.is_leaf or t.retains_grad else None
    except RuntimeError:
        return None  # torch forbids a write that was made into this view, and says so whenever autograd is asked of it


def living(device: torch.device) -> list[torch.UntypedStorage]:
    """Distinct storages on a device, of tensors of every kind and of their gradients, but for those that C++ alone holds."""
    found: dict[int, torch.UntypedStorage] = {}
    kinds: dict[type, bool] = {}
    with torch.no_grad(), no_torch_functions(), without_modes():
        for known in gc.get_objects():
            kind = type(known)  # `isinstance` asks the object, and lazy ones then begin to live
            if kind not in kinds:
                kinds[kind] = torch.Tensor in kind.__mro__
            if kinds[kind]:
                for t in (known, _gradient(known)):
                    for storage in () if t is None else storages(t):
                        if storage.device.type == device.type:
                            found[storage._cdata] = storage
    return list(found.values())


def count_all(say: Callable[[str], None]) -> None:
    """Put the native counter in place where it can be, once a process: what is alive on the CPU is counted too.

    What nobody can reach any more (a run that an error ended, in a cycle with its traceback) goes before: it would count.
    """
    gc.collect()
    known = counter() is not None
    counts = install(say)
    if counts is not None and not known:
        for storage in living(torch.device("cpu")):
            counts.counts(storage)
