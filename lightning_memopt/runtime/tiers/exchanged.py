"""A storage that has a tier's memory while it is parked: its own memory is exchanged with that of a shelf, and back.

So it is never empty. Whoever reads it gets its bits, only slower: a node of backward that runs in another order, a checkpoint,
clipping, a loop that logs a norm. Whoever writes to it while it is away, writes to the tier's memory.

X1. The tier has its bytes before it gets the tier's memory.
X2. What was written while it was on the device, or may have been, is copied to the tier before the device's memory is freed.
    Where that fails, it stays.
X3. The address of its memory says where it is, also after an interrupt. Memory that is not what it got here (`resize_`,
    `share_memory_`) is left alone.
X4. A storage that comes home has memory of torch's allocator.
X5. Memory that was handed out (`numpy()`) stays where it is.
"""

from __future__ import annotations

import torch

from lightning_memopt.runtime.tiers.shelf import AWAY, Shelf, unobserved
from lightning_memopt.runtime.tiers.streams import freed_in_order
from lightning_memopt.torch_private import storage_id

NOTHING = torch.empty(0, dtype=torch.uint8)


class Exchanged:
    """Room on a shelf for one storage at a time, and where that storage is. Subclasses say which it is, when it moves, and
    whether it may have been written. All calls are below autograd. `flat`: all bytes of the storage, flat uint8.

    nbytes: the most bytes that it has room for.
    """

    def __init__(self, shelf: Shelf, nbytes: int) -> None:
        self.nbytes = nbytes
        self._shelf, self._offset = shelf, shelf.take(nbytes)
        self._version = 0  # of the tensor, when the tier and the device had the same bytes
        self._away_at = self._here_at = 0
        self._beside = NOTHING  # has the tier's memory while the storage does not

    def _leave(self, flat: torch.Tensor) -> None:
        """The storage is away. `_beside` has its bytes."""
        freed_in_order(flat)
        self._away_at = self._beside.data_ptr()
        self._shelf.native.exchange(flat, self._beside)  # X1
        AWAY.add(storage_id(flat))
        self._here_at, self._beside = 0, NOTHING  # the device's memory is freed

    def _empty(self, flat: torch.Tensor) -> torch.Tensor:
        """As much memory on the device."""
        with unobserved(flat.device):
            return torch.empty_like(flat)

    def _come(self, flat: torch.Tensor, here: torch.Tensor) -> None:
        """The storage is on the device: it gets the memory of `here`, which has its bytes for work on the current stream."""
        self._here_at, self._beside = here.data_ptr(), here
        self._shelf.native.exchange(flat, here)
        AWAY.discard(storage_id(flat))

    def _come_home(self, flat: torch.Tensor, of: torch.Tensor) -> None:
        """X4. `of` has the bytes. Raises torch.OutOfMemoryError where there is no room: it stays away."""
        home = torch.empty_like(flat)
        home.copy_(of)
        self._shelf.native.exchange(flat, home)
        AWAY.discard(storage_id(flat))
