"""One thread that carries out copies in the order in which they were given to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Copy:
    """A copy that a worker carries out. It ends once. Anybody may wait for it, and repeat a wait that was interrupted (T7).

    error: the exception that the copy raised, or None.
    """

    __slots__ = ("_ended", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._work is not None:
                self._work()
        except BaseException as error:  # the worker's thread has no caller: those who wait for the copy raise it
            self.error = error.with_traceback(None)  # its frames would hold the tensor
        finally:
            self._work = None
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()


class Worker:
    """A daemon thread called `name`; `close` waits until all that was submitted has ended."""

    def __init__(self, name: str) -> None:
        self._copies: SimpleQueue[Copy | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._copies,), name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        self._copies.put(copy)

    def close(self) -> None:
        self._copies.put(None)  # after a second `close`, nobody reads this
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(copies: SimpleQueue[Copy | None]) -> None:
    while (copy := copies.get()) is not None:
        copy.run()
