"""What can be asked of a device. A capability that it lacks raises UnsupportedError, which names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.kinds import DeviceKind, kind_of
from lightning_memopt.device.places import generator_of
from lightning_memopt.errors import UnsupportedError


class Nbytes(NamedTuple):
    """Bytes now, and the most since peaks were reset."""

    now: int
    peak: int


class Statistics(NamedTuple):
    """What an allocator counts of requests.

    nbytes: of those that are allocated now, as they were requested.
    peak_nbytes: the most since peaks were reset.
    turnover: allocations and frees since the process began.
    """

    nbytes: int
    peak_nbytes: int
    turnover: tuple[int, int]


class Backend:
    """A device. What a type of device does not have is as here. Many methods: one for each thing that can be asked.

    device: as torch names it. Without a number it is the current one, at each call.
    kind: what plans know of its type.
    keeps_statistics: its allocator counts bytes and their peaks (`statistics`, `allocated`, `peak_nbytes`, `reset_peaks`). The
        CPU's does not; there the native counter counts (`native.counter_of`).
    keeps_workspaces: its libraries take workspaces for each thread and stream, and keep them.
    locks_pages: host memory can be locked for copies that the host does not wait for.
    runs_triton: Triton compiles for it.
    """

    keeps_statistics: ClassVar[bool] = True
    keeps_workspaces: ClassVar[bool] = False
    locks_pages: ClassVar[bool] = False
    runs_triton: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind: DeviceKind = kind_of(device.type)

    # -- what it is -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """As people call it: the product's name where torch knows it, else the type."""
        return str(self.device.type)

    @property
    def uuid(self) -> str | None:
        """The number by which NVML knows the device; None for others."""
        return None

    def check(self) -> None:
        """Raise UnsupportedError where no step can be observed."""

    # -- memory -----------------------------------------------------------------------------------

    def total_nbytes(self) -> int:
        """Bytes of memory that a budget may use."""
        raise NotImplementedError

    def free_nbytes(self) -> int | None:
        """Bytes that other programs do not use, what this process already uses included; None where nobody says."""
        return None

    def statistics(self) -> Statistics:
        """What was requested of the allocator."""
        self._keeps_none()

    def allocated(self) -> Nbytes:
        """Bytes that the allocator has given out."""
        self._keeps_none()

    def peak_nbytes(self) -> int:
        """The peak as a budget counts it: of segments, where the device has some (`kind.has_segments`), else as requested."""
        self._keeps_none()

    def reset_peaks(self) -> None:
        """Let all peaks begin at the bytes of now."""
        self._keeps_none()

    def _keeps_none(self) -> NoReturn:
        raise UnsupportedError(f"torch's allocator keeps no statistics of {self.device}: ask the native counter for its bytes")

    def empty_cache(self) -> None:
        """Give memory that is cached and not in use back to the device."""

    def allocator_settings(self) -> Mapping[str, Any] | None:
        """The settings that are in force, where the allocator is the one that `plan.allocator` models."""
        return None

    def segments(self) -> list[Mapping[str, Any]] | None:
        """What that allocator has reserved on this device, as torch's memory snapshots have it; None for other allocators. The
        segment that serves a request first, where several could, comes first. Resets the peaks.
        """
        return None

    def record_requests(self, most: int) -> bool:
        """Begin a record of the last `most` requests. False where none can be kept, or the user keeps one."""
        return False

    def recorded_requests(self) -> Sequence[Mapping[str, Any]]:
        """The record so far, as torch's memory snapshots have it."""
        return ()

    def stop_recording(self) -> None:
        """End the record."""

    # -- order and time ---------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    def clock(self) -> float:
        """Seconds of the clock by which work of this thread is timed, between two `synchronize`."""
        return perf_counter()

    def current_stream(self) -> Any:
        """The stream on which this thread queues work now; None where the thread does it itself."""
        return None

    @property
    def streams(self) -> Any:
        """The module with `Stream`, `Event`, `stream` and `current_stream` of this device. Those of the CPU do nothing."""
        return torch.get_device_module(self.device)

    def timing_event(self) -> Any:
        """An event whose `elapsed_time` can be read."""
        return self.streams.Event(enable_timing=True)

    def is_capturing(self) -> bool:
        """Whether work of this thread is being captured into a graph of the device."""
        return False

    # -- the host's memory ------------------------------------------------------------------------

    def lock_pages(self, address: int, nbytes: int) -> int:
        """Lock whole pages of host memory, where `locks_pages`. Returns the driver's error, 0 for none."""
        raise NotImplementedError

    def unlock_pages(self, address: int) -> int:
        """Unlock what `lock_pages` locked. Returns the driver's error, 0 for none."""
        raise NotImplementedError

    # -- random numbers ---------------------------------------------------------------------------

    def generator_state_nbytes(self) -> int:
        """Bytes of the state of its default generator."""
        generator = generator_of(self.device)
        return 0 if generator is None else int(generator.get_state().nbytes)
