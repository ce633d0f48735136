"""Random requests of three threads on three streams, beside a checker that knows nothing of the pool."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest

from tests.cpu.pool.cuda.fake import Fake

STREAMS = (20, 21, 22)
SIZES = [64, 100, 1000, 3000]
ARENA_NBYTES = 210_000


class Checker:
    """No two live buffers share a byte; what is written to one is there when it is freed; a range of an arena is given again
    only when its stream waits for all that other streams did with it.
    """

    def __init__(self, cuda: Fake) -> None:
        self.cuda, self.failed, self.checked_waits = cuda, list[str](), 0
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}
        self._buffers: list[tuple[int, int, int]] = []  # (handle, bytes, tag)
        self._used: list[tuple[int, int, int, int]] = []  # (begin, end, stream that used it, what it was given by then)

    def allocate(self, nbytes: int, stream: int, tag: int) -> None:
        handle = self.cuda.allocate(nbytes)
        at = self.cuda.data(handle)
        with self._lock:
            if any(at < other + size and other < at + nbytes for other, size in self._live.items()):
                self.failed.append(f"{nbytes} bytes at {at} are of another buffer")
            self._live[at] = nbytes
            for begin, end, user, given in [each for each in self._used if each[0] < at + nbytes and at < each[1]]:
                self._used.remove((begin, end, user, given))
                self.checked_waits += user != stream
                if user != stream and self.cuda.waits(stream, user) < given:
                    self.failed.append(f"stream {stream} does not wait for {user}")
        ctypes.memset(at, tag, nbytes)
        with self._lock:
            self._buffers.append((handle, nbytes, tag))

    def free(self, which: random.Random) -> None:
        with self._lock:
            if not self._buffers:
                return
            handle, nbytes, tag = self._buffers.pop(which.randrange(len(self._buffers)))
        at, user = self.cuda.data(handle), which.choice(STREAMS)
        if ctypes.string_at(at, nbytes) != bytes([tag]) * nbytes:
            self.failed.append(f"{nbytes} bytes at {at} were overwritten")
        self.cuda.give(user)
        self.cuda.record_stream(handle, user)
        with self._lock:
            del self._live[at]
            if self.cuda.block_nbytes(at) == ARENA_NBYTES:
                self._used.append((at, at + nbytes, user, self.cuda.given(user)))
        self.cuda.delete(handle)

    def free_all(self) -> None:
        while self._buffers:
            self.free(random.Random(0))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_three_threads_ask_for_no_byte_is_given_twice(cuda: Fake, seed: int) -> None:
    rng = random.Random(seed)
    plans = {stream: [rng.choice(SIZES) for _ in range(3334)] for stream in STREAMS}
    for stream, sizes in plans.items():
        pool = cuda.pool(stream)
        offsets: list[int | None] = [rng.choice([None, *range(0, 200_000, 512)]) for _ in sizes]
        assert pool.begin(pool.add(sizes, offsets), ARENA_NBYTES)
    checker = Checker(cuda)

    def work(stream: int) -> None:
        own = random.Random(100 * seed + stream)
        cuda.on(0, stream)
        for planned in plans[stream]:
            checker.allocate(planned if own.random() < 0.9 else own.choice(SIZES), stream, own.randrange(256))
            for _ in range(own.choice([0, 0, 1, 2])):
                checker.free(own)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in STREAMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checker.free_all()
    assert not checker.failed, checker.failed[:3]
    assert sum(cuda.pool(stream).counts().served for stream in STREAMS) > 1000 and checker.checked_waits > 500
