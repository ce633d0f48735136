"""The memory of one weight that may be parked. (Rules: `parked_weights`.)"""

from __future__ import annotations

import contextlib
import weakref

import torch

from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.native.engine import loaded
from lightning_memopt.record import fills, unwatched
from lightning_memopt.record.tensors import bytes_of, has_plain_bytes, in_shared_memory
from lightning_memopt.runtime.parked_gradients import has_hooks_of_others
from lightning_memopt.runtime.tiers.exchanged import Exchanged
from lightning_memopt.runtime.tiers.shelf import AWAY, Shelf, is_away, storage_on
from lightning_memopt.runtime.tiers.streams import copy, freed_in_order
from lightning_memopt.torch_private import is_copied_on_write, storage_address, storage_id


class WeightMemory(Exchanged):
    """One weight. Its storage is what is parked: `weight.data = other` gives the weight another one, which is none of ours.

    is_lent: NumPy has its address, so it stays where it is (X5).
    """

    def __init__(self, weight: torch.Tensor, shelf: Shelf) -> None:
        super().__init__(shelf, weight.nbytes)
        self._weight = weight
        self.identity = id(weight)
        self.device = weight.device
        self._bytes = bytes_of(weight)  # a tensor on the storage
        self.is_lent = False
        self._copy_out()
        self._version = weight._version
        self._here_at = storage_address(self._bytes.untyped_storage())
        self._may_be_written = False
        self.users = 0  # calls of its module, and updates, that are running
        self._coming: torch.Tensor | None = None  # gets a copy ahead
        self._copied_version: int | None = None  # what the copy ahead has, once it is queued
        weakref.finalize(self, AWAY.discard, storage_id(self._bytes)).atexit = False  # another storage may get this identity
        if self._is_at(self._here_at):
            self._leave(self._bytes)

    @property
    def is_trained(self) -> bool:
        return self._weight.requires_grad

    @property
    def has_hooks(self) -> bool:
        """Whether somebody else is told when its gradient was accumulated, and may write it."""
        return has_hooks_of_others(self._weight)

    @property
    def is_away(self) -> bool:
        return self._is_at(self._away_at)

    @property
    def is_current(self) -> bool:
        return storage_id(self._weight) == storage_id(self._bytes)

    def parks(self, weight: torch.Tensor) -> bool:
        return self._weight is weight and self.is_current

    def _is_at(self, address: int) -> bool:
        with unwatched():  # whose address others have, is never dropped
            storage = self._bytes.untyped_storage()
            is_there = storage.data_ptr() == address and storage.nbytes() == self.nbytes
            self.is_lent = is_there and self._shelf.native.lent(self._bytes, _HOLDERS + 1)
            return is_there and not self.is_lent

    def _copy_out(self) -> None:
        memory = self._shelf.put(self._bytes, self._offset, "weights")
        self._there, self._beside = storage_on(memory), storage_on(memory)

    def take_memory(self) -> None:
        """Take memory on the device for a copy ahead."""
        if self.is_away and self.parks(self._weight):
            self._copied_version = None
            self._coming = self._empty(self._bytes)

    def copy_ahead(self) -> None:
        """Queue the copy on the current stream, which is not that of the module."""
        if self._coming is not None:
            version = self._weight._version
            copy(self._coming, self._there)
            self._copied_version = version

    def fetch(self) -> None:
        """The weight is on the device, for work on the current stream. A copy ahead has ended for that stream."""
        here, self._coming = self._coming, None
        if self._is_at(self._away_at) and self.parks(self._weight):
            self._version = self._weight._version
            if here is None or self._copied_version != self._version:
                here = self._empty(self._bytes) if here is None else here
                copy(here, self._there)
            self._come(self._bytes, here)

    def stop(self) -> None:
        """No copy ahead is wanted. That which was queued has ended for the current stream."""
        if self._coming is not None:
            freed_in_order(self._coming)
            self._coming = None

    def is_updated(self) -> None:
        """An update writes it now, perhaps where no version counter shows it."""
        self._may_be_written = not self.is_away

    def drop(self, changed: bool = False) -> int:
        """`changed`: it may have been written where no version counter shows it. Returns the bytes that were copied to the
        tier. Raises OffloadError where they cannot be.
        """
        if self.users or not self._is_at(self._here_at):
            return 0
        self._may_be_written = copied = changed or self._may_be_written or self._written()
        if copied:
            self._copy_out()  # X2
            self._may_be_written = False
        self._leave(self._bytes)
        return self.nbytes if copied else 0

    def _written(self) -> bool:
        """Whether the device's memory has other bytes than the tier's. Writes through `.data` and NumPy, and `_foreach_` ops of
        CUDA, count in no version; so where the device reads the tier as fast as its own memory, bytes are compared.
        """
        if not on_host(self.device):
            return self._weight._version != self._version
        whole = self.nbytes // 8 * 8
        pairs = [(self._bytes[:whole].view(torch.int64), self._there[:whole].view(torch.int64))]
        pairs.append((self._bytes[whole:], self._there[whole:]))
        return not all(torch.equal(here, there) for here, there in pairs)

    def close(self) -> None:
        """The weight is on the device from now on."""
        with contextlib.suppress(OffloadError):
            self.drop()
        if self.is_away:
            self._come_home(self._bytes, self._there)
        AWAY.discard(storage_id(self._bytes))


def may_be_parked(weight: torch.Tensor) -> bool:
    return (
        has_plain_bytes(weight)
        and fills(weight)
        and weight.nbytes > 0
        and not in_shared_memory(weight)
        and not is_copied_on_write(weight)
        and not _is_lent(weight)
    )


def _is_lent(weight: torch.Tensor) -> bool:
    """Whether NumPy has its address."""
    native = loaded()
    return native is not None and native.lent(weight, _HOLDERS + is_away(weight))


_HOLDERS = 2
"""How many hold the storage of a weight that nobody else knows: the weight, and Python, once it has seen the storage. One more
holds that which is parked.
"""
