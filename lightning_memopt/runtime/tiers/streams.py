"""Streams, events and page-locked memory of a device. Torch's streams and events for the CPU do nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.device.backends import backend_of, current_stream
from lightning_memopt.device.places import current
from lightning_memopt.errors import OffloadError, UnsupportedError
from lightning_memopt.record.below import below_autograd
from lightning_memopt.units import cgroup_left_nbytes, format_nbytes, host_memory_nbytes, round_up

_MEMINFO, _VERSION = Path("/proc/meminfo"), Path("/proc/version")


def marked(streams: Any, stream: Any) -> Any:
    """An event after all work that is queued on a stream now."""
    event = streams.Event()
    event.record(stream)
    return event


class OwnStreams(dict[torch.device, Any]):
    """A stream of each device, made when it is first asked for: `streams[device]`."""

    def __missing__(self, device: torch.device) -> Any:
        self[device] = backend_of(device).streams.Stream(device)
        return self[device]


@contextlib.contextmanager
def queued_on(streams: Any, stream: Any, device: torch.device) -> Iterator[None]:
    """Within, ops are queued on `stream`, of this device, and neither dispatch modes nor autograd see them.

    The device is made the current one. Otherwise, when torch restores the stream that was current, it would open a context on
    another device, which takes hundreds of MiB there.
    """
    with below_autograd(), current(device), streams.stream(stream):
        yield


def copy(to: Tensor, of: Tensor) -> None:
    """Queue a copy on the current stream."""
    to.copy_(of, non_blocking=True)


def freed_in_order(t: Tensor) -> None:
    """Before the memory of `t` is freed: its next use follows the work that is on the current stream now. Torch's allocator
    orders it only after the stream on which it was taken; where that is the current one, this does nothing.
    """
    stream = current_stream(t.device)
    if stream is not None:
        t.record_stream(stream)


def empty_storage(t: Tensor) -> None:
    """Free the memory of a storage of torch's allocator."""
    freed_in_order(t)
    t.untyped_storage().resize_(0)


def wait_on_host(device: torch.device) -> None:
    """Wait for the current stream on the host, so that streams which do not wait for it may read what it has written."""
    stream = current_stream(device)
    if stream is not None:
        stream.synchronize()


class HostPool:
    """`nbytes` of host memory, allocated once. A CUDA device copies from and to it while the host goes on.

    The pages are registered with the driver, because torch's own page-locked memory is rounded up to a power of two. No other
    memory is on these pages, because the driver locks whole pages, and refuses one that is locked already. If pages cannot be
    locked (`ulimit -l`, containers, WSL), there is one warning, and the memory is pageable: copies then block the host, and
    results are the same. `locked` says whether they are. Raises OffloadError for more bytes than the machine has left.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        available_nbytes = left_nbytes()
        if nbytes > available_nbytes:
            raise OffloadError(
                f"{nbytes} bytes ({format_nbytes(nbytes)}) of host memory were asked for, and {available_nbytes} bytes "
                f"({format_nbytes(available_nbytes)}) are left on this machine; ask for less"
            )
        locks = nbytes > 0 and backend_of(device).locks_pages
        try:
            pages = _pages(nbytes) if locks else torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever is the default
        except (OSError, RuntimeError) as error:
            raise OffloadError(
                f"the system gives no {nbytes} bytes of host memory: {error}; set a larger budget, or offload='disk'"
            ) from error
        self.bytes = pages[:nbytes]
        self.locked = locks and _lock(pages, device)
        self._unlock = weakref.finalize(self, _unlock, os.getpid(), pages, device, self.locked)

    def close(self) -> None:
        """Free the memory. No copy may be under way."""
        self._unlock()
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


def _pages(nbytes: int) -> Tensor:
    """Whole pages of the CPU's memory with at least `nbytes`, on a new storage that begins with them, because torch looks at a
    storage's beginning to see whether a tensor is pinned. (Torch aligns memory only to 64 bytes.)
    """
    pages = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _lock(memory: Tensor, device: torch.device) -> bool:
    code = backend_of(device).lock_pages(memory.data_ptr(), memory.numel())
    if code != 0:
        _forget_error(device)
        nbytes = format_nbytes(memory.numel())
        warnings.warn(
            f"{nbytes} of host memory could not be page-locked (CUDA error {code}; see `ulimit -l`): "
            "copies will hold up the host, and will not overlap with compute",
            stacklevel=4,
        )
    return code == 0


def _unlock(pid: int, memory: Tensor, device: torch.device, locked: bool) -> None:
    if locked and os.getpid() == pid and backend_of(device).unlock_pages(memory.data_ptr()) != 0:
        _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """Clear the error of a failed call, so that no op of the user raises it: CUDA keeps its last error until it is read, and
    torch reads it after each kernel.
    """
    with below_autograd(), contextlib.suppress(RuntimeError):
        _launch(device)


def _launch(device: torch.device) -> None:
    torch.ones(1, device=device)


def left_nbytes() -> int:
    """Bytes of host memory that are left on this machine, in its container too; all host memory if the system does not say how
    much is left. Under WSL, Windows locks only half of the memory.
    """
    try:
        total = host_memory_nbytes()
    except UnsupportedError:
        return 1 << 62
    left = [total // 2 if _is_wsl() else total]
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
    in_container = cgroup_left_nbytes()
    return min(left if in_container is None else [*left, in_container])


def _is_wsl() -> bool:
    """Whether Linux runs inside Windows."""
    try:
        return "microsoft" in _VERSION.read_text(encoding="ascii", errors="replace").lower()
    except OSError:
        return False
