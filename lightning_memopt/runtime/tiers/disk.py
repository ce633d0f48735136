"""The disk tier, for any device: a file, a thread that writes it and a thread that reads it.

On the CPU the system writes directly from the tensor's memory and reads directly into it. From and to other devices, bytes pass
through `Staging`. A copy ends on its thread, so the host waits for that thread. If the device has streams, events ensure T1 and
T3. The system's page cache may hold parts of the file in memory, and gives that memory back when programs need it. A file in a
directory in memory (tmpfs) takes memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.device.places import current, on_host
from lightning_memopt.errors import OffloadError
from lightning_memopt.record import uncompiled
from lightning_memopt.runtime.tiers.base import buffer, check_flat, check_process, closed, full, usage
from lightning_memopt.runtime.tiers.room import Room
from lightning_memopt.runtime.tiers.scratch import Scratch
from lightning_memopt.runtime.tiers.space import Piece, Space
from lightning_memopt.runtime.tiers.staging import Staging
from lightning_memopt.runtime.tiers.stopwatch import Stopwatch
from lightning_memopt.runtime.tiers.streams import marked
from lightning_memopt.runtime.tiers.worker import Copy, Worker

ALIGN_NBYTES = 4096


class DiskTier:
    """A tier of `capacity_nbytes` in a nameless file in `directory` (None: the system's directory for temporary files).

    `limit_nbytes`: the most bytes that this process may have in such tiers. Raises OffloadError for more than that, or if the
    file cannot be made.
    """

    name = "disk"

    def __init__(
        self,
        capacity_nbytes: int,
        directory: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        *,
        staging: tuple[Staging, Staging] | None = None,
        limit_nbytes: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._space = Space(capacity_nbytes, ALIGN_NBYTES)
        self.capacity_nbytes = self._space.capacity_nbytes
        self._room = Room(self.name, self.capacity_nbytes, limit_nbytes)
        self.file = Scratch(self.capacity_nbytes, directory)
        self.copied = Stopwatch()
        if staging is None and not on_host(self.device):
            staging = Staging(self.device), Staging(self.device)
        self.staging = staging
        around = partial(current, self.device)
        self._writer, self._reader = Worker("memopt-io-out", around), Worker("memopt-io-in", around)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pieces: set[Piece] = set()  # of all that is parked here: pieces must outlive their owners, to call back
        self._released: deque[Piece] = deque()  # of storages that were released or freed
        self._closing = False
        self._held = self._pid, self.file, self._writer, self._reader, staging
        self._finalizer = weakref.finalize(self, _end, *self._held)

    @property
    def used_nbytes(self) -> int:
        """Bytes in use, in multiples of 4096."""
        with self._lock:
            self._reclaim()
            return self._space.used_nbytes

    def store(self, t: Tensor, what: str) -> _DiskParked:
        self.check(what)
        check_flat(t)
        parked = _DiskParked(self, t, what)
        if parked.nbytes:
            with self._lock:
                self._reclaim()
                self._pieces.add(parked.piece)
                if self._space.take(parked.nbytes, parked.piece) is None:
                    parked.give_up()
                    raise full(self.name, what, parked.nbytes, self._space)
        parked.begin()
        return parked

    def piece_of(self, parked: _DiskParked) -> Piece:
        """The piece for a storage that is about to be parked. Its callback runs no Python code, so it can lose no interrupt."""
        return Piece(parked, self._released.append, parked.nbytes)

    def close(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._closing = True  # writes that are still queued fail; all other copies end
            _end(*self._held)
            self._finalizer.detach()
            self._room.give()

    def check(self, what: str) -> None:
        """Raise OffloadError in a forked process, or if the tier is closed."""
        check_process(self.name, self._pid)
        if self._closing:
            raise closed(self.name, what)

    def submit(self, parked: _DiskParked, copy: Copy, *, out: bool) -> None:
        """Queue a copy: `out` on the thread that writes, else on the thread that reads."""
        with self._lock:
            if self._closing:  # the threads take no more copies from their queues
                raise closed(self.name, parked.what)
            parked.copies += 1
            (self._writer if out else self._reader).submit(copy)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` to the file, timed."""
        with self.copied.running():
            self.file.write(data, offset)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from the file, timed."""
        with self.copied.running():
            self.file.read(into, offset)

    def ended(self, parked: _DiskParked) -> None:
        """A copy of this storage has ended."""
        with self._lock:
            parked.copies -= 1
            self._reclaim()

    def wanted(self, parked: _DiskParked) -> bool:
        """Whether the bytes that are about to be written can still be asked for."""
        with self._lock:
            return not self._closing and (parked.copies > 1 or not parked.released)

    def release(self, parked: _DiskParked) -> None:
        """T5. A destructor may call this, even while its own thread has the lock. Then the next `_reclaim` does the work."""
        self._released.append(parked.piece)
        if not self._lock.locked():
            with self._lock:  # an interrupt between `acquire` and `try` would leave it taken for ever
                self._reclaim()

    def _reclaim(self) -> None:
        """Free the space of released storages that no copy uses. The caller has the lock."""
        for _ in range(len(self._released)):
            piece = self._released[0]
            parked = piece()
            if parked is not None and parked.copies and not piece.given:
                self._released.rotate(-1)
                continue
            if piece.offset is not None and not piece.given:
                self._space.give(piece.offset, piece.nbytes, piece)
            self._pieces.discard(piece)
            self._released.popleft()

    def failed(self, parked: _DiskParked, error: BaseException, verb: str) -> OffloadError:
        """The error to raise for the error of a copy; `verb`: "to" or "from" the tier (T6)."""
        if isinstance(error, OffloadError):
            return OffloadError(str(error))
        with self._lock:
            use = usage(self._space)
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        lost = "Nothing is lost, it is still on the device" if verb == "to" else "Nothing has been updated in this step"
        return OffloadError(
            f"{parked.what}: copying {parked.nbytes} bytes {verb} the disk tier failed: {reason} ({use}). "
            f"{lost}; see to the disk, or offload to another directory"
        )


class _DiskParked:
    """A storage in the disk tier (`Stored`).

    what: its name in errors.
    nbytes: its size.
    piece: where it is in the file.
    copies: copies of it that are queued or under way, both out and back.
    released: its bytes are not needed any more.
    """

    released = True  # also if an interrupt ends the constructor: there is nothing to release

    def __init__(self, tier: DiskTier, t: Tensor, what: str) -> None:
        self._tier = tier
        self.what = what
        self.nbytes = t.numel()
        self.copies = 0
        self.piece = tier.piece_of(self)
        self._fetches: tuple[Copy, ...] = ()
        self._store = Copy(partial(self._write, t, self._ready()))  # T2: holds `t` until it has ended
        self.released = False

    @property
    def offset(self) -> int:
        return self.piece.offset or 0

    def begin(self) -> None:
        """Begin to store it. It has its piece."""
        if self.nbytes:
            self._tier.submit(self, self._store, out=True)
        else:
            self._store.run()

    def give_up(self) -> None:
        """It will not be stored: let go of its source, which would else be freed only by Python's collector."""
        self._store = Copy(_nothing)

    def _ready(self) -> Any:
        if self._tier.staging is None:
            return None
        streams = self._tier.staging[0].streams
        return marked(streams, streams.current_stream(self._tier.device))

    def _write(self, t: Tensor, ready: Any) -> None:
        if not self.nbytes:
            return
        tier = self._tier
        try:
            if not tier.wanted(self):
                if tier._closing:
                    raise closed(tier.name, self.what)
                raise OffloadError(f"{self.what} was released before it was stored; keep the object that `store` returned")
            if tier.staging is None:
                tier.write(buffer(t), self.offset)
            else:
                tier.staging[0].out(t, ready, lambda data, at: tier.write(data, self.offset + at))
        finally:
            tier.ended(self)

    def _read(self, out: Tensor, ready: Any) -> None:
        tier = self._tier
        try:
            self._store.wait()  # T3
            if self._store.error is not None:
                raise tier.failed(self, self._store.error, "to")
            if tier.staging is None:
                tier.read(buffer(out), self.offset)
            else:
                tier.staging[1].back(out, ready, lambda into, at: tier.read(into, self.offset + at))
        finally:
            tier.ended(self)

    def stored(self) -> bool:
        if self._store.ended and self._store.error is not None:
            raise self._tier.failed(self, self._store.error, "to") from self._store.error
        return self._store.ended

    def wait_stored(self) -> None:
        check_process(self._tier.name, self._tier._pid)
        self._store.wait()
        self.stored()

    def fetch(self, out: Tensor) -> None:
        self._tier.check(self.what)
        check_flat(out, self.nbytes)
        if self.released:
            raise OffloadError(f"{self.what}: it was released, and is not in the disk tier any more; keep it")
        if self.nbytes:
            copy = Copy(partial(self._read, out, self._ready()))
            self._tier.submit(self, copy, out=False)
            self._fetches += (copy,)  # after `submit`, so that nobody waits for a copy that an interrupt kept from it

    def wait_fetched(self) -> None:
        check_process(self._tier.name, self._tier._pid)
        fetches = self._fetches
        for copy in fetches:
            copy.wait()
        self._fetches = self._fetches[len(fetches) :]
        for copy in fetches:
            if copy.error is not None:
                raise self._tier.failed(self, copy.error, "from") from copy.error

    def release(self) -> None:
        if not self.released and os.getpid() == self._tier._pid:
            self.released = True
            self._tier.release(self)

    @uncompiled
    def __del__(self) -> None:
        self.release()


def _nothing() -> None:
    pass


def _end(pid: int, file: Scratch, writer: Worker, reader: Worker, staging: tuple[Staging, Staging] | None) -> None:
    if os.getpid() != pid:
        return  # T8: the threads and the file belong to the process that made the tier
    writer.close()
    reader.close()
    file.close()
    for direction in staging or ():
        direction.close()
