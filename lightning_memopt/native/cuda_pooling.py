"""The planned pools of CUDA streams: an allocator around torch's caching allocator (cuda.cpp).

Each stream has its own plan.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from lightning_memopt.cxx import BuildError
from lightning_memopt.device.backends import backend_of, current_stream
from lightning_memopt.device.places import current, indexed
from lightning_memopt.native.build import cuda_library
from lightning_memopt.native.pooling import Lane

CUDA_ALIGNMENT = 512
"""Bytes. It is torch's own alignment on CUDA (`kMinBlockSize`): with another one, kernels could take other paths and bits."""

_MOST_STREAMS = 64
_TRIES = 3


class StreamPool(Lane):
    """The planned pool of one stream, for requests of all threads on this stream."""

    def __init__(self, allocator: CudaAllocator, device: int, number: int) -> None:
        super().__init__(allocator.library, "memopt_stream", (number,))
        self.number = number
        self._allocator, self._device = allocator, device

    @property
    def live_nbytes(self) -> int:
        """All requested bytes of the device, without the arenas of other streams."""
        return self._allocator.live_nbytes(self._device) - sum(pool.arenas_nbytes()[0] for pool in self._others())

    def others_nbytes(self) -> int:
        """Bytes of the arenas of the other streams or, for a stream without an arena, the maximum bytes live in its log."""
        return sum(pool.arenas_nbytes()[0] or _most_live(pool.requests()) for pool in self._others())

    def forget(self) -> None:
        """End the window, and forget what was logged and requested, because it is not part of coming steps."""
        self._allocator.library.memopt_stream_forget(self.number)

    @property
    def active(self) -> bool:
        """Whether something was requested on the stream while a window of the device was open."""
        return bool(self._allocator.library.memopt_stream_active(self.number))

    def _others(self) -> list[StreamPool]:
        return [pool for pool in self._allocator.streams(self._device) if pool.number != self.number]

    def outside_window(self) -> _OutsideWindow:
        return _OutsideWindow(self._allocator, self.number)


def _most_live(log: Sequence[tuple[int, int | None]]) -> int:
    change = [0] * (len(log) + 1)
    for number, (nbytes, until) in enumerate(log):
        change[number] += nbytes
        if until is not None:
            change[until] -= nbytes
    return max(accumulate(change))


class _OutsideWindow:
    """A window that measures the maximum bytes outside of a stream's arenas since its last planned window began."""

    def __init__(self, allocator: CudaAllocator, number: int) -> None:
        self._allocator, self._number = allocator, number

    @property
    def peak_nbytes(self) -> int:
        return int(self._allocator.library.memopt_stream_beside(self._number))

    def reset(self) -> int:
        """Does nothing, because each planned window begins a new measurement."""
        return self.peak_nbytes

    def close(self) -> None:
        pass


