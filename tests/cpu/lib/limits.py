"""A device of limited size, on the CPU: torch's own error is raised when live bytes would exceed the limit."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Device(TorchDispatchMode):
    """Counts the storages that ops make while it is entered, and those of `models`; raises torch's error above `limit_nbytes`.

    States of generators (bytes) are the host's, and so are copies that numpy holds. What replays make is made below dispatch
    modes and is not seen here: planned steps are measured by allocator events.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, limit_nbytes: int, models: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.limit_nbytes = limit_nbytes
        self.peak_nbytes = self.errors = self._at_most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for model in models:
            self._add([*model.parameters(), *model.buffers()])

    def live_nbytes(self) -> int:
        """What is alive now."""
        for key in [key for key, (ref, _) in self._live.items() if ref.expired()]:
            del self._live[key]
        self._at_most = sum(nbytes for _, nbytes in self._live.values())
        return self._at_most

    def _add(self, tensors: Iterable[Any]) -> bool:
        found = False
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.dtype != torch.uint8:
                storage = t.untyped_storage()
                known = self._live.get(storage._cdata)
                if storage.nbytes() and (known is None or known[0].expired() or known[1] != storage.nbytes()):
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._at_most += storage.nbytes()
                    found = True
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and self._add(tree_leaves(out)) and self._at_most > min(self.peak_nbytes, self.limit_nbytes):
            live = self.live_nbytes()
            if live > self.limit_nbytes:
                gc.collect()
                live = self.live_nbytes()
            self.peak_nbytes = max(self.peak_nbytes, live)
            if live > self.limit_nbytes:
                self.errors += 1
                del out  # what would not fit was never there, nor do the error's frames hold it
                raise torch.OutOfMemoryError(f"CUDA out of memory. {live} bytes of {self.limit_nbytes} would be in use.")
        return out
