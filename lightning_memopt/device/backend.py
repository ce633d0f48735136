"""The interface to a device. Using a capability that the device lacks raises UnsupportedError, which names the capability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.kinds import DeviceKind, kind_of
from lightning_memopt.device.places import generator_of
from lightning_memopt.errors import UnsupportedError


class Nbytes(NamedTuple):
    """The bytes now, and the most bytes since peaks were reset."""

    now: int
    peak: int


class Statistics(NamedTuple):
    """What an allocator counts.

    nbytes: the bytes allocated now, as they were requested.
    peak_nbytes: the most such bytes since peaks were reset.
    turnover: allocations and frees since the process began.
    """

    nbytes: int
    peak_nbytes: int
    turnover: tuple[int, int]


class Backend:
    """A device. Subclasses override what their type of device has; what it lacks stays as it is here.

    Many methods: one for each thing that can be asked.

    device: the device as torch names it. Without a number, it stands for whichever device is current at each call.
    kind: what plans know about its type.
    keeps_statistics: whether its allocator counts bytes and peaks (`statistics`, `allocated`, `peak_nbytes`, `reset_peaks`).
        The CPU's allocator does not; there the native counter counts (`native.counter_of`).
    keeps_workspaces: whether its libraries allocate a workspace for each thread and stream, and keep it.
    locks_pages: whether host memory can be locked, so that the host need not wait for copies.
    runs_triton: whether Triton compiles for it.
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
        """What people call the device: the product's name if torch knows it, else the type."""
        return str(self.device.type)

    @property
    def uuid(self) -> str | None:
        """The UUID under which NVML knows the device; None if it does not."""
        return None

    def check(self) -> None:
        """Raise UnsupportedError if steps on this device cannot be observed."""

    # -- memory -----------------------------------------------------------------------------------

    def total_nbytes(self) -> int:
        """Bytes of memory that a budget may use."""
        raise NotImplementedError

    def free_nbytes(self) -> int | None:
        """Bytes that other programs do not use, including those that this process already uses; None if that is not known."""
        return None

    def left_nbytes(self) -> int | None:
        """Bytes that this process can still allocate; None if that is not known."""
        free_nbytes = self.free_nbytes() if self.keeps_statistics else None
        return None if free_nbytes is None else min(free_nbytes, self.total_nbytes()) - self.allocated().now

    def statistics(self) -> Statistics:
        """The bytes that were requested from the allocator."""
        self._keeps_none()

    def allocated(self) -> Nbytes:
        """Bytes that the allocator has given out."""
        self._keeps_none()

    def peak_nbytes(self) -> int:
        """The peak as a budget counts it: bytes of segments if the device has them (`kind.has_segments`), else requested
        bytes.
        """
        self._keeps_none()

    def reset_peaks(self) -> None:
        """Set all peaks to the present number of bytes."""
        self._keeps_none()

    def _keeps_none(self) -> NoReturn:
        raise UnsupportedError(f"torch's allocator keeps no statistics of {self.device}: ask the native counter for its bytes")

    def empty_cache(self) -> None:
        """Give cached memory that is not in use back to the device."""

    def allocator_settings(self) -> Mapping[str, Any] | None:
        """The settings in force, if the allocator is the one that `plan.allocator` models."""
        return None

    def segments(self) -> list[Mapping[str, Any]] | None:
        """What that allocator has reserved on this device, in the format of torch's memory snapshots; None for other
        allocators. If several segments could serve a request, the one that does comes first. Resets the peaks.
        """
        return None

    def record_requests(self, most: int) -> bool:
        """Begin to record the last `most` requests. Returns False if that is not possible, or if the user is recording
        already.
        """
        return False

    def recorded_requests(self) -> Sequence[Mapping[str, Any]]:
        """The record so far, in the format of torch's memory snapshots."""
        return ()

    def stop_recording(self) -> None:
        """End the record."""

    # -- order and time ---------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""

    def clock(self) -> float:
        """Seconds of the clock that times the work of this thread. Call `synchronize` before each reading."""
        return perf_counter()

    def current_stream(self) -> Any:
        """The stream on which this thread now queues work; None if the thread does the work itself."""
        return None

    @property
    def streams(self) -> Any:
        """The module that has `Stream`, `Event`, `stream` and `current_stream` for this device. For the CPU, these do
        nothing.
        """
        return torch.get_device_module(self.device)

    def timing_event(self) -> Any:
        """An event whose `elapsed_time` can be read."""
        return self.streams.Event(enable_timing=True)

    def is_capturing(self) -> bool:
        """Whether work of this thread is being captured into a graph of the device."""
        return False

    # -- the host's memory ------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether the device computes in the host's memory, so that nothing is saved by copying there."""
        return self.kind.is_host

    def lock_pages(self, address: int, nbytes: int) -> int:
        """Lock whole pages of host memory, if `locks_pages`. Returns the driver's error code, 0 for none."""
        raise NotImplementedError

    def unlock_pages(self, address: int) -> int:
        """Unlock what `lock_pages` locked. Returns the driver's error code, 0 for none."""
        raise NotImplementedError

    # -- random numbers ---------------------------------------------------------------------------

    def generator_state_nbytes(self) -> int:
        """Bytes of the state of the device's default generator."""
        generator = generator_of(self.device)
        return 0 if generator is None else int(generator.get_state().nbytes)