class CudaAllocator:
    """The allocator around torch's. Raises BuildError if the library cannot be loaded or installed."""

    def __init__(self, path: Path) -> None:
        try:
            self.library = ctypes.CDLL(str(path))  # releases the interpreter's lock, because an arena may wait for the device
            integer, pointer = ctypes.c_int32, ctypes.c_void_p
            for name, result, arguments in (
                ("cuda_install", ctypes.c_int, ()),
                ("cuda_installed", ctypes.c_int, ()),
                ("cuda_request", pointer, (ctypes.c_int64, ctypes.c_int)),
                ("cuda_free", None, (pointer, ctypes.c_int)),
                ("device_live", ctypes.c_int64, (integer,)),
                ("stream_number", integer, (integer, pointer)),
                ("streams_of", integer, (integer, integer, ctypes.POINTER(integer))),
                ("stream_active", integer, (integer,)),
                ("stream_forget", None, (integer,)),
                ("stream_beside", ctypes.c_int64, (integer,)),
            ):
                function = getattr(self.library, f"memopt_{name}")
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded ({error})") from None
        if not self.library.memopt_cuda_install():
            raise BuildError("torch's allocator for CUDA is not its own caching allocator")

    @property
    def installed(self) -> bool:
        """Whether torch allocates through it."""
        return bool(self.library.memopt_cuda_installed())

    def stream(self, device: int, handle: int) -> StreamPool:
        """The pool of a stream; handle: its `cudaStream_t`. Raises BuildError if too many streams of the device have pools."""
        number = self.library.memopt_stream_number(device, handle)
        if number < 0:
            raise BuildError(f"too many streams have a planned pool on cuda:{device}")
        return StreamPool(self, device, number)

    def streams(self, device: int) -> list[StreamPool]:
        """The pools of all known streams of a device."""
        numbers = (ctypes.c_int32 * _MOST_STREAMS)()
        count = min(self.library.memopt_streams_of(device, _MOST_STREAMS, numbers), _MOST_STREAMS)
        return [StreamPool(self, device, number) for number in numbers[:count]]

    def live_nbytes(self, device: int) -> int:
        """All requested bytes of a device, including the arenas."""
        return int(self.library.memopt_device_live(device))

    def check(self, device: int, handle: int) -> None:
        """`_check_once`, up to three times, because it fails when another thread allocates at the same time."""
        for attempt in range(_TRIES):
            try:
                return self._check_once(device, handle)
            except BuildError:
                if attempt == _TRIES - 1:
                    raise

    def _check_once(self, device: int, handle: int) -> None:
        """Raise BuildError if known requests, by all ways in which torch makes them, do not get their planned addresses, or if
        torch counts other bytes afterwards than before. Device and stream must be the current ones.
        """
        pool = self.stream(device, handle)
        before, sizes = pool.live_nbytes, [1000, 513, 4096]
        pool.log()
        for door, size in enumerate(sizes):
            self._free(self._request(size, door), door)
        logged = pool.requests()
        pool.log_ends()
        if logged != [(size, number + 1) for number, size in enumerate(sizes)]:
            raise BuildError(f"it logs other requests than were made ({logged})")
        plan = pool.add(sizes, [0, 1024, 2048])
        try:
            if not pool.begin(plan, 6144):
                raise BuildError("there is no memory for a check")
            addresses = [self._request(size, door) for door, size in enumerate(sizes)]
            for door, address in enumerate(addresses):
                self._free(address, door)
        finally:
            pool.end(free=True)
            pool.remove(plan)
        if [address - addresses[0] for address in addresses] != [0, 1024, 2048] or pool.counts().served != len(sizes):
            raise BuildError(f"requests do not get their planned addresses ({pool.counts()})")
        if pool.live_nbytes != before:
            raise BuildError(f"torch counts {pool.live_nbytes} bytes after the check, and {before} before it")

    def _request(self, nbytes: int, door: int) -> int:
        address: int | None = self.library.memopt_cuda_request(nbytes, door)
        if address is None:
            raise BuildError("there is no memory for a check")
        return address

    def _free(self, address: int, door: int) -> None:
        self.library.memopt_cuda_free(address, door)


class _Process:
    """The state of the process. lock: held while the allocator is installed, which is tried once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.allocator: CudaAllocator | None = None
        self.failed: str | None = None  # why it cannot be installed; the error itself would keep frames alive
        self.checked: set[int] = set()


_process = _Process()


def cuda_allocator(device: torch.device, say: Callable[[str], None]) -> CudaAllocator:
    """The allocator, built and installed on first use, and checked once on each device. Raises BuildError."""
    index = indexed(device).index
    with _process.lock:
        if _process.failed is not None:
            raise BuildError(_process.failed)
        try:
            if _process.allocator is None:
                library = cuda_library(say)
                backend_of(device).streams.init()  # creates torch's allocator, which is wrapped
                _process.allocator = CudaAllocator(library)
            if index not in _process.checked:
                with current(indexed(device)):
                    _process.allocator.check(index, current_stream(indexed(device)).cuda_stream)
                _process.checked.add(index)
        except BuildError as error:
            _process.failed = str(error)
            raise
        if not _process.allocator.installed:
            raise BuildError("another allocator was installed later")
        return _process.allocator
