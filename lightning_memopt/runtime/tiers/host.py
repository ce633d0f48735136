"""The host tier: page-locked host memory, a stream for each direction, events instead of waits (Dymem, HPDC 2020, 3.2).

The host never waits, because copies only need an order between streams. On the CPU the same code copies from memory to memory.
That saves no memory, but tests can compare the bytes that come back with those that were stored.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.record import uncompiled
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.runtime.tiers.base import check_flat, check_process, closed, full, usage
from lightning_memopt.runtime.tiers.room import Room
from lightning_memopt.runtime.tiers.space import Space
from lightning_memopt.runtime.tiers.stopwatch import Stopwatch
from lightning_memopt.runtime.tiers.streams import HostPool, marked, queued_on

ALIGN_NBYTES = 512


class HostTier:
    """A tier of `capacity_nbytes` of page-locked host memory beside `device`.

    `streams` has the classes of streams and events: torch's module of the device, unless a test passes another.
    `limit_nbytes`: the most bytes that this process may have in such tiers. Raises OffloadError for more than that, or than the
    machine has left.
    """

    name = "host"

    def __init__(
        self, capacity_nbytes: int, device: torch.device | str, *, streams: Any = None, limit_nbytes: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self.streams = streams or backend_of(self.device).streams
        self.copied = Stopwatch(event=partial(self.streams.Event, enable_timing=True))
        self._queues = streams is not None or not on_host(self.device)
        self._space = Space(capacity_nbytes, ALIGN_NBYTES)
        self.capacity_nbytes = self._space.capacity_nbytes
        self._room = Room(self.name, self.capacity_nbytes, limit_nbytes)
        self._pool = HostPool(self.capacity_nbytes, self.device)
        self.out, self.back = self.streams.Stream(self.device), self.streams.Stream(self.device)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._released: deque[_HostParked] = deque()
        self._holding: list[tuple[Any, Tensor]] = []
        """(event, tensor): until the event, a copy of a released storage uses the tensor's memory."""
        self._closed = False

    @property
    def used_nbytes(self) -> int:
        """Bytes in use, in multiples of 512."""
        with self._lock:
            self._reclaim()
            return self._space.used_nbytes

    def store(self, t: Tensor, what: str) -> _HostParked:
        self.check(what)
        check_flat(t)
        nbytes, offset = t.numel(), 0
        with self._lock:
            self._reclaim()
            if nbytes:
                taken = self._space.take(nbytes)
                if taken is None:
                    raise full(self.name, what, nbytes, self._space)
                offset = taken
        return _HostParked(self, t, what, offset)

    def close(self) -> None:
        if os.getpid() != self._pid or self._closed:
            return
        for stream in (self.out, self.back):
            marked(self.streams, stream).synchronize()
        with self._lock:
            self._holding.clear()
            self._closed = True
        self._pool.close()
        self._room.give()

    def check(self, what: str) -> None:
        """Raise OffloadError in a forked process, or if the tier is closed."""
        check_process(self.name, self._pid)
        if self._closed:
            raise closed(self.name, what)

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """A piece of the tier's memory, flat uint8."""
        return self._pool.bytes[offset : offset + nbytes]

    def copy(self, to: Tensor, of: Tensor, stream: Any) -> None:
        """Queue a copy on `stream`, the current stream, and time it."""
        with self.copied.running(stream if self._queues else None):
            streams_module.copy(to, of)

    @contextlib.contextmanager
    def as_offload_error(self, parked: _HostParked, verb: str) -> Iterator[None]:
        """T6: turn the device's errors, of this copy or of earlier work, into OffloadError that names the copy.

        `verb`: "to" or "from" the tier.
        """
        try:
            yield
        except OffloadError:
            raise
        except RuntimeError as error:
            raise OffloadError(
                f"{parked.what}: copying {parked.nbytes} bytes {verb} the host tier failed ({usage(self._space)}): {error}; "
                "use offload='disk' or 'none'"
            ) from error

    def release(self, parked: _HostParked) -> None:
        """A destructor may call this anywhere, because it does not use the device."""
        self._released.append(parked)

    def reclaim(self) -> None:
        """Free the space of released storages, and the memory of copies that have ended."""
        if self._released or self._holding:
            with self._lock:
                self._reclaim()

    def _reclaim(self) -> None:
        """T5: a later copy out into the same space waits for all copies back from it. Earlier copies out are on the same stream
        as the later one. The caller has the lock.
        """
        while self._released:
            parked = self._released.popleft()
            if parked.given or self._closed:
                continue
            parked.given = True
            if parked.fetched is not None:
                self.out.wait_event(parked.fetched)
                self._holding += [(parked.fetched, out) for out in parked.outs]
            if parked.source is not None:
                self._holding.append((parked.done, parked.source))
            parked.outs, parked.source = [], None
            if parked.nbytes:
                self._space.give(parked.offset, parked.nbytes)
        self._holding = [held for held in self._holding if not held[0].query()]


