"""The native pool alone: what it gives is planned, aligned and free, whatever is asked for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_memopt.native import Pool, counter, install

pytestmark = pytest.mark.skipif(install() is None, reason="no C++ compiler")


class Served(Pool):
    """The pool, and tensors that ask for its addresses."""

    def __init__(self) -> None:
        counts = counter()
        assert counts is not None
        super().__init__(counts)
        self._tensors: dict[int, torch.Tensor] = {}

    def take(self, nbytes: int) -> int | None:
        """The address of a new tensor; None if it is not in an arena: then it is freed at once."""
        before = self.arenas_nbytes()
        t = torch.empty(nbytes, dtype=torch.uint8)
        if self.arenas_nbytes() == before:
            return None
        self._tensors[t.data_ptr()] = t
        return t.data_ptr()

    def give_back(self, at: int) -> None:
        """Free what `take` returned."""
        del self._tensors[at]


@pytest.fixture
def native() -> Iterator[Served]:
    native = Served()
    yield native
    native.end(free=True)
    assert native.arenas_nbytes() == (0, 0)


def stacked(sizes: list[int]) -> list[int | None]:
    """Offsets, one above the other."""
    offsets, top = list[int | None](), 0
    for size in sizes:
        offsets.append(top)
        top += -(-size // 64) * 64
    return offsets


def begin_of_arena(native: Served, nbytes: int) -> int:
    """The address of an arena of this size, which the next window uses."""
    number = native.add([64], [0])
    assert native.begin(number, nbytes)
    at = native.take(64)
    assert at is not None
    native.give_back(at)
    native.remove(number)
    return at


class Model:
    """Addresses that are live, in Python: each is planned for its size, and no two of them share a byte."""

    def __init__(self, native: Served, planned: set[tuple[int, int]], base: int) -> None:
        self.native, self.planned, self.base = native, planned, base
        self.live: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        at = self.native.take(nbytes)
        if at is None:
            return None
        assert (at - self.base, nbytes) in self.planned and at % 64 == 0
        assert all(at + nbytes <= other or other + size <= at for other, size in self.live.items()), "two share bytes"
        self.live[at] = nbytes
        return at

    def give_back(self, at: int) -> None:
        self.native.give_back(at)
        del self.live[at]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_for_no_byte_is_given_twice(native: Served, seed: int) -> None:
    """Random plans, some with overlapping offsets, and steps that repeat, skip, add, resize and keep requests."""
    rng = random.Random(seed)
    sizes = [rng.choice([64, 100, 256, 1000, 4096]) for _ in range(200)]
    offsets: list[int | None] = [rng.choice([None, *range(0, 40_000, 64)]) for _ in sizes]
    arena_nbytes = 50_000
    number = native.add(sizes, offsets)
    model = Model(native, set(zip(offsets, sizes, strict=True)), begin_of_arena(native, arena_nbytes))  # type: ignore[arg-type]
    for _ in range(8):
        assert native.begin(number, arena_nbytes)
        asked = 0
        for size in sizes:
            kind = rng.random()
            if kind < 0.05:
                continue
            model.take(size if kind < 0.9 else rng.choice([64, 333, 5000]))
            asked += 1
            while model.live and rng.random() < 0.5:
                model.give_back(rng.choice(list(model.live)))
        counts = native.counts()
        assert counts.served + counts.outside + counts.differs + counts.occupied == asked
        assert native.arenas_nbytes() == (arena_nbytes, sum(model.live.values()))
    native.end(free=True)
    for at in list(model.live):
        model.give_back(at)
    native.remove(number)


def test_a_step_as_planned_gets_every_planned_address(native: Served) -> None:
    sizes = [64, 128, 64, 4096, 128]
    number = native.add(sizes, stacked(sizes))
    for _ in range(3):
        native.begin(number, 8192)
        taken = [native.take(size) for size in sizes]
        assert all(at is not None for at in taken)
        assert [at - taken[0] for at in taken] == stacked(sizes)  # type: ignore[operator]
        for at in taken:
            native.give_back(at)  # type: ignore[arg-type]
        counts = native.counts()
        assert (counts.served, counts.fallen, counts.skipped, counts.served_nbytes) == (5, 0, 0, sum(sizes))
    native.remove(number)


@pytest.mark.parametrize(
    ("change", "fallen", "skipped"),
    [
        ("an extra request", 1, 0),
        ("three extra requests", 3, 0),
        ("one of another size", 1, 1),
        ("one that does not come", 1, 2),  # the one behind it falls through: only a pair of requests shows where the step is
        ("ten that do not come", 1, 11),
        ("all of another size", 100, 100),
    ],
)
def test_one_odd_request_does_not_lose_the_step(native: Served, change: str, fallen: int, skipped: int) -> None:
    sizes = [64 * (1 + i) for i in range(100)]
    number = native.add(sizes, stacked(sizes))
    arena_nbytes = sum(sizes)
    asked = {
        "an extra request": [*sizes[:40], 7, *sizes[40:]],
        "three extra requests": [*sizes[:40], 7, 8, 9, *sizes[40:]],
        "one of another size": [*sizes[:40], 7, *sizes[41:]],
        "one that does not come": [*sizes[:40], *sizes[41:]],
        "ten that do not come": [*sizes[:40], *sizes[50:]],
        "all of another size": [size + 1 for size in sizes],
    }[change]
    native.begin(number, arena_nbytes)
    taken = [native.take(size) for size in asked]
    native.end(free=False)
    counts = native.counts()
    assert (counts.fallen, counts.skipped) == (fallen, skipped)
    assert counts.served == len(asked) - fallen == sum(at is not None for at in taken)
    for at in taken:
        if at is not None:
            native.give_back(at)
    native.remove(number)


def test_an_occupied_range_falls_through(native: Served) -> None:
    number = native.add([64, 64, 64], [0, 64, 32 * 64])
    native.begin(number, 4096)
    first = native.take(64)
    native.begin(number, 4096)  # the next step: the first buffer is still there
    assert native.take(64) is None and native.take(64) is not None
    counts = native.counts()
    assert (counts.occupied, counts.served, counts.occupied_nbytes) == (1, 1, 64)
    second = first + 64  # type: ignore[operator]
    native.give_back(first)  # type: ignore[arg-type]
    native.give_back(second)
    native.remove(number)


def test_other_threads_and_other_times_are_served_by_the_ordinary_allocator(native: Served) -> None:
    number = native.add([64, 64], [0, 64])
    assert native.take(64) is None, "there is no window"
    native.begin(number, 4096)
    elsewhere: list[int | None] = []
    thread = threading.Thread(target=lambda: elsewhere.append(native.take(64)))
    thread.start()
    thread.join()
    at = native.take(64)
    assert elsewhere == [None] and at is not None
    counts = native.counts()
    assert (counts.other_threads, counts.other_threads_nbytes, counts.fallen) == (1, 64, 0)
    native.give_back(at)
    native.remove(number)
    assert native.take(64) is None, "its plan was removed"


def test_an_arena_lives_until_its_last_buffer(native: Served) -> None:
    small, large = native.add([64], [0]), native.add([64, 8192], [0, 64])
    native.begin(small, 4096)
    at = native.take(64)
    assert at is not None
    native.begin(large, 3 * 4096)  # too large for the arena
    assert native.arenas_nbytes() == (4 * 4096, 64)
    native.end(free=True)
    assert native.arenas_nbytes() == (4096, 64)
    native.begin(small, 4096)  # the arena that is still there is used again
    assert native.arenas_nbytes() == (4096, 64)
    native.end(free=True)
    native.give_back(at)
    assert native.arenas_nbytes() == (0, 0)
    native.remove(small)
    native.remove(large)


def test_the_log_says_when_tensors_were_freed(native: Served) -> None:
    def step() -> torch.Tensor:
        a = torch.empty(250)
        b = torch.empty(500)
        del a
        torch.empty(0)
        c = torch.empty(250)
        del b
        return c

    native.log()
    kept = step()
    assert native.logged == 3
    assert native.requests() == [(1000, 2), (2000, 3), (1000, None)]
    del kept
    native.log_ends()
    assert native.requests()[2] == (1000, 3)
    torch.empty(100)
    assert native.logged == 3


def test_a_tensor_may_grow_in_the_arena(native: Served) -> None:
    number = native.add([1000, 2000], [0, 1024])
    native.begin(number, 4096)
    t = torch.arange(250, dtype=torch.float32)  # asks for its 1000 bytes
    t.untyped_storage().resize_(2000)
    assert torch.equal(t, torch.arange(250, dtype=torch.float32))
    assert native.counts().served == 2 and native.arenas_nbytes() == (4096, 2000)
    del t
    native.end(free=True)
    native.remove(number)
