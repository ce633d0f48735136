"""The host tier: page-locked host memory, a stream for each direction, events instead of waiting (Dymem, HPDC 2020, 3.2).

Nothing here waits on the host: order between streams is all that copies need. On the CPU the same code copies from memory to
memory, which saves nothing, and shows that what goes out is what comes back.
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

from lightning_memopt.errors import OffloadError
from lightning_memopt.record import uncompiled
from lightning_memopt.runtime.tiers import streams as streams_module
from lightning_memopt.runtime.tiers.base import check_flat, check_process, closed, full, usage
from lightning_memopt.runtime.tiers.space import Space
from lightning_memopt.runtime.tiers.stopwatch import Stopwatch
from lightning_memopt.runtime.tiers.streams import HostPool, marked, queued_on, streams_of

ALIGN_NBYTES = 512


class HostTier:
    """`capacity_nbytes` of page-locked host memory beside `device`. Raises OffloadError for more than the machine has left.

    `streams`: what gives streams and events, the device's module of torch unless a test has another.
    """

    name = "host"

    def __init__(self, capacity_nbytes: int, device: torch.device | str, *, streams: Any = None) -> None:
        self.device = torch.device(device)
        self.streams = streams or streams_of(self.device)
        self.copied = Stopwatch(event=partial(self.streams.Event, enable_timing=True))
        self._queues = streams is not None or self.device.type != "cpu"
        self._space = Space(capacity_nbytes, ALIGN_NBYTES)
        self.capacity_nbytes = self._space.capacity_nbytes
        self._pool = HostPool(self.capacity_nbytes, self.device)
        self.out, self.back = self.streams.Stream(self.device), self.streams.Stream(self.device)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._released: deque[_HostParked] = deque()
        self._holding: list[tuple[Any, Tensor]] = []
        """(event, tensor): what released copies still read or write."""
        self._closed = False

    @property
    def used_nbytes(self) -> int:
        """Bytes that are taken, in multiples of 512."""
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
                found = self._space.take(nbytes)
                if found is None:
                    raise full(self.name, what, nbytes, self._space)
                offset = found
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

    def check(self, what: str) -> None:
        check_process(self.name, self._pid)
        if self._closed:
            raise closed(self.name, what)

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        return self._pool.bytes[offset : offset + nbytes]

    def copy(self, to: Tensor, of: Tensor, stream: Any) -> None:
        """Queue a copy on this stream, which is the current one."""
        with self.copied.running(stream if self._queues else None):
            streams_module.copy(to, of)

    @contextlib.contextmanager
    def naming(self, parked: _HostParked, verb: str) -> Iterator[None]:
        """T6: the device's errors, of this copy or of anything before it, say which copy met them."""
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
        """May be called by a destructor anywhere: nothing is asked of the device here."""
        self._released.append(parked)

    def reclaim(self) -> None:
        if self._released or self._holding:
            with self._lock:
                self._reclaim()

    def _reclaim(self) -> None:
        """T5: what will be stored in the place of what was released comes after all copies from there; those to there are on
        the same stream."""
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
    def __init__(self, tier: HostTier, t: Tensor, what: str, offset: int) -> None:
        self._tier = tier
        self.what = what
        self.nbytes = t.numel()
        self.offset = offset
        self.given = self._released = False
        self.source: Tensor | None = t
        """T2."""
        self.fetched: Any = None
        """The event after the last copy back; all of them are on one stream."""
        self.outs: list[Tensor] = []
        """Where copies go that nobody has waited for."""
        streams = tier.streams
        self.done = streams.Event()
        with tier.naming(self, "to"):
            produced = marked(streams, streams.current_stream(tier.device))
            with queued_on(streams, tier.out):
                tier.out.wait_event(produced)  # T1
                if self.nbytes:
                    tier.copy(tier.bytes_at(offset, self.nbytes), t, tier.out)
                self.done.record(tier.out)

    def stored(self) -> bool:
        check_process(self._tier.name, self._tier._pid)
        with self._tier.naming(self, "to"):
            if self.source is not None and self.done.query():
                self.source = None
            self._tier.reclaim()
        return self.source is None

    def wait_stored(self) -> None:
        """The host does not wait: the source's memory may be used again by what is queued on the current stream from now on."""
        check_process(self._tier.name, self._tier._pid)
        with self._tier.naming(self, "to"):
            self._current().wait_event(self.done)
            self._tier.reclaim()
        self.source = None

    def fetch(self, out: Tensor) -> None:
        tier, streams = self._tier, self._tier.streams
        tier.check(self.what)
        check_flat(out, self.nbytes)
        if self._released:
            raise OffloadError(f"{self.what}: it was released, and is not in the host tier any more; keep what is parked")
        if not self.nbytes:
            return
        with tier.naming(self, "from"):
            tier.reclaim()
            free = marked(streams, self._current())
            with queued_on(streams, tier.back):
                tier.back.wait_event(self.done)  # T3
                tier.back.wait_event(free)  # T3
                tier.copy(out, tier.bytes_at(self.offset, self.nbytes), tier.back)
            self.outs.append(out)
            self.fetched = marked(streams, tier.back)

    def wait_fetched(self) -> None:
        check_process(self._tier.name, self._tier._pid)
        with self._tier.naming(self, "from"):
            if self.fetched is not None:
                outs = len(self.outs)
                self._current().wait_event(self.fetched)
                del self.outs[:outs]
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
