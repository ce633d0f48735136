"""What a tier is: a bounded place beside the device, to which storages are copied and from which they come back.

Rules, each with a test (`T3` in the code leads here):

T1. A copy out begins after what was queued on the current stream when `store` was called, so after the op that wrote the bytes.
T2. The source is held by what is parked until its copy is known to have ended, and is let go of then; no `record_stream`: that
    would return the bytes to the allocator at a time nobody knows, and a budget could not be predicted.
T3. A copy back begins after the copy out has ended, and after what was queued on the current stream when `fetch` was called:
    what used the memory of `out` before is done with it.
T4. `wait_stored` and `wait_fetched` order the stream that is current when they are called. Memory belongs to the stream it was
    allocated on: call them on that one.
T5. Bytes of a tier are given to another tensor only when no copy from or to them is on its way, or in an order that streams
    keep.
T6. A failure raises OffloadError where the copy is waited for, or asked whether it ended; what could not be stored is still the
    caller's. After a failed copy back, `fetch` may be tried again.
T7. Every wait may be interrupted and taken up again. `close` may be called twice, and leaves no thread, file or locked page.
T8. A process that is forked owns nothing: there, `close` and `release` do nothing, and anything else raises OffloadError.
"""

from __future__ import annotations

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
        """Whether the copy out has ended: the device's bytes may go. Raises OffloadError where it failed."""

    def wait_stored(self) -> None:
        """After this, what is queued on the current stream comes after the copy; the host waits for disks only."""

    def fetch(self, out: Tensor) -> None:
        """Begin to copy back into `out`, flat uint8 of `nbytes`. May be called again, also before the first copy has ended."""

    def wait_fetched(self) -> None:
        """After this, what is queued on the current stream may read every `out` given so far."""

    def release(self) -> None:
        """The tier's bytes are not needed any more. Safe while copies are on their way, twice, and in any thread."""


class Tier(Protocol):
    """A place of `capacity_nbytes` beside the device."""

    @property
    def name(self) -> str: ...

    @property
    def capacity_nbytes(self) -> int: ...

    @property
    def used_nbytes(self) -> int:
        """Bytes that are taken, rounded up."""

    @property
    def copied(self) -> Stopwatch:
        """How long copies take, both ways."""

    def store(self, t: Tensor, what: str) -> Stored:
        """Begin to copy `t`, flat uint8, a whole storage; `what` names it in errors. Raises OffloadError without room."""

    def close(self) -> None:
        """Wait for what is on its way and give everything back."""


def check_flat(t: Tensor, nbytes: int | None = None) -> None:
    """Raise ValueError unless `t` is what tiers move: one dimension of contiguous uint8, of `nbytes` where that is given."""
    if t.dtype != torch.uint8 or t.dim() != 1 or not t.is_contiguous():
        raise ValueError(f"a tier moves flat uint8, not {t.dtype} of size {tuple(t.shape)} and stride {t.stride()}")
    if nbytes is not None and t.numel() != nbytes:
        raise ValueError(f"{nbytes} bytes are parked, but what they shall be copied to has {t.numel()}")


def buffer(t: Tensor) -> memoryview:
    """The memory of a flat tensor of the CPU, not a copy."""
    with unwatched():
        return memoryview(t.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers from Python 3.12 on, for the stubs


def check_process(tier: str, pid: int) -> None:
    """T8: raise OffloadError in a process that was forked from the tier's."""
    if os.getpid() != pid:
        raise OffloadError(f"the {tier} tier belongs to process {pid}; a process forked from it cannot offload: make one there")


def closed(tier: str, what: str) -> OffloadError:
    return OffloadError(f"{what}: the {tier} tier is closed; make another one")


def usage(space: Space) -> str:
    used, capacity = format_nbytes(space.used_nbytes), format_nbytes(space.capacity_nbytes)
    return f"{used} of {capacity} in use, largest free piece {format_nbytes(space.largest_nbytes)}"


def full(tier: str, what: str, nbytes: int, space: Space) -> TierFullError:
    return TierFullError(
        f"{what}: the {tier} tier has no room for {nbytes} bytes ({format_nbytes(nbytes)}): {usage(space)}. "
        "Nothing is lost, it is still on the device; give the tier more bytes, or offload less"
    )
