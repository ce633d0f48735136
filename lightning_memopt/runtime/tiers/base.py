"""The interface of tiers. A tier is memory of limited size beside the device, to which storages are copied out and from which
they are copied back.

Rules, each with a test (comments cite them by number):

T1. A copy out begins after all work that was queued on the current stream when `store` was called, so after the op that wrote
    the bytes.
T2. A `Stored` holds its source until the copy out is known to have ended, and then lets go of it. `record_stream` is not used,
    because it returns the bytes to the allocator at an unknown time, so that no peak could be predicted.
T3. A copy back begins after the copy out has ended, and after all work that was queued on the current stream when `fetch` was
    called, so after the ops that used the memory of `out` before.
T4. `wait_stored` and `wait_fetched` order the stream that is current when they are called. Call them on the stream on which
    the memory was allocated, because it belongs to that stream.
T5. Bytes of a tier are given to another tensor only when no copy from or to them is under way, or when streams guarantee that
    such copies end first.
T6. A failed copy raises OffloadError in a call that waits for it, or asks whether it has ended. The caller still has the tensor
    that could not be stored. After a failed copy back, `fetch` may be tried again.
T7. Every wait may be interrupted and repeated. `close` may be called twice, and leaves no thread, file or locked page.
T8. A forked process owns nothing: in it, `close` and `release` do nothing, and all other calls raise OffloadError.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

import torch
from torch import Tensor

from lightning_memopt.errors import OffloadError, TierFullError
from lightning_memopt.record import unwatched
from lightning_memopt.runtime.tiers.space import Space
from lightning_memopt.runtime.tiers.stopwatch import Stopwatch
from lightning_memopt.units import format_nbytes


class Stored(Protocol):
    """One storage in a tier."""

    @property
    def nbytes(self) -> int: ...

    def stored(self) -> bool:
        """Whether the copy out has ended, so that the device's bytes may be dropped. Raises OffloadError if it failed."""

    def wait_stored(self) -> None:
        """Make later work on the current stream wait for the copy out. The host itself waits only for disks."""

    def fetch(self, out: Tensor) -> None:
        """Begin to copy back into `out`, flat uint8 of `nbytes`. May be called again, even before the first copy has ended."""

    def wait_fetched(self) -> None:
        """Make later work on the current stream wait for all copies back so far, so that it may read every `out`."""

    def release(self) -> None:
        """Free the bytes in the tier. May be called while copies are under way, more than once, and in any thread."""


class Tier(Protocol):
    """Memory of `capacity_nbytes` beside the device.

    copied: times the copies, both out and back.
    """

    copied: Stopwatch

    @property
    def name(self) -> str: ...

    @property
    def capacity_nbytes(self) -> int: ...

    @property
    def used_nbytes(self) -> int:
        """Bytes in use, each storage rounded up to the tier's alignment."""

    def store(self, t: Tensor, what: str) -> Stored:
        """Begin to copy out `t`, a whole storage as flat uint8. `what` names it in errors. Raises TierFullError if the tier has
        no free piece of its size.
        """

    def close(self) -> None:
        """Wait for copies under way, and give back memory, files and threads."""


def check_flat(t: Tensor, nbytes: int | None = None) -> None:
    """Raise ValueError unless `t` is 1-D, contiguous and uint8, and has `nbytes` if given: tiers move no other tensors."""
    if t.dtype != torch.uint8 or t.dim() != 1 or not t.is_contiguous():
        raise ValueError(f"a tier moves flat uint8, not {t.dtype} of size {tuple(t.shape)} and stride {t.stride()}")
    if nbytes is not None and t.numel() != nbytes:
        raise ValueError(f"{nbytes} bytes are parked, but the tensor to copy them into has {t.numel()}")


def buffer(t: Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor on the CPU. The view keeps the tensor alive.

    It does not go through numpy, after which torch does not let a storage be resized: this may be a storage of the user.
    """
    with unwatched():
        memory = (ctypes.c_ubyte * t.numel()).from_address(t.data_ptr())
    memory.tensor = t  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def check_process(tier: str, pid: int) -> None:
    """T8: raise OffloadError unless this process is `pid`, which made the tier."""
    if os.getpid() != pid:
        raise OffloadError(f"the {tier} tier belongs to process {pid}; a process forked from it cannot offload: make one there")


def closed(tier: str, what: str) -> OffloadError:
    """The error for a use of a closed tier."""
    return OffloadError(f"{what}: the {tier} tier is closed; make another one")


def usage(space: Space) -> str:
    """How full a tier is, as text for messages."""
    used, capacity = format_nbytes(space.used_nbytes), format_nbytes(space.capacity_nbytes)
    return f"{used} of {capacity} in use, largest free piece {format_nbytes(space.largest_nbytes)}"


def full(tier: str, what: str, nbytes: int, space: Space) -> TierFullError:
    """The error for a tier that has no free piece of `nbytes`."""
    return TierFullError(
        f"{what}: the {tier} tier has no room for {nbytes} bytes ({format_nbytes(nbytes)}): {usage(space)}. "
        "Nothing is lost, it is still on the device; give the tier more bytes, or offload less"
    )
