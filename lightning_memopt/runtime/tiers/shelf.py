"""A shelf: memory beside the device that the device itself can read, for weights that are away."""

from __future__ import annotations

import torch

from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.plan.tiers import PAGE_NBYTES
from lightning_memopt.runtime.tiers.base import buffer
from lightning_memopt.runtime.tiers.room import Room
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.runtime.tiers.streams import HostPool
from lightning_memopt.units import round_up


class Shelf:
    """Memory beside the device that the device can read: pages of a file for the CPU, page-locked memory for other devices.

    Raises OffloadError where it cannot be had.
    """

    def __init__(self, nbytes: int, directory: str | None, device: torch.device, limit_nbytes: int | None = None) -> None:
        """`limit_nbytes`: the most bytes that this process may have in such tiers."""
        self._room = Room("disk" if on_host(device) else "host", nbytes, limit_nbytes)
        self._file = Scratch(nbytes, directory) if on_host(device) else None
        self._pool = None if on_host(device) else HostPool(nbytes, device)
        self._pages = None if self._file is None else memoryview(self._file.pages(nbytes))
        self._taken = 0
        if self._pool is not None and not self._pool.locked:
            self.close()
            raise OffloadError(
                f"{nbytes} bytes of host memory cannot be page-locked, and {device} reads no other; raise `ulimit -l`"
            )

    def put(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy these bytes (flat uint8) to free memory here. Returns this memory twice, as storages of their own on the CPU.

        Raises OffloadError.
        """
        offset, nbytes = self._taken, flat.numel()
        self._taken += round_up(
            nbytes, PAGE_NBYTES
        )  # a kernel may take another path for memory that is not aligned to 64 bytes
        if self._file is not None:
            assert self._pages is not None
            try:
                self._file.write(buffer(flat), offset)
            except OSError as error:
                raise OffloadError(
                    f"{nbytes} bytes of frozen weights cannot be written to the disk tier: {error.strerror or error}; "
                    "give it another directory: offload='disk:/that/one'"
                ) from error
            pages = self._pages[offset : offset + nbytes]
        else:
            assert self._pool is not None
            self._pool.bytes[offset : offset + nbytes].copy_(flat)
            pages = buffer(self._pool.bytes[offset : offset + nbytes])
        return torch.frombuffer(pages, dtype=torch.uint8), torch.frombuffer(pages, dtype=torch.uint8)

    def close(self) -> None:
        """No weight has memory here any more."""
        if self._file is not None:
            self._file.close()
        if self._pool is not None:
            self._pool.close()
        self._room.give()
