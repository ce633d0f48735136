"""What the garbage collector knows is looked at without harm to other threads."""

from __future__ import annotations

import threading
import time

from lightning_memopt.live_objects import live_objects


class Known:
    pass


class Derived(Known):
    pass


def test_all_objects_of_a_class() -> None:
    kept = [Known(), Derived()]
    assert set(map(id, live_objects(lambda kind: Known in kind.__mro__))) == set(map(id, kept))
    assert live_objects(lambda kind: kind is Derived) == kept[1:]
    assert not live_objects(lambda kind: False)


def test_a_thread_that_fills_a_tuple_goes_on() -> None:
    """Without care, most of these calls raise SystemError in the other thread: it cannot resize a tuple that a list has."""
    errors, over, built = list[str](), threading.Event(), list[int]()
    junk = [[i] for i in range(100_000)]

    def slowly(i: int) -> int:
        for _ in range(20_000):
            pass
        return i

    def build() -> None:
        while not over.is_set():
            try:
                built.append(len(tuple(map(slowly, range(15)))))
            except SystemError as error:
                errors.append(str(error))

    thread = threading.Thread(target=build)
    thread.start()
    ends = time.monotonic() + 2
    while time.monotonic() < ends:
        live_objects(lambda kind: kind is Known)
    over.set()
    thread.join()
    assert built and not errors and junk
