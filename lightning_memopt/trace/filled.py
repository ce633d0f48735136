"""Storages that got their bytes after the op that made them: tensors in tiles which something has read.

Only needed where no counter shows bytes that the recorder does not see (counted.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch

from lightning_memopt.device.kinds import DeviceKind
from lightning_memopt.device.places import is_on
from lightning_memopt.record import StorageVersion
from lightning_memopt.trace.counted import Unseen


class Filled:
    """The bytes of such storages on a device, and when they were in memory. `now` gives the present point."""

    def __init__(self, device: torch.device, now: Callable[[], int]) -> None:
        self._device = device
        self._now = now
        self._born: list[tuple[int, int]] = []
        self._freed: dict[int, int] = {}
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def add(self, version: StorageVersion, kind: DeviceKind) -> None:
        """The storage of a version has got its bytes. kind: that of the device."""
        storage = version.alive()
        if storage is not None and is_on(self._device, storage.device):
            self._storages.append(weakref.ref(storage, partial(self._dies, len(self._born))))
            self._born.append((kind.allocated_nbytes(storage.nbytes()), self._now()))

    def _dies(self, i: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self._freed[i] = self._now()

    def seen(self) -> Iterator[Unseen]:
        """The bytes, and when they were in memory."""
        for i, (nbytes, born_at) in enumerate(self._born):
            yield Unseen(nbytes, born_at, self._freed.get(i))

    def close(self) -> None:
        """Stop watching."""
        self._storages.clear()