class _HostParked:
    """A storage in the host tier (`Stored`).

    what: its name in errors.
    nbytes: its size.
    offset: where it begins in the tier's memory.
    source: the tensor that is copied out; None when that copy is known to have ended (T2).
    done: the event after the copy out.
    outs: targets of copies back for which nobody has waited yet.
    fetched: the event after the last copy back, None before the first. All copies back are on one stream.
    given: whether its space is free again.
    """

    _released = True  # until it has all that its release reads: an interrupt may end the constructor

    def __init__(self, tier: HostTier, t: Tensor, what: str, offset: int) -> None:
        self._tier = tier
        self.what = what
        self.nbytes = t.numel()
        self.offset = offset
        self.given = False
        self.source: Tensor | None = t
        self.fetched: Any = None
        self.outs: list[Tensor] = []
        streams = tier.streams
        self.done = streams.Event()
        self._released = False
        with tier.as_offload_error(self, "to"):
            produced = marked(streams, streams.current_stream(tier.device))
            with queued_on(streams, tier.out, tier.device):
                tier.out.wait_event(produced)  # T1
                if self.nbytes:
                    tier.copy(tier.bytes_at(offset, self.nbytes), t, tier.out)
                self.done.record(tier.out)

    def stored(self) -> bool:
        check_process(self._tier.name, self._tier._pid)
        with self._tier.as_offload_error(self, "to"):
            if self.source is not None and self.done.query():
                self.source = None
            self._tier.reclaim()
        return self.source is None

    def wait_stored(self) -> None:
        """See `Stored`. The host does not wait. Later work on the current stream may use the source's memory again."""
        check_process(self._tier.name, self._tier._pid)
        with self._tier.as_offload_error(self, "to"):
            self._current().wait_event(self.done)
            self._tier.reclaim()
        self.source = None

    def fetch(self, out: Tensor) -> None:
        tier, streams = self._tier, self._tier.streams
        tier.check(self.what)
        check_flat(out, self.nbytes)
        if self._released:
            raise OffloadError(f"{self.what}: it was released, and is not in the host tier any more; keep it")
        if not self.nbytes:
            return
        with tier.as_offload_error(self, "from"):
            tier.reclaim()
            free = marked(streams, self._current())
            with queued_on(streams, tier.back, tier.device):
                tier.back.wait_event(self.done)  # T3
                tier.back.wait_event(free)  # T3
                self.outs.append(out)
                try:
                    tier.copy(out, tier.bytes_at(self.offset, self.nbytes), tier.back)
                finally:  # T7: also after an interrupt, the memory of `out` is not used again before the copy has ended
                    self.fetched = marked(streams, tier.back)

    def wait_fetched(self) -> None:
        check_process(self._tier.name, self._tier._pid)
        with self._tier.as_offload_error(self, "from"):
            if self.fetched is not None:
                n_outs = len(self.outs)
                self._current().wait_event(self.fetched)
                del self.outs[:n_outs]
            self._tier.reclaim()

    def release(self) -> None:
        if not self._released and os.getpid() == self._tier._pid:
            self._released = True
            self._tier.release(self)

    def _current(self) -> Any:
        return self._tier.streams.current_stream(self._tier.device)

    @uncompiled
    def __del__(self) -> None:
        self.release()
