"""Memory beside the device that the device can read: pages of a file for the CPU, page-locked memory for other devices.

A storage whose bytes are there can get this memory instead of the device's. So it is never empty: whoever reads it gets its
bits, only slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.native import counter_of
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan.tiers import PAGE_NBYTES
from lightning_memopt.runtime.tiers.base import buffer
from lightning_memopt.runtime.tiers.room import Room
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.runtime.tiers.streams import HostPool, copy, wait_on_host
from lightning_memopt.torch_private import storage_id
from lightning_memopt.units import round_up

AWAY: set[int] = set()
"""Identities of the storages that have a tier's memory now. Whoever gave it to them takes out those that are gone."""


def is_away(t: torch.Tensor) -> bool:
    """Whether the memory of `t` is in a tier, so that the device has none for it."""
    return storage_id(t) in AWAY


def unobserved(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within, what is allocated on the device does not count in an observed step: the step has these bytes already."""
    counter = counter_of(device)
    return contextlib.nullcontext() if counter is None else counter.hidden()


def on_shelf(sizes: Iterable[int]) -> int:
    """Bytes that tensors of these sizes take on a shelf. Each begins on a page: a kernel may take another path for memory that
    is not aligned to 64 bytes, as torch's is.
    """
    return sum(round_up(nbytes, PAGE_NBYTES) for nbytes in sizes)


class Shelf:
    """`nbytes` of such memory for `device` (see the module). `directory`: for files; None: the system's.

    limit_nbytes: the most bytes that this process may have in such tiers.
    native: the native engine, which exchanges memory.

    Raises OffloadError where it cannot be had, or there is no native engine.
    """

    def __init__(self, nbytes: int, directory: str | None, device: torch.device, limit_nbytes: int | None = None) -> None:
        self.native = loaded()
        if self.native is None:
            raise OffloadError("the native engine is not there; install a C++ compiler")
        self._room = Room("disk" if on_host(device) else "host", nbytes, limit_nbytes)
        self._file = Scratch(nbytes, directory) if on_host(device) else None
        self._pool = None if on_host(device) else HostPool(nbytes, device)
        self._device = device
        self._taken = 0
        if self._pool is not None and not self._pool.locked:
            self.close()
            raise OffloadError(
                f"{nbytes} bytes of host memory cannot be page-locked, and {device} reads no other; raise `ulimit -l`"
            )

    @property
    def keeps_writes(self) -> bool:
        """Whether what is written to memory here is in the tier."""
        return self._pool is not None

    def take(self, nbytes: int) -> int:
        """Where the next so many free bytes begin."""
        offset = self._taken
        self._taken += on_shelf([nbytes])
        return offset

    def put(self, flat: torch.Tensor, offset: int, what: str) -> memoryview:
        """Copy these bytes (flat uint8) there; a device does so on its current stream. Returns their memory: where it is
        page-locked, the same at each call; of a file, other pages at each call, and writes to them change no others. `what`:
        its name in errors.

        Raises OffloadError.
        """
        nbytes = flat.numel()
        if self._pool is not None:
            there = self._pool.bytes[offset : offset + nbytes]
            copy(there, flat)
            return buffer(there)
        assert self._file is not None
        try:
            self._file.write(buffer(flat), offset)
        except OSError as error:
            raise OffloadError(
                f"{nbytes} bytes of {what} cannot be written to the disk tier: {error.strerror or error}; "
                "give it another directory: offload='disk:/that/one'"
            ) from error
        return self._file.pages(nbytes, offset)

    def close(self) -> None:
        """No storage has memory here any more."""
        if self._file is not None:
            self._file.close()
        if self._pool is not None:
            wait_on_host(self._device)  # for copies that brought storages home
            self._pool.close()
        self._room.give()


def storage_on(memory: memoryview) -> torch.Tensor:
    """A tensor (flat uint8, on the CPU) with a storage of its own that has this memory."""
    return torch.frombuffer(memory, dtype=torch.uint8)
